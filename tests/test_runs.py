"""Runs: what they leave behind, that they go on after any stop to the same weights, and what they refuse."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments
from typer.testing import CliRunner

from crosscurrent.cli.main import app
from crosscurrent.evaluation.scoring import Predictions, predict
from crosscurrent.experiments.grid import open_grid, run_grid
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run import build_model, examples_of, run
from crosscurrent.experiments.run_folder import BusyError, RunFolder
from crosscurrent.experiments.running import training_arguments
from crosscurrent.experiments.settings import write_yaml
from crosscurrent.experiments.study import Study
from crosscurrent.training import trainer as trainer_module
from crosscurrent.training.trainer import TaskTrainer
from tests.recipes import MODELS, study_defaults, tiny_recipe

IDS = torch.zeros(1, 1, dtype=torch.int64)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model" / "model.safetensors")


def rows(path: Path) -> list[dict[str, Any]]:
    """The metrics, but for the times."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in RunFolder(path).metrics.rows()]


def assert_same_run(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert rows(first) == rows(second)
    ours, theirs = RunFolder(first).result(), RunFolder(second).result()
    assert (ours["selected_step"], ours["test"]) == (theirs["selected_step"], theirs["test"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    run(tiny_recipe(), path)
    return path


@pytest.mark.parametrize("model", MODELS)
def test_a_run_keeps_all_that_it_promises(model: str, tmp_path: Path) -> None:
    recipe = tiny_recipe(model)
    result = run(recipe, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.recipe() == recipe and folder.is_done and folder.result() == result
    assert {"crosscurrent", "torch", "transformers"} <= set(folder.versions())
    steps = [row["step"] for row in folder.metrics.rows() if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    losses = {row["step"]: row["validation_loss"] for row in folder.metrics.validations()}
    assert set(losses) == {2, 4, 6} and result is not None
    assert losses[result["selected_step"]] == min(losses.values())
    assert list(folder.tensorboard.iterdir()) and not folder.checkpoints.exists()

    saved = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32).eval()
    predictions = load_file(folder.predictions_file)
    for length, said in predict(saved, examples_of(recipe, "test"), generates=True):
        assert torch.equal(predictions[f"{length}.predicted"].long(), said.predicted)
        assert torch.equal(predictions[f"{length}.target"].long(), said.targets)
        right = (said.predicted == said.targets).float().mean().item()
        assert result["test"][str(length)]["final"] == pytest.approx(right)


def test_a_finished_run_is_not_done_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (whole / "result.json").stat().st_mtime_ns
    monkeypatch.setattr("crosscurrent.experiments.run._train", None)
    assert run(tiny_recipe(), whole) == RunFolder(whole).result()
    assert (whole / "result.json").stat().st_mtime_ns == before


class Stopped(BaseException):
    """Stands for a process that ends here."""


def stop_at(monkeypatch: pytest.MonkeyPatch, place: str, step: int) -> None:
    """End the process in some function, when a step is reached."""
    original: Callable[..., Any] = getattr(trainer_module, place)

    def stopping(*args: Any) -> Any:
        if args[1] == step:
            raise Stopped
        return original(*args)

    monkeypatch.setattr(trainer_module, place, stopping)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_stopped_while_a_checkpoint_is_written(whole: Path, step: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "mark_complete", step)
        with pytest.raises(Stopped):
            run(tiny_recipe(), tmp_path / "run")
    run(tiny_recipe(), tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize(
    "function", ["run._test", "run._save_predictions", "run.save_model", "run_folder.RunFolder.tidy"]
)
def test_stopped_between_training_and_result(whole: Path, function: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"crosscurrent.experiments.{function}", stopped)
        with pytest.raises(Stopped):
            run(tiny_recipe(), tmp_path / "run")
    run(tiny_recipe(), tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


def test_a_cut_metrics_file_is_recovered(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "mark_complete", 6)
        with pytest.raises(Stopped):
            run(tiny_recipe(), path)
    file = path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-25])
    assert RunFolder(path).metrics.rows()[-1]["step"] in (5, 6)
    run(tiny_recipe(), path)
    assert_same_run(whole, path)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("stop", [4, None])
def test_lost_metrics_are_measured_again(whole: Path, num_rows: int, stop: int | None, tmp_path: Path) -> None:
    """However much of the file is lost, also when training was over: nothing is missing in the end."""
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        if stop is None:
            patch.setattr("crosscurrent.experiments.run._finish", stopped)
        else:
            stop_at(patch, "mark_complete", 6)
        with pytest.raises(Stopped):
            run(tiny_recipe(), path)
    file = path / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:num_rows]))
    run(tiny_recipe(), path)
    assert_same_run(whole, path)


def stopped(*args: Any, **kwargs: Any) -> None:
    raise Stopped


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "scheduler.pt", "model.safetensors", "trainer_state.json", "complete"]
)
@pytest.mark.parametrize("cut", [True, False])
def test_a_checkpoint_that_is_not_whole_is_not_gone_on_from(whole: Path, file: str, cut: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "mark_complete", 6)
        with pytest.raises(Stopped):
            run(tiny_recipe(), path)
    part = path / "checkpoints" / "checkpoint-4" / file
    part.write_bytes(part.read_bytes()[:-3]) if cut else part.unlink()
    run(tiny_recipe(), path)
    assert_same_run(whole, path)


