"""Fine-tuning on reasoning problems: runs, baselines, and what is said about them."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli.main import app
from crosscurrent.data.problems import ProblemTokenizer
from crosscurrent.evaluation.answering import Estimate, Record, read_answers
from crosscurrent.experiments.finetuning.comparing import answer_untouched, baseline_of
from crosscurrent.experiments.finetuning.examples import pack
from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.experiments.finetuning.report import Entry, difference, read_comparisons
from crosscurrent.experiments.finetuning.run import build_finetuned, run_finetune
from crosscurrent.experiments.finetuning.step_time import _Step, step_time_ratio
from crosscurrent.experiments.settings import merge, validated
from crosscurrent.experiments.study import find_recipe
from crosscurrent.models.outputs import IGNORED
from crosscurrent.suggestions import differences
from crosscurrent.tasks.reasoning import get_reasoning_task
from crosscurrent.tasks.reasoning.variable_assignment import VariableAssignment
from tests.recipes import every_task_and_every_model
from tests.tiny_base import save_tiny_base

SMALL: dict[str, Any] = {
    "problems": {"name": "variable_assignment", "num_validation": 4, "num_test": 6},
    "base": {"layer_start": 1, "layer_end": 3},
    "training": {"max_steps": 4, "batch_size": 3, "learning_rate": 0.01, "eval_steps": 2, "save_steps": 2},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base whose texts have an end."""
    folder = save_tiny_base(tmp_path_factory.mktemp("base") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<unk>"
    tokenizer.save_pretrained(folder)
    return folder


def recipe(base: Path, /, **changes: Any) -> FinetuneRecipe:
    return validated(FinetuneRecipe, merge(SMALL, {"base": {"name": str(base)}}, changes), "tiny")


def written(base: Path, folder: Path, /, **changes: Any) -> Path:
    """A recipe in a file."""
    file = folder / "tiny.yaml"
    file.write_text(json.dumps(merge(SMALL, {"base": {"name": str(base)}}, changes)))
    return file


def run_cli(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def compared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison of two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    result = run_cli("finetune", written(base, folder), "--seeds", "1,2", "-o", folder / "runs")
    assert result.exit_code == 0, result.output
    assert "| retrofit | 2 | 4 |" in result.stdout
    return folder / "runs"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def test_a_comparison_is_of_the_same_problems(compared: Path) -> None:
    entries = {entry.model: entry for entry in read_comparisons([compared])[compared]}
    assert list(entries) == ["retrofit", "baseline", "baseline-same-time", "untouched"]
    assert len({tuple(dict.fromkeys(one.id for one in entry.records)) for entry in entries.values()}) == 1
    rows = {row["model"]: row for row in json.loads((compared / "comparison.json").read_text())}
    assert rows["retrofit"]["steps"] == rows["baseline"]["steps"] == 4
    ratio = json.loads((compared / "step_time.json").read_text())["ratio"]
    assert rows["baseline-same-time"]["steps"] == round(4 * ratio)
    assert rows["retrofit"]["num_parameters"] > rows["baseline"]["num_parameters"]
    scores = [
        statistics.fmean(
            record.scores["accuracy"]
            for seed in (1, 2)
            for record in read_answers(compared / model / f"seed-{seed}" / "answers.jsonl").records
        )
        for model in ("retrofit", "baseline")
    ]
    assert rows["retrofit"]["differences"]["baseline"]["difference"]["mean"] == pytest.approx(scores[0] - scores[1])
    assert len(rows["retrofit"]["by_seed"]) == 2
    for kind in ("png", "svg", "md"):
        assert (compared / f"comparison.{kind}").stat().st_size


def test_what_was_trained_generates_as_it_was_trained(compared: Path, base: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(compared / "retrofit" / "seed-1" / "model")
    assert isinstance(model, cc.T2MLRForCausalLM) and model.config.prompt_recurrence
    assert float(model.fusion.recurrent_scale.detach().abs()) > 0
    record = read_answers(compared / "retrofit" / "seed-1" / "answers.jsonl").records[0]
    tokenizer: Any = AutoTokenizer.from_pretrained(compared / "retrofit" / "seed-1" / "model")
    ids = tokenizer(record.prompt, return_tensors="pt")["input_ids"]
    said = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=tokenizer.eos_token_id)[
        0, ids.shape[1] :
    ]
    assert tokenizer.decode(said, skip_special_tokens=True) == record.output


def test_a_baseline_differs_in_the_recurrence_alone(base: Path) -> None:
    changes = {"training": {"fusion_learning_rate": 0.3, "method": "lora"}, "problems": {"recurrent": "answer"}}
    asked = recipe(base, **changes)
    found = differences(asked.model_dump(), baseline_of(asked).model_dump())
    assert {line.split(":")[0] for line in found} == {
        "base.layer_start",
        "base.layer_end",
        "training.fusion_learning_rate",
        "problems.recurrent",
    }
    assert differences(baseline_of(asked).model_dump(), baseline_of(asked, max_steps=7).model_dump()) == [
        "training.max_steps: 4 -> 7"
    ]


def test_steps_are_timed_once_and_on_what_is_trained(base: Path, tmp_path: Path) -> None:
    asked = recipe(base, training={"gradient_checkpointing": True, "microbatch_size": 1})
    step = _Step(asked)
    assert step.model.is_gradient_checkpointing
    before = step.model.fusion.recurrent_scale.detach().clone()
    assert step.seconds(0) > 0 and len(step._batches(0)) == 3
    assert not torch.equal(before, step.model.fusion.recurrent_scale)  # the optimizer is part of a step
    ratio = step_time_ratio(asked, baseline_of(asked), tmp_path)
    assert len(json.loads((tmp_path / "step_time.json").read_text())["seconds"]) == 5
    assert step_time_ratio(asked, baseline_of(asked), tmp_path) == ratio  # read, not measured again


def test_baselines_read_the_same_examples_first(base: Path) -> None:
    asked = recipe(base)
    longer = baseline_of(asked, max_steps=9)
    (_, ours), (_, theirs) = build_finetuned(asked), build_finetuned(longer)
    assert len(theirs.train_rows) > len(ours.train_rows)
    for index in range(len(ours.train_rows)):
        assert torch.equal(ours.train_rows[index]["input_ids"], theirs.train_rows[index]["input_ids"])


def test_seeds_differ_in_what_they_learn(compared: Path, base: Path) -> None:
    """Also without recurrence, where nothing is drawn but the data."""
    for model in ("retrofit", "baseline"):
        first, second = (weights(compared / model / f"seed-{seed}") for seed in (1, 2))
        name = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(first[name], second[name])
    problems = [build_finetuned(recipe(base, seed=seed))[1] for seed in (1, 2)]
    assert [one.id for one in problems[0].problems("test")] == [one.id for one in problems[1].problems("test")]


def test_a_finished_comparison_is_not_done_again(compared: Path, base: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in compared.rglob("*.safetensors")}
    result = run_cli("finetune", written(base, tmp_path), "--seeds", "1,2", "-o", compared)
    assert result.exit_code == 0, result.output
    assert before == {path: path.stat().st_mtime_ns for path in compared.rglob("*.safetensors")}
    other = run_cli("finetune", written(base, tmp_path), "training.learning_rate=0.5", "--seeds", "1", "-o", compared)
    assert other.exit_code == 1 and "another recipe" in other.stderr


def test_report_shows_runs_of_fine_tuning(compared: Path, tmp_path: Path) -> None:
    result = run_cli("report", compared, "-o", tmp_path / "report")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report" / "comparison.md").read_text()
    assert text == (compared / "comparison.md").read_text()
    assert text.startswith("variable_assignment: ") and "6 test problems" in text and "layers [1, 3)" in text


@pytest.mark.parametrize("stopped", ["training", "answering"])
def test_a_stopped_run_goes_on_to_the_same_result(
    stopped: str, base: Path, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, whole = recipe(base, seed=1), compared / "retrofit" / "seed-1"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stopped == "training":
            interrupt_at_step(patch, 3)
        else:
            patch.setattr("crosscurrent.tasks.reasoning.variable_assignment.VariableAssignment.judge", interrupted)
        run_finetune(asked, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
    run_finetune(asked, tmp_path / "run")
    ours, theirs = weights(tmp_path / "run"), weights(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    outputs = [[one.output for one in read_answers(run / "answers.jsonl").records] for run in (tmp_path / "run", whole)]
    assert outputs[0] == outputs[1]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_signal_in_the_last_step_ends_a_comparison(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next run would begin as if nothing had been said."""
    from crosscurrent.training.text_trainer import TextTrainer

    whole = TextTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == 4:
            signal.raise_signal(signal.SIGTERM)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(TextTrainer, "training_step", training_step)
    result = run_cli("finetune", written(base, tmp_path), "-o", tmp_path / "runs")
    assert result.exit_code == 143 and "goes on from it" in result.stderr
    assert not (tmp_path / "runs" / "baseline").exists()
    monkeypatch.undo()
    assert run_finetune(recipe(base), tmp_path / "runs" / "retrofit" / "seed-42") is not None


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def interrupt_at_step(patch: pytest.MonkeyPatch, step: int) -> None:
    from crosscurrent.training.text_trainer import TextTrainer

    whole = TextTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == step:
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    patch.setattr(TextTrainer, "training_step", training_step)


@pytest.mark.parametrize("method", ["lora", "fusion"])
def test_what_is_trained(method: str, base: Path, tmp_path: Path) -> None:
    run_finetune(recipe(base, training={"method": method, "max_steps": 2}), tmp_path / "run")
    found = weights(tmp_path / "run")
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    changed = {name for name, value in before.items() if name in found and not torch.equal(value, found[name])}
    assert any("fusion" in name and float(value.abs().max()) > 0 for name, value in found.items())
    assert not any("lora" in name for name in found)  # merged
    assert ("embed_tokens" in " ".join(changed)) is False
    assert bool(changed) == (method == "lora")
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists() == (method == "lora")


def test_a_lora_baseline_is_trained_alike(base: Path, tmp_path: Path) -> None:
    run_finetune(baseline_of(recipe(base, training={"method": "lora", "max_steps": 1})), tmp_path / "run")
    assert not isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"), cc.T2MLRForCausalLM)


@pytest.mark.parametrize("recurrent", ["all", "answer", None])
@pytest.mark.usefixtures("exact_arithmetic")
def test_packed_problems_equal_problems_alone(recurrent: str | None, base: Path) -> None:
    where: dict[str, Any] = {} if recurrent else {"layer_start": None, "layer_end": None}
    padded, packed = (
        recipe(base, problems={"packed_length": length, "num_train": 12, "recurrent": recurrent}, base=where)
        for length in (None, 260)
    )
    losses = []
    for asked in (padded, packed):
        model, problems = build_finetuned(asked)
        model = model.double().eval()
        if recurrent:
            open_gates(model)
        rows = problems.train
        batch = problems.collate(rows)
        total = model(**batch, use_cache=False).loss * (batch["labels"][:, 1:] != IGNORED).sum()
        total.backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        losses.append((len(rows), total.item(), gradients))
    (num_padded, loss, gradients), (num_packed, packed_loss, packed_gradients) = losses
    assert num_packed < num_padded
    assert packed_loss == pytest.approx(loss, rel=1e-9)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-7, atol=1e-9)


def open_gates(model: Any) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.fusion.parameters():
            parameter.normal_()


def test_prompts_of_training_are_those_that_are_asked(base: Path) -> None:
    task = get_reasoning_task("variable_assignment", depth=3)
    tokens = ProblemTokenizer(task, AutoTokenizer.from_pretrained(base), "chat")
    problem = task.problems("train", count=1)[0]
    prompt, example = tokens.prompt_ids(problem), tokens.example(problem, loss_on="answer", recurrent="answer")
    assert example["input_ids"].tolist() == [*prompt, *tokens.completion_ids(problem)]
    assert (example["labels"] != IGNORED).tolist() == [False] * len(prompt) + [True] * 2
    assert example["recurrent_mask"].tolist() == [0] * len(prompt) + [1] * 2
    everything = tokens.example(problem, loss_on="all", recurrent="all")
    assert everything["labels"].tolist() == everything["input_ids"].tolist() and everything["recurrent_mask"].all()
    assert tokens.prompt_text(problem).startswith("Q: ") and tokens.format == "chat"


def test_rows_are_packed_whole() -> None:
    examples = [
        {name: torch.full((size,), size) for name in ("input_ids", "labels", "recurrent_mask")} for size in (3, 4, 2, 6)
    ]
    rows = pack(examples, row_length=7)
    assert [row["input_ids"].tolist() for row in rows] == [[3] * 3 + [4] * 4, [2] * 2 + [0] * 5, [6] * 6 + [0]]
    assert rows[1]["labels"].tolist() == [2, 2] + [IGNORED] * 5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"base": {"layer_end": 9}}, "not a range of this model's layers: allowed is .* <= 4"),
    ({"base": {"layer_start": None}}, "give both layer_start and layer_end"),
    ({"base": {"layer_start": None, "layer_end": None, "feedback_interval": 4}}, "feedback_interval has no effect"),
    ({"base": {"layer_start": None, "layer_end": None}, "training": {"method": "fusion"}}, "give base.layer_start"),
    ({"training": {"lora": {"r": 4}}}, "no effect with method=full"),
    ({"problems": {"name": "variable_asignment"}}, "Did you mean 'variable_assignment'"),
    ({"problems": {"options": {"deep": 5}}}, "no option 'deep'"),
    ({"problems": {"options": {"depth": 50}}}, "depth=50 is not allowed"),
    ({"problems": {"data": "somewhere"}}, "makes its problems itself"),
    ({"problems": {"max_length": 20}}, "all 12 train problems .* more than 20 tokens: raise"),
    ({"evaluation": {"num_samples": 4}}, "give a temperature"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(changes: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_finetune(recipe(base, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing is left behind


def test_a_base_without_what_it_needs_is_refused(base: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no chat template: ask it as text"):
        run_finetune(recipe(tmp_path / "bare", problems={"prompt_format": "chat"}), tmp_path / "run")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no end-of-text token"):
        run_finetune(recipe(tmp_path / "bare"), tmp_path / "run")


def test_a_base_without_a_pad_token_works(base: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = model.config.pad_token_id = model.generation_config.pad_token_id = None
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "bare")
    result = run_finetune(recipe(tmp_path / "bare", training={"max_steps": 1}), tmp_path / "run")
    assert result is not None and result["test"]["num_problems"] == 6


def test_long_problems_are_named(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len(build_finetuned(recipe(base))[1].train[0]["input_ids"])
    plain_prompt = VariableAssignment.plain_prompt
    longer = ("-3", "-7")
    monkeypatch.setattr(
        VariableAssignment, "plain_prompt", lambda self, one: plain_prompt(self, one) + "x" * one.id.endswith(longer)
    )
    problems = build_finetuned(recipe(base, problems={"max_length": length}))[1]
    assert len(problems.train) == 10
    said = capsys.readouterr().err
    assert f"2 of 12 train problems have more than {length} tokens and are left out: train-42-3, " in said


def test_labels_that_are_all_masked_are_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, problems = build_finetuned(recipe(base))
    monkeypatch.setattr(ProblemTokenizer, "example", masked(ProblemTokenizer.example))
    with pytest.raises(ValueError, match=r"no train example .* has a token that the loss covers"):
        assert problems.train


def masked(example: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    def all_masked(*args: Any) -> dict[str, torch.Tensor]:
        found = example(*args)
        return found | {"labels": torch.full_like(found["labels"], IGNORED)}

    return all_masked


def all_data(folder: Path) -> Path:
    """A few records for every task that reads some."""
    source = Path(os.environ["CROSSCURRENT_TEST_DATA"])
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "gsm8k_aug_valid.txt", "gsm8k_aug_test.txt"):
        (folder / name).symlink_to(source / name)
    context = {"title": ["A"], "sentences": [["It is."]]}
    for split, numbers in (("dev", range(2)), ("train", range(2, 60))):
        rows = [{"question": f"Is it {number}?", "answer": "no", "context": context} for number in numbers]
        (folder / f"hotpotqa_distractor_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, split in enumerate(("train", "validation", "test")):
        rows = [
            {"problem": f"{number}{i} + 1?", "generated_solution": "So 1.", "expected_answer": "1"} for i in range(3)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", every_task_and_every_model("reasoning/"))
def test_shipped_recipes_train_two_steps(name: str, base: Path, tmp_path: Path) -> None:
    """On a tiny base, and a few problems."""
    shipped = find_recipe(name)[1]
    data = None if shipped.problems.task.is_generated else str(all_data(tmp_path))
    few = {"num_train": 3, "num_validation": 1, "num_test": 2, "data": data, "max_length": None, "packed_length": None}
    small = {"max_steps": 2, "batch_size": 2, "microbatch_size": 1, "warmup_steps": 1, "precision": "fp32"}
    where = {"layer_start": 1, "layer_end": 3} if shipped.base.is_recurrent else {}
    changes = {
        "problems": few,
        "training": small,
        "base": {"name": str(base), **where},
        "evaluation": {"max_new_tokens": 3},
    }
    result = run_finetune(find_recipe(name, changes)[1], tmp_path / "run")
    assert result is not None and result["steps"] == 2 and result["test"]["num_problems"] == 2


def test_a_comparison_needs_a_retrofit(base: Path, tmp_path: Path) -> None:
    plain = run_cli(
        "finetune", written(base, tmp_path, base={"layer_start": None, "layer_end": None}), "-o", tmp_path / "runs"
    )
    assert plain.exit_code == 1 and "a comparison needs a retrofit" in plain.stderr
    fusion = run_cli("finetune", written(base, tmp_path), "training.method=fusion", "-o", tmp_path / "runs")
    assert fusion.exit_code == 1 and "--baselines untouched" in fusion.stderr
    assert run_cli("finetune", "rlt/mini/parity/rlt-1").exit_code == 1
    assert run_cli("finetune", written(base, tmp_path), "--baselines", "bseline").exit_code == 2
    assert not (tmp_path / "runs").exists()


def answered(*right: list[int]) -> tuple[Record, ...]:
    """Records of some problems; of each the scores of its outputs."""
    return tuple(
        Record(f"p{number}", sample, "", "", "", "", {"accuracy": float(score)}, 1, 1, False, False, 0.0)
        for number, scores in enumerate(right)
        for sample, score in enumerate(scores)
    )


def test_differences_are_over_common_seeds(base: Path) -> None:
    """Of seeds 1 and 2 the first model has 1 and 0 right on p0; the second has only seed 2."""
    asked = recipe(base)
    ours = Entry("retrofit", asked, ({}, {}), answered([1, 0], [0, 1]), seeds=(1, 2))
    theirs = Entry("baseline", asked, ({},), answered([1], [0]), seeds=(2,))
    found = difference(ours, theirs)
    assert (found.difference.mean, found.num_better, found.num_worse) == (0.0, 1, 1)  # 0 - 1 on p0, 1 - 0 on p1
    untouched = Entry("untouched", asked, (), answered([0], [0]), seeds=())
    assert difference(ours, untouched).difference.mean == 0.5
    assert difference(ours, ours).difference == Estimate(0.0, 0.0, 0.0)
    other = Entry("other", asked, ({},), answered([1], [1]), seeds=(3,))
    with pytest.raises(ValueError, match="no seed in common"):
        difference(ours, other)


@pytest.mark.once
def test_two_processes_come_to_what_one_comes_to(base: Path, compared: Path, tmp_path: Path) -> None:
    file = written(base, tmp_path, seed=1, training={"batch_size": 4})
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert run_cli("train", file, "-o", alone).exit_code == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "crosscurrent", "train", str(file), "--output", str(shared)]
    subprocess.run(command, check=True, timeout=240, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    ours, theirs = weights(shared), weights(alone)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 5e-4  # the rate is 1e-2
    assert (shared / "result.json").exists() and not (shared / "checkpoints").exists()


def own_data(folder: Path, answer: str = "1") -> Path:
    """Files of questions, different ones for each split."""
    folder.mkdir(exist_ok=True)
    for number, split in enumerate(("train", "validation", "test")):
        rows = [{"question": f"{number}{i} + 1?", "answer": answer} for i in range(3)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_on_changed_data_are_not_compared(base: Path, tmp_path: Path) -> None:
    own = {"name": "question_answer", "data": str(own_data(tmp_path / "data")), "num_test": 2, "num_validation": None}
    file = written(base, tmp_path, problems=own, training={"max_steps": 1}, evaluation={"max_new_tokens": 2})
    command = ("finetune", file, "-o", tmp_path / "runs", "--baselines")
    first = run_cli(*command, "none")
    assert first.exit_code == 0, first.output  # three validation problems are enough where no number is asked for
    own_data(tmp_path / "data", answer="2")
    mixed = run_cli(*command, "baseline")
    assert mixed.exit_code == 1 and "not of the same problems" in mixed.stderr
    own_data(tmp_path / "data")
    (tmp_path / "data" / "train.jsonl").write_text('{"question": "7?", "answer": "8"}\n')
    mixed = run_cli(*command, "baseline")
    assert mixed.exit_code == 1 and "is of another recipe" not in mixed.stderr
    for run in (tmp_path / "runs" / "baseline").iterdir():
        shutil.rmtree(run)
    mixed = run_cli(*command, "baseline")
    assert mixed.exit_code == 1 and "the files have changed" in mixed.stderr


def test_what_is_kept_of_another_recipe_is_not_taken(base: Path, compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "untouched", tmp_path / "untouched")
    shutil.copy(compared / "step_time.json", tmp_path)
    assert answer_untouched(recipe(base), tmp_path / "untouched")["num_problems"] == 6
    with pytest.raises(ValueError, match=r"scores.json is of another recipe \(problems.num_test: 6 -> 5\)"):
        answer_untouched(recipe(base, problems={"num_test": 5}), tmp_path / "untouched")
    asked = recipe(base, base={"layer_end": 4})
    with pytest.raises(ValueError, match=r"step_time.json is of another recipe \(with.base.layer_end: 3 -> 4\)"):
        step_time_ratio(asked, baseline_of(asked), tmp_path)


def test_what_does_not_fit_is_said_before_training(base: Path, compared: Path, tmp_path: Path) -> None:
    recurrent = recipe(base, base={"name": str(compared / "retrofit" / "seed-1" / "model")})
    with pytest.raises(ValueError, match="recurrent already"):
        run_finetune(recurrent, tmp_path / "run")
    with pytest.raises(ValueError, match="leaves for a prompt"):
        run_finetune(recipe(base, evaluation={"max_new_tokens": 2047}), tmp_path / "run")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "longer")
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        run_finetune(recipe(tmp_path / "longer"), tmp_path / "run")
    for template in ("{{ raise_exception('no') }}", "{% if %}", ""):
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = template or "{# nothing #}"
        tokenizer.save_pretrained(tmp_path / "longer")
        with pytest.raises(ValueError, match="chat template"):
            run_finetune(recipe(tmp_path / "longer", problems={"prompt_format": "chat"}), tmp_path / "run")
    torch.save({}, tmp_path / "longer" / "pytorch_model.bin")
    (tmp_path / "longer" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        run_finetune(recipe(tmp_path / "longer"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
