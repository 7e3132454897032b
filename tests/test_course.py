"""Training that goes by what is learned: lengths that grow with the loss, the final decay, the end when a task is solved."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import crosscurrent.experiments.run as run_module
import crosscurrent.training.trainer as trainer_module
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run import run
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.training.course import Course
from crosscurrent.training.schedules import Growth
from tests.recipes import tiny_recipe

GROWTH = {"first": 3, "last": 6, "factor": 1.5, "loss_below": 100.0, "min_steps": 2}  # each length for two steps


class Stopped(BaseException):
    """Stands for a process that ends here."""


def growing(growth: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    changes["training"] = {"max_steps": 20, "decay_steps": 4, "eval_steps": 3} | changes.get("training", {})
    curriculum = {"max_length": {"growth": GROWTH | (growth or {})}, "longest_share": 1.0}
    return tiny_recipe(curriculum=curriculum | changes.pop("curriculum", {}), **changes)


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in RunFolder(path).metrics.rows() if "loss" in row]


def test_growth_follows_the_smoothed_loss() -> None:
    growth = Growth((2, 3, 4, 5), 1.25, loss_below=0.5, smoothing=0.5, min_steps=3)
    grown = growth.start()
    seen = []
    for loss in (0.1, 0.1, 0.1, 0.9, 0.1, 0.1, 0.9, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2):
        grown = growth.after(grown, loss)
        seen.append((grown.value, grown.smoothed))
    #                  held for 3 steps    0.9   0.5  0.3 -> 4   0.9   0.6   0.45 -> 5
    assert [value for value, _ in seen] == [2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5]
    assert seen[3][1] == pytest.approx(0.9) and seen[7][1] == pytest.approx(0.6)
    assert seen[2][1] is None  # begins anew with each value
    assert grown.is_complete
    assert growth.after(grown, 9.0).is_complete  # what has been learned stays so


def test_a_growth_bears_any_number() -> None:
    growth = Growth((2, 5), 1e308, loss_below=0.5, smoothing=0.0, min_steps=1)
    assert growth.after(growth.start(), 0.1).value == 5
    assert growth.after(growth.start(), float("nan")).value == 2  # not learned


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": ()}, "values"),
        ({"values": (2, 2)}, "integers that rise"),
        ({"factor": 1.0}, "factor=1.0"),
        ({"loss_below": 0.0}, "loss_below=0.0"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"min_steps": 0}, "min_steps=0"),
    ],
)
def test_growths_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"values": (2, 5), "factor": 1.5, "loss_below": 0.1, "min_steps": 1}
    with pytest.raises(ValueError, match=words):
        Growth(**(settings | changes))


def test_the_final_decay_begins_when_the_last_length_is_learned_or_at_the_latest_in_time() -> None:
    growth = Growth((2, 3), 1.5, loss_below=0.1, smoothing=0.0, min_steps=1)
    course = Course(50, decay_steps=10, warmup_steps=4, final_share=0.2, growth=growth)
    for step, loss in enumerate((0.5, 0.05, 0.5, 0.05), start=1):
        course.see({"step": step, "loss": loss})
    shares = [course.learning_rate_share(step) for step in (0, 1, 3, 4, 5, 9, 14, 20)]
    assert shares == pytest.approx([0.0, 0.25, 0.75, 1.0, 0.92, 0.6, 0.2, 0.2])
    assert [course.is_over(step) for step in (4, 13, 14)] == [False, False, True]
    falling = Course(50, decay_steps=4, final_share=0.0016, is_exponential=True)
    assert [falling.learning_rate_share(step) for step in (46, 47, 48, 50)] == pytest.approx([1.0, 0.2, 0.04, 0.0016])
    waiting = Course(50, decay_steps=10, growth=growth, decay_from_length=3)
    waiting.see({"step": 1, "loss": 0.5})
    waiting.see({"step": 2, "loss": 0.05})  # 3 is the greatest length now, and not learned
    waiting.see({"step": 3, "loss": 0.5})
    assert [waiting.learning_rate_share(step) for step in (2, 7)] == pytest.approx([1.0, 0.5]) and waiting.is_over(12)
    eager = Course(50, decay_steps=10, warmup_steps=20, growth=growth, decay_from_length=3)
    eager.see({"step": 1, "loss": 0.05})
    assert eager.learning_rate_share(20) == 1.0 and eager.is_over(30)  # not before the warm-up's end
    never = Course(50, decay_steps=10, growth=growth)
    for step in range(1, 50):
        never.see({"step": step, "loss": 1.0})
    assert [never.learning_rate_share(step) for step in (40, 45, 50)] == pytest.approx([1.0, 0.5, 0.0])
    assert not never.is_over(49) and never.is_over(50)


def test_decays_come_again_until_solved() -> None:
    growth = Growth((2, 3), 1.5, loss_below=0.1, smoothing=0.0, min_steps=1)
    solved = {"validation_final_9": 1.0}
    settings: dict[str, Any] = {
        "decay_steps": 10,
        "final_share": 0.04,
        "decay_again_from": 0.25,
        "growth": growth,
        "solved": solved,
    }
    course = Course(35, is_exponential=True, **settings)
    for step in (1, 2, 3, 4):
        course.see({"step": step, "loss": 0.5 if step < 3 else 0.05})  # the last length is learned after 4 steps
    shares = [course.learning_rate_share(step) for step in (3, 4, 9, 14, 19, 24, 29)]
    assert shares == pytest.approx([1.0, 1.0, 0.2, 0.25, 0.1, 0.25, 0.1])
    assert [step for step in range(36) if course.is_over(step)] == [34, 35]  # no room for a whole one
    course.see({"step": 20, "validation_loss": 0.1, "validation_final_9": 1.0})
    assert course.is_over(20)
    straight = Course(34, **settings | {"final_share": 0.1, "decay_again_from": 0.5})
    straight.see({"step": 3, "loss": 0.05})
    straight.see({"step": 4, "loss": 0.05})
    assert [straight.learning_rate_share(step) for step in (4, 9, 14, 19)] == pytest.approx([1.0, 0.55, 0.5, 0.3])


@pytest.mark.parametrize("is_solved", [True, False])
def test_a_run_decays_again_unless_solved(is_solved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"decay_again_from": 0.5, "solved_at": 1.0, "eval_steps": 5, "max_steps": 16}
    original = trainer_module.metrics_of
    monkeypatch.setattr(
        trainer_module, "metrics_of", lambda *given: original(*given) | {"final": 1.0 if is_solved else 0.5}
    )
    run(growing(training=training), tmp_path)
    rates = [row["learning_rate"] for row in steps_of(tmp_path)]
    assert len(rates) == (5 if is_solved else 14)  # 6 to learn the lengths, and two decays of 4
    validated = [row["step"] for row in RunFolder(tmp_path).metrics.validations()]
    assert validated == ([5] if is_solved else [5, 10, 14])
    if not is_solved:
        assert rates[10] == pytest.approx(0.005) and rates[13] < rates[12] < rates[11] < rates[10]


def test_a_run_grows_decays_and_ends(tmp_path: Path) -> None:
    run(growing(), tmp_path)
    steps = steps_of(tmp_path)
    assert [row["max_length"] for row in steps] == [
        3,
        3,
        4,
        4,
        6,
        6,
        6,
        6,
        6,
        6,
    ]  # learned after 6 steps, then 4 of decay
    rates = [row["learning_rate"] for row in steps]
    assert rates[2:6] == [0.01] * 4 and rates[9] < rates[8] < rates[7] < rates[6]
    validations = RunFolder(tmp_path).metrics.validations()
    assert [row["step"] for row in validations] == [3, 6, 9, 10]  # the last step is validated, whatever its number


def test_noise_goes_with_the_greatest_length(tmp_path: Path) -> None:
    recipe = growing(model={"state_noise": 0.1}, curriculum={"state_noise": [[4, 0.2], [6, 0.3]]})
    run(recipe, tmp_path)
    noise = [(row["max_length"], row["state_noise"]) for row in steps_of(tmp_path)]
    assert noise == [(3, 0.1)] * 2 + [(4, 0.2)] * 2 + [(6, 0.3)] * 6
    assert (
        json.loads((tmp_path / "model" / "config.json").read_text())["state_noise"] == 0.1
    )  # as the recipe describes it
    run(growing(model={"state_noise": 0.1}), tmp_path / "constant")
    losses = [[row["loss"] for row in steps_of(path)] for path in (tmp_path, tmp_path / "constant")]
    assert losses[0][:2] == losses[1][:2] and losses[0][2] != losses[1][2]  # the noise is that of its own step


@pytest.mark.parametrize("stop", [3, 6, 9, 10])
def test_a_run_that_was_stopped_grows_on_bit_for_bit(stop: int, tmp_path: Path) -> None:
    # The losses decide, not min_steps, and they hang on the noise.
    training = {"microbatch_size": 4, "max_tokens": 18}
    recipe = growing(
        {"loss_below": 0.75, "smoothing": 0.6},
        model={"state_noise": 0.3},
        curriculum={"state_noise": [[4, 0.5]]},
        training=training | {"decay_from_length": 4, "decay_again_from": 0.5, "solved_at": 1.0, "ema_decay": 0.8},
    )
    run(recipe, tmp_path / "whole")
    original = trainer_module.mark_complete

    def stopping(folder: Path, step: int) -> None:
        original(folder, step)
        if step >= stop:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "mark_complete", stopping)
        with pytest.raises(Stopped):
            run(recipe, tmp_path / "parts")
    run(recipe, tmp_path / "parts")
    whole, parts = ([{**row, "seconds": 0} for row in steps_of(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts and len({row["max_length"] for row in whole}) > 1
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_greatest_length_goes_along_the_training_lengths(tmp_path: Path) -> None:
    """What a row says is what is drawn: 3 x 1.5 is 4, the next length is 5."""
    run(growing({"last": 9}, task={"train_lengths": [3, 5, 8, 9]}, training={"max_steps": 30}), tmp_path)
    assert [row["max_length"] for row in steps_of(tmp_path)][:8] == [3, 3, 5, 5, 8, 8, 9, 9]


def test_a_solved_task_ends_the_run(tmp_path: Path) -> None:
    easy = growing({"last": 40}, training={"solved_at": 0.1, "max_steps": 20})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "_finish", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(easy, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.TaskTrainer, "train", lambda *_, **__: pytest.fail("there is nothing to train"))
        assert run(easy, tmp_path) is not None
    assert len(steps_of(tmp_path)) == 3  # the first validation is enough


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"growth": {"last": 41}}, "curriculum.max_length grows from 3 to 41: both must be among task.train_lengths"),
        ({"growth": {"first": 2}}, "grows from 2 to 6"),
        ({"growth": {"last": 2}}, "last=2 is below first=3"),
        ({"task": {"train_lengths": [3]}, "growth": {"last": 3}}, "longest_share has no effect"),
        ({"model": {"state_noise": 0.1, "solver": {"name": "jacobi"}}}, "state_noise=0.1 needs the solver sequential"),
        ({"training": {"decay_steps": 19}}, "warmup_steps=2 and decay_steps=19 are together more than"),
        ({"growth": {"factor": 0.5}}, "curriculum.max_length.growth.*factor=0.5"),
        ({"growth": {"loss_bellow": 0.5}}, "'loss_bellow'.*'loss_below'"),
        ({"curriculum": {"max_length": {"growth": GROWTH, "ramp": [1, 2]}}}, "either growth, or steps"),
        ({"curriculum": {"longest_share": 1.5}}, "longest_share"),
        ({"training": {"decay_steps": 21}}, "decay_steps=21 is above max_steps=20"),
        (
            {"training": {"decay_shape": "exponential"}},
            "decay_shape=exponential needs decay_steps, and a min_learning_rate",
        ),
        ({"training": {"decay_shape": "cubic"}}, "decay_shape"),
        ({"training": {"decay_steps": None, "decay_from_length": 4}}, "decay_from_length needs decay_steps"),
        (
            {"training": {"decay_steps": 4, "decay_from_length": 7}},
            "decay_from_length=7: .* grows from 3 to 6",
        ),
        (
            {"curriculum": {"max_length": None}, "training": {"decay_steps": 4, "decay_from_length": 4}},
            "decay_from_length=4: .* does not grow with the loss",
        ),
        ({"training": {"ema_decay": 1.0}}, "ema_decay"),
        ({"training": {"decay_again_from": 0.5}}, "decay_again_from needs decay_steps, and solved_at"),
        (
            {"training": {"decay_again_from": 0.1, "solved_at": 1.0, "min_learning_rate": 0.005}},
            "there is nothing to fall",
        ),
        ({"curriculum": {"state_noise": [[7, 0.2]]}}, "above 3, .* and up to 6, as far as curriculum.max_length"),
        (
            {"curriculum": {"state_noise": [[30, 0.2]], "max_length": {"steps": [[0, 3], [4, 5]]}}},
            "above 3, .* and up to 5, as far as curriculum.max_length",
        ),
        ({"curriculum": {"state_noise": []}}, "give .greatest length, noise. pairs whose lengths rise"),
        ({"curriculum": {"state_noise": [[4, 0.2], [4, 0.3]]}}, "pairs whose lengths rise"),
        ({"curriculum": {"state_noise": [[3, 0.2]]}}, "above 3, where model.state_noise holds"),
        ({"curriculum": {"state_noise": [[4, True]]}}, "state_noise=.* not a yes-or-no question"),
        ({"task": {"train_lengths": [True, 3, 4, 5, 6]}}, "train_lengths=.* not a yes-or-no question"),
        (
            {
                "curriculum": {"max_length": None},
                "training": {"decay_steps": 4, "decay_again_from": 0.5, "solved_at": 1.0},
            },
            "decay_again_from has no effect",
        ),
        ({"curriculum": {"state_noise": [[4, -0.2]]}}, "state_noise"),
        (
            {"curriculum": {"state_noise": [[4, 0.2]]}, "model": {"feedback_interval": None}},
            "needs an rlt with feedback",
        ),
        ({"curriculum": {"state_noise": [[4, 0.2]], "max_length": None}}, "it needs curriculum.max_length"),
        (
            {"curriculum": {"state_noise": [[4, 0.2]]}, "model": {"solver": {"name": "jacobi"}}},
            "curriculum.state_noise needs the solver sequential",
        ),
        ({"training": {"solved_at": 0}}, "solved_at"),
        ({"training": {"max_tokens": 0}}, "max_tokens"),
    ],
)
def test_recipes_that_cannot_be_followed_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        growing(**changes)