@pytest.mark.parametrize("part", ["model", "predictions.safetensors", "metrics.jsonl"])
def test_a_finished_run_that_lacks_something_is_not_called_done(part: str, tmp_path: Path) -> None:
    run(tiny_recipe("transformer", training={"max_steps": 1}), tmp_path)
    shutil.rmtree(tmp_path / part) if part == "model" else (tmp_path / part).unlink()
    with pytest.raises(ValueError, match=f"{part} is missing"):
        run(tiny_recipe("transformer", training={"max_steps": 1}), tmp_path)


def test_a_folder_in_the_way_of_the_model_is_found_before_training(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "mark_complete", 2)
        with pytest.raises(Stopped):
            run(tiny_recipe(), tmp_path)
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ValueError, match="model is a file"):
        run(tiny_recipe(), tmp_path)


def test_a_damaged_metrics_file_is_refused(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "mark_complete", 6)
        with pytest.raises(Stopped):
            run(tiny_recipe(), tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text().replace('{"step": 2, "loss"', '{"step": 2 "loss"'))
    with pytest.raises(ValueError, match="line 2"):
        run(tiny_recipe(), tmp_path)


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error"), RuntimeError("file write failed")],
    ids=["os", "safetensors", "torch"],
)
def test_a_full_disk_leaves_the_last_checkpoint(whole: Path, error: Exception, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        original = TaskTrainer._save_rng_state

        def full(self: TaskTrainer, output_dir: str) -> None:
            if self.state.global_step == 4:
                raise error
            original(self, output_dir)

        patch.setattr(TaskTrainer, "_save_rng_state", full)
        with pytest.raises(OSError, match=r"step 4|No space"):
            run(tiny_recipe(), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*/complete")]
    run(tiny_recipe(), tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


def test_other_recipes_and_versions_are_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.max_steps: 6 -> 7"):
        run(tiny_recipe(training={"max_steps": 7}), whole)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "mark_complete", 4)
        with pytest.raises(Stopped):
            run(tiny_recipe(), tmp_path / "run")
    change(tmp_path / "run" / "versions.json", torch="1.0")
    with pytest.raises(ValueError, match=r"torch 1\.0 -> "):
        run(tiny_recipe(), tmp_path / "run")


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        run(tiny_recipe(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        run(tiny_recipe(), tmp_path / "notes.txt")


@pytest.mark.parametrize("file", ["versions.json", "recipe.yaml"])
def test_stopped_while_a_folder_is_begun(whole: Path, file: str, tmp_path: Path) -> None:
    (tmp_path / f".{file}.partial-1a2b").write_text("half")
    if file == "recipe.yaml":
        (tmp_path / "versions.json").write_text((whole / "versions.json").read_text())
    run(tiny_recipe(), tmp_path)
    assert_same_run(whole, tmp_path)
    assert not list(tmp_path.glob(".*partial*"))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").claimed(), pytest.raises(BusyError):
        run(tiny_recipe(), tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def broken(recipe: Recipe) -> Any:
            model: Any = build_model(recipe)
            with torch.no_grad():
                model.get_input_embeddings().weight.fill_(torch.inf)
            return model

        patch.setattr("crosscurrent.experiments.run.build_model", broken)
        with pytest.raises(ValueError, match="at step 1"):
            run(tiny_recipe(), tmp_path / "run")


def test_a_validation_loss_that_is_not_finite_stops(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "predict", lambda *args, **kwargs: [(11, Predictions(IDS, IDS, float("nan")))])
        with pytest.raises(ValueError, match="validation loss is nan at step 2"):
            run(tiny_recipe(), tmp_path / "run")


def test_a_full_device_is_one_failed_run(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def full(*args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("too much")

        patch.setattr(TaskTrainer, "training_step", full)
        with pytest.raises(ValueError, match="microbatch_size"):
            run(tiny_recipe(), tmp_path / "run")


def test_half_precision_without_a_gpu_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        run(tiny_recipe(training={"precision": "fp16"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run(tiny_recipe(training={"precision": "bf16"}), tmp_path / "bf16")
    assert rows(tmp_path / "bf16")[0]["loss"] == pytest.approx(rows_of_whole_loss(tmp_path), rel=0.02)


def rows_of_whole_loss(tmp_path: Path) -> float:
    run(tiny_recipe(), tmp_path / "fp32")
    return rows(tmp_path / "fp32")[0]["loss"]


def test_the_batch_is_what_the_recipe_says_on_any_number_of_gpus(tmp_path: Path) -> None:
    """transformers would multiply it by the number of GPUs that one process sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingArguments, "_setup_devices", property(four_gpus))
        training = tiny_recipe(training={"microbatch_size": 2}).training
        arguments = training_arguments(training, RunFolder(tmp_path), 1)
        assert arguments.train_batch_size * arguments.gradient_accumulation_steps == 8


def four_gpus(arguments: Any) -> torch.device:
    arguments._n_gpu = 4
    return torch.device("cpu")


def test_seeds_change_weights_and_not_data(tmp_path: Path) -> None:
    for seed in (1, 2):
        run(tiny_recipe(seed=seed), tmp_path / str(seed))
    one, other = (load_file(tmp_path / seed / "predictions.safetensors") for seed in ("1", "2"))
    assert torch.equal(one["21.target"], other["21.target"])
    assert rows(tmp_path / "1")[0]["loss"] != rows(tmp_path / "2")[0]["loss"]


def first_step(tmp_path: Path, name: str, **training: Any) -> dict[str, Any]:
    recipe = tiny_recipe(
        "transformer",
        task={"name": "addition", "test_lengths": [9], "validation_lengths": [8]},
        training={"max_steps": 1, "warmup_steps": 0} | training,
    )
    run(recipe, tmp_path / name)
    return rows(tmp_path / name)[0]


def test_microbatches_of_unequal_lengths_add_up(tmp_path: Path) -> None:
    """The loss is a mean over all targets of the step, however it is cut."""
    once, often = first_step(tmp_path, "once"), first_step(tmp_path, "often", microbatch_size=2)
    for name in ("loss", "grad_norm"):
        assert once[name] == pytest.approx(often[name], rel=1e-5)
    one, other = weights(tmp_path / "once"), weights(tmp_path / "often")
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


@pytest.mark.once
def test_two_processes_come_to_the_weights_of_one(tmp_path: Path) -> None:
    """Distributed data parallel, by torchrun, on CPUs: every microbatch is the same, only shared out."""
    growth = {"first": 3, "last": 6, "factor": 1.5, "loss_below": 100.0, "min_steps": 2}  # the loss of both decides
    recipe = tiny_recipe(
        "rlt-2",
        training={"microbatch_size": 4, "max_tokens": 18, "decay_steps": 2, "ema_decay": 0.5},
        curriculum={"max_length": {"growth": growth}, "longest_share": 0.5},
    )
    (tmp_path / "my.yaml").write_text(write_yaml(recipe))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "crosscurrent", "train", str(tmp_path / "my.yaml"), "--output", str(tmp_path / "two")]
    done = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run(recipe, tmp_path / "one")
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    for ours, theirs in zip(one, two, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)


@pytest.mark.once
def test_two_processes_find_a_finished_run(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(write_yaml(tiny_recipe()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "crosscurrent", "train", str(tmp_path / "my.yaml"), "--output", str(whole)]
    done = subprocess.run(command, check=True, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.count("lowest validation loss") == 1


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "crosscurrent", *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            pytest.fail("the process ended too early, or hangs")
        time.sleep(0.02)


@pytest.mark.once
def test_killed_in_the_middle_of_training(tmp_path: Path) -> None:
    """kill -9 at some step between two checkpoints: the same final weights, bit for bit."""
    recipe = tiny_recipe(training={"max_steps": 100, "eval_steps": 20})
    (tmp_path / "my.yaml").write_text(write_yaml(recipe))
    process = start("train", tmp_path / "my.yaml", "--output", tmp_path / "killed")
    metrics = RunFolder(tmp_path / "killed").metrics
    wait_until(lambda: any(row["step"] >= 30 for row in metrics.rows()), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "result.json").exists()
    run(recipe, tmp_path / "killed")
    run(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


STUDY = {
    "description": "small",
    "seeds": [1, 2],
    "defaults": study_defaults("transformer"),
    "tasks": {"parity": {}},
    "models": {"rlt": {"model": MODELS["rlt-1"]}, "transformer": {}},
}


@pytest.mark.once
def test_killed_in_the_middle_of_a_grid(tmp_path: Path) -> None:
    study = STUDY | {"defaults": study_defaults("transformer", training={"max_steps": 60, "eval_steps": 20})}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    process = start("reproduce", tmp_path / "study.yaml", "--output", tmp_path / "killed")
    wait_until((tmp_path / "killed/parity/transformer/seed-1/metrics.jsonl").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for output in ("killed", "whole"):
        again = CliRunner().invoke(app, ["reproduce", str(tmp_path / "study.yaml"), "--output", str(tmp_path / output)])
        assert again.exit_code == 0, again.output
    runs = sorted(path.parent.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("result.json"))
    assert len(runs) == 4
    for path in runs:
        assert_same_run(tmp_path / "whole" / path, tmp_path / "killed" / path)


@pytest.mark.once
def test_processes_share_a_grid_without_doing_a_run_twice(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"seeds": [1, 2, 3, 4]}))
    processes = [start("reproduce", tmp_path / "study.yaml", "--output", tmp_path / "out") for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    done = [
        line.split(": ")[0].split("] ")[1] for output in outputs for line in output.splitlines() if " selected" in line
    ]
    assert sorted(done) == sorted(
        f"parity/{model}/seed-{seed}" for model in ("rlt", "transformer") for seed in range(1, 5)
    )


def test_a_failed_run_does_not_stop_the_grid(tmp_path: Path) -> None:
    study = Study(**(STUDY | {"models": {"bad": {"training": {"learning_rate": 1e30}}, "transformer": {}}}))  # type: ignore[arg-type]
    plan = study.plan("s", seeds=[1])
    open_grid(tmp_path, "s", study, plan)
    lines: list[str] = []
    report = run_grid(tmp_path, plan, lines.append)
    assert report.finished == ("parity/transformer/seed-1",)
    assert "lower training.learning_rate" in report.failed["parity/bad/seed-1"]
    again = run_grid(tmp_path, plan[1:], lines.append)
    assert again.were_done == report.finished


def test_grids_do_not_mix(tmp_path: Path) -> None:
    study = Study(**STUDY)  # type: ignore[arg-type]
    plan = study.plan("s", seeds=[1], models=["transformer"])
    open_grid(tmp_path, "s", study, plan)
    run_grid(tmp_path, plan, lambda line: None)
    with pytest.raises(ValueError, match="another study"):
        open_grid(tmp_path, "other", study, plan)
    changed = study.plan("s", seeds=[1], models=["transformer"], changes={"training": {"max_steps": 9}})
    with pytest.raises(ValueError, match="max_steps: 6 -> 9"):
        open_grid(tmp_path, "s", study, changed)


def test_a_grid_goes_on_beside_machines_of_another_kind(tmp_path: Path) -> None:
    """A run begun with other threads fails alone; finished runs of other versions stop everything at once."""
    study = Study(**STUDY)  # type: ignore[arg-type]
    plan = study.plan("s", seeds=[1])
    open_grid(tmp_path, "s", study, plan)
    RunFolder(tmp_path / plan[0].name).path.mkdir(parents=True)
    RunFolder(tmp_path / plan[0].name).open(plan[0].recipe)
    change(tmp_path / plan[0].name / "versions.json", num_threads=64)
    open_grid(tmp_path, "s", study, plan)
    report = run_grid(tmp_path, plan, lambda line: None)
    assert "num_threads 64 -> " in report.failed[plan[0].name] and report.finished == (plan[1].name,)
    change(tmp_path / plan[1].name / "versions.json", torch="1.0")
    with pytest.raises(ValueError, match=r"torch 1\.0 -> "):
        open_grid(tmp_path, "s", study, plan)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
