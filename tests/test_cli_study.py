"""`train`, `reproduce`, `recipes` and `report` on the command line, and every shipped recipe for two steps."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from crosscurrent.cli.main import app
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.experiments.study import find_recipe, recipe_names
from tests.recipes import every_task_and_every_model, study_defaults
from tests.test_cli import assert_one_line_of_error


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


SHORT = (
    "training.max_steps=2",
    "training.batch_size=4",
    "training.microbatch_size=2",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.intermediate_size=24",
    "task.num_test=2",
    "task.num_validation=2",
)
LENGTHS = {
    "mod5_flat": ([5], [9], [11]),
    "addition": ([3], [3], [4]),
    "s5_retrieval": ([2], [2], [3]),
    "s5_retrieval_state": ([2], [2], [3]),
}


@pytest.mark.once
@pytest.mark.parametrize("name", every_task_and_every_model("rlt/", "s5_retrieval/"))
def test_shipped_recipes_train_two_steps(name: str, tmp_path: Path) -> None:
    """At another width and on short sequences; that its own sizes are the published ones is tested in test_recipes.py."""
    lengths = LENGTHS.get(name.split("/")[-2], ([5], [9], [12]))
    splits = zip(("train", "validation", "test"), lengths, strict=True)
    changes = [*SHORT, *(f"task.{split}_lengths={found}" for split, found in splits)]
    if name.startswith("rlt/beyond/"):
        changes += ["training.decay_steps=1", "training.warmup_steps=1", "curriculum.longest_share=0"]
        changes += ["training.decay_from_length=null", "curriculum.state_noise=null"]
        if find_recipe(name)[1].curriculum.growth is not None:
            changes += [f"curriculum.max_length.growth.{end}={lengths[0][0]}" for end in ("first", "last")]
    result = invoke("train", name, *changes, "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    folder = RunFolder(tmp_path / "run")
    assert folder.is_done and [row["step"] for row in folder.metrics.rows() if "loss" in row] == [1, 2]
    assert "lowest validation loss" in result.stdout and str(tmp_path / "run") in result.stdout


def test_recipes_are_listed() -> None:
    names = invoke("recipes").stdout.split()
    assert (
        names == recipe_names() and "rlt/mini/parity/rlt-1" in names and "rlt/paper/addition/rlt-1-scale-0.03" in names
    )


@pytest.fixture
def study(tmp_path: Path) -> Path:
    values = {
        "description": "small",
        "seeds": [1, 2],
        "defaults": study_defaults("transformer", training={"max_steps": 2}),
        "tasks": {"parity": {}, "swaps": {"task": {"name": "s5_swaps"}}},
        "models": {"transformer": {}, "wide": {"model": {"hidden_size": 24}}},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "study.yaml"


def test_a_study_from_plan_to_report(study: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    chosen = ("reproduce", study, "--only", "parity", "--seeds", "1", "--output", output)
    planned = invoke(*chosen, "--plan")
    assert planned.exit_code == 0 and not output.exists()
    assert planned.stdout.split() == [f"{output}/parity/{model}/seed-1" for model in ("transformer", "wide")]
    done = invoke(*chosen)
    assert done.exit_code == 0 and "2 runs done now, 0 before" in done.stdout, done.output
    assert "done" in invoke(*chosen, "--plan").stdout
    assert "in the way" in invoke(*chosen, "training.max_steps=3", "--plan").stdout
    assert "0 runs done now, 2 before" in invoke(*chosen).stdout
    written = invoke("report", output, "-o", tmp_path / "report")
    assert written.exit_code == 0 and "2 finished runs of 2" in written.stdout, written.output
    assert "1 of 2 seeds" in (tmp_path / "report" / "report.html").read_text()


def test_a_failed_run_fails_the_command(study: Path, tmp_path: Path) -> None:
    much = ("training.learning_rate=1e30", "training.max_steps=6")
    result = invoke("reproduce", study, *much, "--only", "parity", "--output", tmp_path / "out")
    assert result.exit_code == 1 and "4 failed" in result.stdout


def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("crosscurrent.experiments.run._train", interrupt)
    result = invoke("train", "rlt/mini/parity/rlt-1", "--output", tmp_path / "run")
    assert result.exit_code == 130 and "same command" in result.stderr


def test_mistakes_are_answered_in_one_line(study: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("train", "rlt/mini/parity/rlt1"), ["rlt/mini/parity/rlt-1"]),
        (("train", "rlt/mini/parity/rlt-1", "training.max_step=2"), ["'max_steps'"]),
        (("train", "rlt/mini/parity/rlt-1", "max_steps"), ["key.key=value"]),
        (("train", tmp_path / "absent.yaml"), ["absent.yaml"]),
        (("reproduce", "rtl", "--scale", "mini"), ["rlt/mini"]),
        (("reproduce", "rlt"), ["--scale mini", "--scale paper"]),
        (("reproduce", study, "--only", "swap"), ["'swaps'"]),
        (("reproduce", study, "--seeds", "1,1"), ["once"]),
        (("report", tmp_path / "absent"), ["absent"]),
    ):
        assert_one_line_of_error(invoke(*arguments), *words)
    assert invoke("reproduce", study, "--seeds", "one").exit_code == 2
    with RunFolder(tmp_path / "busy").claimed():
        result = invoke("train", "rlt/mini/parity/rlt-1", "--output", tmp_path / "busy")
    assert_one_line_of_error(result, "busy", "another process")


@pytest.mark.parametrize("command", ["train", "reproduce", "recipes", "report"])
def test_help_gives_an_example(command: str) -> None:
    text = invoke(command, "--help").stdout
    assert f"crosscurrent {command}" in text and "Example" in text
