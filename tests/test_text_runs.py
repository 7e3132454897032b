"""Runs on text: what they leave behind, what several processes come to, what a kill leaves, and what they refuse."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from crosscurrent.cli.main import app
from crosscurrent.data.batches import collate_rows, collate_rows_for_attention
from crosscurrent.data.packing import packed_row
from crosscurrent.data.shards import PreparedText
from crosscurrent.experiments.consolidation import consolidate
from crosscurrent.experiments.kinds import load_recipe, recipe_of, run_any
from crosscurrent.experiments.study import recipe_names
from crosscurrent.experiments.text_of_run import build_text_model
from crosscurrent.experiments.text_recipe import TextRecipe
from crosscurrent.experiments.text_run import TextRunFolder, run_text
from crosscurrent.training.checkpoints import complete_steps
from crosscurrent.training.nonfinite import NonFiniteError
from crosscurrent.training.signals import StopOnSignal
from crosscurrent.training.text_trainer import SKIPPED
from tests.recipes import tiny_values
from tests.text_runs import MODELS, prepared_text, tiny_text_recipe, tiny_text_values
from tests.tiny_texts import random_texts, write_jsonl


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption, in this process."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    run_text(tiny_text_recipe(text), path)
    return path


@pytest.fixture(scope="module")
def others(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of tests/text_runs.py: in two processes, killed, told to end."""
    folder = tmp_path_factory.mktemp("others")
    done = subprocess.run(
        [sys.executable, "-m", "tests.text_runs", str(folder), str(text)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model" / "model.safetensors")


def losses(path: Path) -> dict[tuple[str, int], float]:
    names = ("loss", "validation_loss")
    rows = TextRunFolder(path).metrics.rows()
    return {(name, row["step"]): row[name] for row in rows for name in names if name in row}


def assert_close(one: Path, other: Path, tolerance: float) -> None:
    """Losses and final weights."""
    first, second = losses(one), losses(other)
    assert first.keys() == second.keys() and len(first) == 8
    assert max(abs(first[key] - second[key]) for key in first) <= tolerance
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 10 * tolerance


def test_a_run_keeps_all_that_it_promises(text: Path, whole: Path) -> None:
    folder = TextRunFolder(whole)
    result = folder.result()
    assert folder.is_done and folder.recipe() == tiny_text_recipe(text)
    assert result["steps"] == 6 and result["tokens"] == 6 * 8 * 15 and result["num_skipped_steps"] == 0
    assert complete_steps(folder.checkpoints) == [4, 6]  # the last two
    rows = [row for row in folder.metrics.rows() if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["throughput/tokens_per_second"] > 0 and row["memory/peak_gib"] > 0 for row in rows)
    assert all(row["throughput/recurrence_tflops"] > 0 and row["throughput/model_tflops"] > 0 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(folder.model)
    PreparedText(text).check_tokenizer(AutoTokenizer.from_pretrained(folder.model))
    assert model.config.eos_token_id == PreparedText(text).eos_token_id
    scored = score(model, text)
    assert scored == pytest.approx(result["validation_loss"], abs=1e-5)


def score(model: Any, text: Path) -> float:
    """The mean over the predicted tokens of the held-out documents, each alone and cut as in the rows."""
    prepared = PreparedText(text)
    stream = prepared.read("validation", 0, prepared.num_tokens("validation"))
    ends = prepared.lengths("validation").cumsum().tolist()
    cuts = sorted({*range(0, len(stream), 15), *ends, len(stream)})
    total, count = 0.0, 0
    with torch.no_grad():
        for start, stop in itertools.pairwise(cuts):
            ids = torch.from_numpy(stream[start:stop])[None]
            if ids.shape[1] > 1:
                total += float(model.eval()(ids, labels=ids).loss) * (ids.shape[1] - 1)
                count += ids.shape[1] - 1
    return total / count


def test_a_finished_run_is_not_done_again(text: Path, whole: Path) -> None:
    before = (whole / "result.json").stat().st_mtime_ns
    assert run_text(tiny_text_recipe(text), whole) == TextRunFolder(whole).result()
    assert (whole / "result.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2-killed"])
def test_two_processes_come_to_what_one_comes_to(name: str, whole: Path, others: Path) -> None:
    assert_close(others / name, whole, 1e-5)


def test_a_sharded_rlt_comes_to_what_one_process_comes_to(text: Path, others: Path, tmp_path: Path) -> None:
    run_text(tiny_text_recipe(text, "rlt"), tmp_path / "one")
    assert_close(others / "rlt-fsdp2", tmp_path / "one", 1e-5)


@pytest.mark.parametrize("name", ["killed", "killed-while-saving"])
def test_a_killed_run_goes_on_to_the_same_weights(name: str, whole: Path, others: Path) -> None:
    """kill -9 at some step, and when half of a checkpoint is written."""
    assert_equal(others / name, whole)


def test_killed_shards_go_on_to_the_same_weights(others: Path) -> None:
    assert_equal(others / "fsdp2-killed", others / "fsdp2")


def assert_equal(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert losses(one) == losses(other)


def test_how_processes_end(others: Path) -> None:
    codes = json.loads((others / "codes.json").read_text())
    assert codes == {
        "ddp": [0, 0],
        "fsdp2": [0, 0],
        "rlt-fsdp2": [0, 0],
        "killed": [-9, 0],
        "fsdp2-killed": [-9, -9, 0, 0],
        "killed-while-saving": [-9, 0],
        "terminated": [143, 143],  # one got the signal, both ended well
        "gone-on-alone": [0],
        "terminated-with-workers": [143],
        "rare-none": [0, 0],
        "rare-fsdp2": [0, 0],
    }


def test_processes_with_unlike_documents(text: Path, others: Path, tmp_path: Path) -> None:
    """On some microbatches no token reads a state, so that the carry would be left out by one process alone."""
    curriculum = {"feedback_interval": {"steps": [[0, 12], [5, 1]]}}
    recipe = tiny_text_recipe(text, "t2mlr-sequential", training={"microbatch_size": 1}, curriculum=curriculum)
    run_text(recipe, tmp_path / "one")
    for kind in ("none", "fsdp2"):
        assert_close(others / f"rare-{kind}", tmp_path / "one", 1e-5)


def test_nothing_is_lost_between_the_last_checkpoint_and_the_model(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_text_recipe(text, training={"keep_checkpoints": 1})
    with monkeypatch.context() as patch:
        patch.setattr("crosscurrent.experiments.text_run.save_model", full_disk)
        with pytest.raises(OSError, match="no space"):
            run_text(recipe, tmp_path / "run")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    run_text(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics  # no step was made again
    assert_equal(tmp_path / "run", whole)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


def test_another_text_in_the_same_place_is_noticed(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(text, tmp_path / "tokens")
    recipe = tiny_text_recipe(tmp_path / "tokens")
    with monkeypatch.context() as patch:
        patch.setattr("crosscurrent.experiments.text_run.save_model", full_disk)
        with pytest.raises(OSError, match="no space"):
            run_text(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "other").mkdir()
    shutil.copytree(prepared_text(tmp_path / "other", seed=2), tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"was begun with other versions .text "):
        run_text(recipe, tmp_path / "run")


def test_told_to_end_it_goes_on_with_fewer_processes(whole: Path, others: Path) -> None:
    """SIGTERM in two processes, after which one goes on with the rows that are left."""
    assert_close(others / "terminated", whole, 1e-5)


def test_shards_are_put_together(others: Path, tmp_path: Path) -> None:
    assert consolidate(others / "fsdp2", tmp_path / "model") == 6
    assert_same_files(tmp_path / "model", others / "fsdp2" / "model")
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 5. It has: 4, 6"):
        consolidate(others / "fsdp2", tmp_path / "other", step=5)
    assert not (tmp_path / "other").exists()


def assert_same_files(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_plain_checkpoint_is_consolidated_too(whole: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    assert "after step 4" in run_cli("consolidate", str(whole), str(tmp_path / "model"), "--step", "4").output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model") is not None


@pytest.fixture
def run_cli() -> Callable[..., Any]:
    from typer.testing import CliRunner

    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.mark.once
@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("text/nano/")])
def test_every_small_recipe_trains_two_steps(
    name: str, text: Path, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    """On short rows; that the larger ones have the published sizes is tested in test_recipes.py."""
    sizes = ("data.sequence_length=16", "training.max_steps=2", "training.batch_size=2", "evaluation.max_rows=2")
    gap = ["evaluation.gap_length=8"] if "t2mlr" in name else []
    done = run_cli("train", name, f"data.prepared={text}", *sizes, *gap, "--output", str(tmp_path / "run"))
    assert done.exit_code == 0 and "validation loss" in done.output and "perplexity" in done.output, done.output
    assert [row["step"] for row in TextRunFolder(tmp_path / "run").metrics.rows() if "loss" in row] == [1, 2]


def test_runs_side_by_side(whole: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    shutil.copytree(whole, tmp_path / "runs" / "t2mlr" / "seed-5")
    shutil.copytree(whole, tmp_path / "runs" / "begun" / "seed-5", ignore=shutil.ignore_patterns("result.json"))
    done = run_cli("report", str(tmp_path / "runs"), "--output", str(tmp_path / "report"))
    assert done.exit_code == 0 and "1 finished runs of 2" in done.output
    assert (tmp_path / "report" / "curves.png").stat().st_size > 10_000
    table = (tmp_path / "report" / "table.md").read_text()
    assert f"{TextRunFolder(whole).result()['validation_loss']:.4f}" in table and "| t2mlr |" in table
    points = (tmp_path / "report" / "curves.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in points[1:]] == [["t2mlr", "5", "360"], ["t2mlr", "5", "720"]]
    shutil.rmtree(tmp_path / "runs" / "t2mlr")
    assert run_cli("report", str(tmp_path / "runs"), "--output", str(tmp_path / "none")).exit_code == 1


@pytest.mark.parametrize("model", ["rlt", "t2mlr"])
def test_curricula_and_the_gap(model: str, text: Path, tmp_path: Path) -> None:
    curriculum = {"feedback_interval": {"steps": [[0, 4], [3, 1]]}}
    recipe = tiny_text_recipe(text, model, curriculum=curriculum, evaluation={"gap_rows": 1, "gap_length": 9})
    run_text(recipe, tmp_path / "run")
    rows = [row for row in TextRunFolder(tmp_path / "run").metrics.rows() if "loss" in row]
    assert [row["feedback_interval"] for row in rows] == [4, 4, 4, 1, 1, 1]
    assert ["gap/loss" in row for row in rows] == [True, False, False, True, False, False]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.feedback_interval == 1


@pytest.mark.parametrize("model", MODELS)
def test_documents_of_a_row_do_not_meet(model: str, text: Path) -> None:
    """Loss and gradients of a packed row are those of its documents alone, in each kind of batch."""
    recipe = tiny_text_recipe(text, model)
    net = build_text_model(recipe, PreparedText(text)).double()
    pieces = [torch.randint(1, 30, (length,)).numpy() for length in (4, 1, 6)]
    collate = collate_rows_for_attention if model == "transformer" else collate_rows
    batch = collate([packed_row(pieces, 13)])
    loss = net(**batch, use_cache=False).loss
    loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None}
    net.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        if len(piece) > 1:
            ids = torch.from_numpy(piece)[None]
            total = total + net(ids, labels=ids, use_cache=False).loss * (len(piece) - 1)
    (total / 8).backward()
    assert float(loss) == pytest.approx(float(total) / 8, rel=1e-12)
    for name, parameter in net.named_parameters():
        if name in packed and parameter.grad is not None:
            torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-9, atol=1e-12)


def broken_step(step: int | None, what: float) -> Callable[..., Any]:
    """A training step whose gradients, at some step or (None) always, are multiplied by something."""
    original = Trainer.training_step

    def training_step(self: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = original(self, *args, **kwargs)
        if step in (None, self.state.global_step + 1):
            assert self.model is not None
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(what)
            return loss * what
        return loss

    return training_step


@pytest.mark.parametrize("what", [math.nan, math.inf, 100.0])
def test_a_bad_step_is_skipped_or_stops(
    what: float, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trainer, "training_step", broken_step(5, what))
    kind = "nonfinite" if not math.isfinite(what) else "spike"
    skip = tiny_text_recipe(text, guard={kind: "skip", "spike_window": 3})
    result = run_text(skip, tmp_path / "skip")
    assert result is not None and result["num_skipped_steps"] == 1
    rows = {row["step"]: row for row in TextRunFolder(tmp_path / "skip").metrics.rows() if "loss" in row}
    assert [step for step, row in rows.items() if SKIPPED in row] == [5]
    assert math.isfinite(rows[6]["loss"]) and not math.isclose(rows[5]["loss"], rows[6]["loss"])
    assert "step 5 is skipped" in capsys.readouterr().err
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(tmp_path / "skip").values())
    monkeypatch.setattr(Trainer, "training_step", broken_step(5, what))
    stop = tiny_text_recipe(text, guard={kind: "stop", "spike_window": 3})
    with pytest.raises(NonFiniteError, match=r"step 5: the loss is .*The step was not made"):
        run_text(stop, tmp_path / "stop")
    assert complete_steps(tmp_path / "stop" / "checkpoints")[-1] == 4


def test_a_skipped_step_leaves_weights_and_optimizer_alone(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "training_step", broken_step(6, math.nan))
    training = {"save_steps": 1}
    run_text(tiny_text_recipe(text, guard={"nonfinite": "skip"}, training=training), tmp_path / "run")
    before, after = (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" for step in (5, 6))
    assert_same_files(before, after)
    first, second = (torch.load(folder / "optimizer.pt")["state"] for folder in (before, after))
    assert all(torch.equal(first[key][name], second[key][name]) for key in first for name in first[key])


def test_steps_that_are_all_bad_stop(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscurrent.training.text_trainer.MOST_SKIPS", 3)
    recipe = tiny_text_recipe(text, guard={"nonfinite": "skip"})
    monkeypatch.setattr(Trainer, "training_step", broken_step(None, math.nan))
    with pytest.raises(NonFiniteError, match=r"step 3: .* 3 steps were skipped in a row"):
        run_text(recipe, tmp_path / "run")


def test_a_signal_after_the_last_step_is_not_lost() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        with StopOnSignal() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert not told
        assert told == [signal.SIGTERM] and stop.step is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_finished_run_needs_its_text_no_more(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "tokens")
    recipe = tiny_text_recipe(tmp_path / "tokens", training={"max_steps": 1})
    result = run_text(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / "tokens")
    assert run_text(recipe, tmp_path / "run") == result
    with pytest.raises(ValueError, match="is inside of the run"):
        consolidate(tmp_path / "run", tmp_path / "run" / "model", overwrite=True)


def test_prepare_refuses_what_it_cannot_go_on_with(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    write_jsonl(tmp_path / "texts.jsonl", random_texts(9))
    inside = run_cli("prepare", str(tmp_path), "--tokenizer", "new:300", "--output", str(tmp_path / "tokens"))
    assert inside.exit_code == 2 and "is inside of the source" in inside.output
    for size in ("", "abc", "256", "9" * 21):
        wrong = run_cli("prepare", str(tmp_path), "--tokenizer", f"new:{size}", "--output", "out")
        assert wrong.exit_code == 2 and "takes a number from 257" in wrong.output


def gone(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    return values | {"data": values["data"] | {"prepared": str(folder / "nowhere")}}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("t2mlr", {"training": {"sharding": "fsdp2"}}, "there is one: start it with torchrun"),
        ("rlt", {"training": {"gradient_checkpointing": True}}, "recompute_every"),
        ("transformer", {"training": {"fusion_learning_rate": 0.1}}, "only a t2mlr has a fusion"),
        ("transformer", {"evaluation": {"gap_rows": 1}}, "has no effect on a model without recurrence"),
        ("transformer", {"evaluation": {"solver": {"name": "sequential"}}}, "evaluation.solver has no meaning"),
        ("transformer", {"curriculum": {"feedback_interval": {"steps": [[0, 2]]}}}, "needs a model with feedback"),
        ("t2mlr", {"evaluation": {"gap_rows": 1, "gap_length": 16}}, "gap_length=16 is above data.sequence_length=15"),
        ("t2mlr", {"model": {"vocab_size": 9}}, "cannot read .*, whose tokenizer 'letters' has"),
        ("t2mlr", {"training": {"save_step": 3}}, "there is no key 'save_step'.*save_steps"),
        ("t2mlr", {"guard": {"spike_factor": 0.5}}, "spike_factor=0.5 is not allowed"),
        ("t2mlr", {"data": {"sequence_length": 1}}, "data.sequence_length"),
        ("t2mlr", {"data": {"sequence_length": 100_000}}, "is more than the .* tokens that"),
        ("transformer", {"model": {"num_key_value_heads": 3}}, "not a multiple of num_key_value_heads=3"),
        ("transformer", {"training": {"liger_kernel": True}}, "liger-kernel"),
        ("transformer", {"training": {"report_to": ["wandb"]}}, "wandb is not installed"),
    ],
)
def test_what_is_refused(model: str, changes: dict[str, Any], message: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_text(tiny_text_recipe(text, model, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_models_that_carry_over_documents_are_refused(model_type: str, text: Path, tmp_path: Path) -> None:
    model = {"architecture": "transformers", "model_type": model_type}
    with pytest.raises(ValueError, match=r"reaches the next one|position_ids|do not make a model"):
        run_any(recipe_of(tiny_text_values(text, model), "x"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_bad_input(text: Path, tmp_path: Path, whole: Path) -> None:
    values = tiny_text_values(text, MODELS["t2mlr"])
    with pytest.raises(ValueError, match="is no folder of prepared text"):
        run_any(recipe_of(gone(values, tmp_path), "x"), tmp_path / "run")
    with pytest.raises(ValueError, match="an lstm carries its state over"):
        recipe_of(tiny_text_values(text, {"architecture": "lstm"}), "x")
    with pytest.raises(ValueError, match="either a task or data"):
        recipe_of(values | {"task": {"name": "parity"}}, "x")
    with pytest.raises(ValueError, match="holds a run of another recipe"):
        run_text(tiny_text_recipe(text, seed=6), whole)
    file = tmp_path / "study.yaml"
    file.write_text("tasks: {}\nmodels: {}\n")
    with pytest.raises(ValueError, match="is a study, not a recipe"):
        load_recipe(file)
    assert not isinstance(recipe_of(tiny_values(), "x"), TextRecipe)


def test_text_without_held_out_documents_is_refused(tmp_path: Path) -> None:
    from crosscurrent.data.prepare import prepare
    from crosscurrent.data.sources import open_source
    from tests.tiny_texts import ending_tokenizer

    source = open_source([str(write_jsonl(tmp_path / "texts.jsonl", random_texts(4)))])
    prepare(source, ending_tokenizer(), tmp_path / "tokens", tokenizer_name="letters", validation_share=0.0)
    with pytest.raises(ValueError, match="no tokens in split 'validation'"):
        run_text(tiny_text_recipe(tmp_path / "tokens"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_lost_tokenizer_is_named(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "tokens")
    shutil.rmtree(tmp_path / "tokens" / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer is missing"):
        run_text(tiny_text_recipe(tmp_path / "tokens"), tmp_path / "run")
