"""Curricula, learning rates by width, and the metrics file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import crosscurrent as cc
from crosscurrent.experiments.run import build_model, run
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.files import write_whole
from crosscurrent.training.checkpoints import checkpoint_folder, complete_steps, keep_only, mark_complete
from crosscurrent.training.schedules import Ramp, Steps, set_feedback
from crosscurrent.training.telemetry import MetricsFile, best_step
from crosscurrent.training.width import final_norm, fold_logit_scale, parameter_groups, scale_start
from tests.recipes import tiny_recipe


def test_schedules_are_functions_of_the_step() -> None:
    interval = Steps([(0, 16), (10, 4), (20, 1)])
    assert [interval(step) for step in (0, 9, 10, 19, 20, 10**6)] == [16, 16, 4, 4, 1, 1]
    ramp = Ramp(1.0, 0.1, 10)
    assert [ramp(step) for step in (0, 5, 10, 11)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    for points in ([], [(1, 2)], [(0, 1), (0, 2)], [(0, 1), (5, 2), (3, 3)]):
        with pytest.raises(ValueError, match="start at 0"):
            Steps(points)
    strange: list[Any] = [2.5, True]
    for step in strange:
        with pytest.raises(ValueError, match="they are integers"):
            Steps([(0, 1), (step, 2)])
        with pytest.raises(ValueError, match="num_steps="):
            Ramp(0, 1, step)
    with pytest.raises(ValueError, match="num_steps=0"):
        Ramp(0, 1, 0)
    with pytest.raises(ValueError, match="finite"):
        Ramp(math.nan, 1, 2)
    with pytest.raises(ValueError, match="step=-1"):
        interval(-1)


@pytest.mark.parametrize("model", ["rlt-1", "rlt-2", "t2mlr"])
def test_feedback_can_change_in_training(model: str) -> None:
    """A model whose interval was set computes what one made with that interval computes."""
    built: Any = build_model(tiny_recipe(model)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    other: Any = build_model(tiny_recipe(model, model={"feedback_interval": 2})).eval()
    other.load_state_dict(built.state_dict())
    ids = torch.randint(0, 3, (2, 9))
    assert not torch.equal(built(ids).logits, other(ids).logits)
    set_feedback(built, 2, None)
    assert torch.equal(built(ids).logits, other(ids).logits) and built.config.feedback_interval == 2


def test_feedback_scale_is_set_in_model_and_configuration(tmp_path: Path) -> None:
    model = cc.RLTForCausalLM(cc.RLTConfig(vocab_size=5, hidden_size=16, intermediate_size=16)).eval()
    before = model(torch.tensor([[1, 2, 3]])).logits
    set_feedback(model, None, 3.0)
    assert not torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)
    model.save_pretrained(tmp_path)
    again = cc.RLTForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(torch.tensor([[1, 2, 3]])).logits, model(torch.tensor([[1, 2, 3]])).logits)
    with pytest.raises(ValueError, match="nan"):
        model.set_feedback_scale(math.nan)


@pytest.mark.parametrize("model", ["rlt-0", "transformer", "lstm"])
def test_models_without_feedback_refuse_to_change_it(model: str) -> None:
    built = build_model(tiny_recipe(model))
    for change in ({"feedback_interval": 2}, {"feedback_scale": 0.5}, {"state_noise": 0.1}):
        with pytest.raises(ValueError, match=r"feedback|has no state_noise"):
            set_feedback(built, **change)  # type: ignore[arg-type]


def test_curricula_act_step_by_step_and_validation_sees_the_final_model(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        curriculum={
            "feedback_interval": {"steps": [[0, 8], [2, 3], [4, 1]]},
            "feedback_scale": {"ramp": [1.0, 0.1], "num_steps": 5},
            "max_length": {"steps": [[0, 3], [3, 40]]},
        },
    )
    seen: list[tuple[bool, int, float]] = []
    original = cc.RLTForCausalLM.forward

    def forward(self: cc.RLTForCausalLM, *args: Any, **kwargs: Any) -> Any:
        assert self.model.merge is not None and isinstance(self.config.feedback_interval, int)
        seen.append((self.training, self.config.feedback_interval, self.model.merge.feedback_scale))
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cc.RLTForCausalLM, "forward", forward)
        run(recipe, tmp_path)
    training = [entry[1:] for entry in seen if entry[0]]
    assert training == [
        (b, pytest.approx(a)) for b, a in ((8, 1.0), (8, 0.82), (3, 0.64), (3, 0.46), (1, 0.28), (1, 0.1))
    ]
    assert {entry[1:] for entry in seen if not entry[0]} == {(1, 0.1)}
    metrics = [row for row in RunFolder(tmp_path).metrics.rows() if "loss" in row]
    assert [row["feedback_interval"] for row in metrics] == [8, 8, 3, 3, 1, 1]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["feedback_interval"] == 1 and config["feedback_scale"] == pytest.approx(0.1)


def moved(before: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, float]:
    return {name: float((p.detach() - before[name]).abs().mean()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["rlt-1", "transformer", "t2mlr"])
def test_width_scaling_of_rates_and_starts(name: str) -> None:
    """At half the base width matrices of the stream start larger by sqrt(2) and learn twice as fast; nothing else does."""
    recipe = tiny_recipe(name, model={"hidden_size": 16})
    plain, scaled = build_model(recipe), build_model(recipe)
    scale_start(scaled, 2.0)
    rates = {
        id(parameter): group["lr"]
        for group in parameter_groups(scaled, 0.01, 0.1, 2.0)
        for parameter in group["params"]
    }
    assert len(rates) == len(list(scaled.parameters()))
    for (key, one), other in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        is_hidden = one.ndim >= 2 and "embed" not in key
        assert torch.allclose(one * (math.sqrt(2) if is_hidden else 1), other), key
        assert rates[id(other)] == (0.02 if is_hidden else 0.01), key


def test_decay_falls_on_matrices_alone() -> None:
    model = build_model(tiny_recipe("rlt-1"))
    for group in parameter_groups(model, 0.01, 0.1, 1.0):
        assert all((parameter.ndim >= 2) == (group["weight_decay"] > 0) for parameter in group["params"])


def test_the_saved_model_gives_the_logits_it_was_trained_with() -> None:
    for name in ("rlt-1", "rlt-0", "transformer", "t2mlr"):
        model: Any = build_model(tiny_recipe(name)).eval().double()
        with torch.no_grad():
            final_norm(model).add_(torch.rand_like(final_norm(model)))
        ids = torch.randint(0, 3, (2, 7))
        before = model(ids).logits
        fold_logit_scale(model, 0.3)
        assert torch.allclose(model(ids).logits, 0.3 * before, atol=1e-12)


def test_width_scaling_changes_nothing_at_the_base_width(tmp_path: Path) -> None:
    run(tiny_recipe(), tmp_path / "plain")
    run(tiny_recipe(training={"mup_base_width": 16}), tmp_path / "base")
    run(tiny_recipe(training={"mup_base_width": 8}), tmp_path / "narrow")
    losses = [RunFolder(tmp_path / name).metrics.rows()[0]["loss"] for name in ("plain", "base", "narrow")]
    assert losses[0] == losses[1] != losses[2]


def test_metrics_recover_what_is_whole(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.rows() == []
    for step in (1, 2, 3):
        file.append({"step": step, "loss": 0.5})
    whole = file.path.read_bytes()
    for cut in range(len(whole) + 1):
        file.path.write_bytes(whole[:cut])
        assert [row["step"] for row in file.rows()] == list(range(1, whole[:cut].count(b"\n") + 1))
    file.path.write_bytes(whole[:-4])
    file.append({"step": 3, "loss": 0.5})  # a run cuts the rest off first
    file.append({"step": 4, "loss": 0.5})
    with pytest.raises(ValueError, match="line 3"):
        file.rows()
    file.path.write_bytes(whole[:-4])
    file.cut_after(5)
    file.append({"step": 3, "loss": 0.25})
    assert [row["loss"] for row in file.rows()] == [0.5, 0.5, 0.25]


def test_selection_takes_the_earliest_of_the_lowest() -> None:
    rows = [{"step": s, "validation_loss": loss} for s, loss in ((100, 0.5), (200, 0.25), (300, 0.25), (400, 0.3))]
    assert best_step(rows) == 200
    with pytest.raises(ValueError, match="no validation"):
        best_step([])


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        checkpoint_folder(tmp_path, step).mkdir()
    for step in (2, 4):
        (checkpoint_folder(tmp_path, step) / "optimizer.pt").write_text("weights")
        mark_complete(tmp_path, step)
    (tmp_path / "checkpoint-abc").mkdir()
    assert complete_steps(tmp_path) == [2, 4]
    (checkpoint_folder(tmp_path, 2) / "optimizer.pt").write_text("weigh")
    assert complete_steps(tmp_path) == [4]
    keep_only(tmp_path, {4})
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-abc"}
    (checkpoint_folder(tmp_path, 4) / "optimizer.pt").unlink()
    assert complete_steps(tmp_path) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_whole(file, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "after \ud800")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]
