"""Scores against counting by hand, on models whose answers are known."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscurrent.data.generated import TrainingExamples, collate, inputs_for
from crosscurrent.evaluation.scoring import METRICS, Examples, Predictions, metrics_of, predict
from crosscurrent.evaluation.segments import segment_logits
from crosscurrent.experiments.run import build_model, examples_of, run
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.recurrence import Jacobi, Sequential
from crosscurrent.tasks import IGNORED, Example, Task, get_task, task_names
from crosscurrent.tasks.s5_retrieval import S5Retrieval
from tests.float64 import KeepFloat64
from tests.recipes import tiny_recipe


class Oracle(nn.Module):
    """Knows the answers of some examples; is wrong on those rows that it is told to be."""

    def __init__(self, task: Task, examples: Examples, wrong_rows: int = 0):
        super().__init__()
        self.device = torch.device("cpu")
        self.size = len(task.vocabulary)
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}
        for length in examples.lengths:
            for index in range(examples.count):
                one = task.example(examples.split, length, index, examples.seed, prefix_supervision=True)
                wrong = [(target + 1) % self.size if target != IGNORED else target for target in one.targets]
                self.known[one.tokens] = tuple(wrong) if index < wrong_rows else one.targets

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [tuple(ids[keep.bool()].tolist()) for ids, keep in zip(input_ids, mask, strict=True)]
        answers = [self.known[row] for row in rows]
        width = input_ids.shape[1]
        padded = torch.tensor([[*answer, *[0] * (width - len(answer))] for answer in answers]).clamp(min=0)
        return SimpleNamespace(logits=10.0 * torch.nn.functional.one_hot(padded, self.size).float())


@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("wrong_rows", [0, 3])
def test_metrics_count_right_rows(name: str, wrong_rows: int) -> None:
    task = get_task(name)
    examples = Examples(task, "validation", (11, 19), count=10, seed=1, batch_size=4)
    oracle: Any = Oracle(task, examples, wrong_rows)
    for length, said in predict(oracle, examples, generates=False):
        assert length in (11, 19) and len(said.targets) == 10
        for metric in set(task.metrics) - {"exact"}:
            right = METRICS[metric](said)
            if metric == "answer_tokens":  # rows differ in how many tokens they have
                assert right == 1.0 if wrong_rows == 0 else 0.0 < right < 1.0
            else:
                assert right == pytest.approx(1 - wrong_rows / 10)


def test_each_metric_by_hand() -> None:
    targets = torch.tensor([[1, 2, 3], [1, 2, IGNORED]])
    predicted = torch.tensor([[9, 2, 3], [1, 2, IGNORED]])
    said = Predictions(predicted, targets, loss=0.0, generated=targets)
    found = {name: METRICS[name](said) for name in METRICS}
    expected = {"final": 1.0, "prefix": 0.8, "tokens": 0.8, "sequence": 0.5, "answer_tokens": 0.8, "exact": 1.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    of_steps = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]]
    targets, predicted = torch.tensor(of_steps), torch.tensor(of_steps)
    predicted[0, [5, 7]] = predicted[1, 9] = 0  # a state and a letter, and a letter of the other sequence
    said = Predictions(predicted, targets, loss=0.0)
    assert [METRICS[name](said) for name in ("states", "values", "tokens")] == pytest.approx([3 / 4, 14 / 16, 17 / 20])


def test_metrics_judge_the_answer_whatever_the_loss_covers() -> None:
    """With every prefix in the loss, a sum's carries do not count as its answer."""
    task = get_task("addition")
    model = build_model(tiny_recipe(task={"name": "addition", "test_lengths": [9], "validation_lengths": [8]})).eval()
    plain, every = (Examples(task, "test", (9,), 12, 3, prefix_supervision=every) for every in (None, True))
    (_, first), (_, second) = (next(predict(model, examples, generates=False)) for examples in (plain, every))
    assert torch.equal(first.predicted, second.predicted) and metrics_of_tokens(first) == metrics_of_tokens(second)
    assert first.loss != second.loss


def metrics_of_tokens(said: Predictions) -> float:
    return METRICS["answer_tokens"](said)


@pytest.mark.parametrize("model", ["rlt-1", "transformer", "lstm", "t2mlr"])
def test_generated_answers_are_those_of_the_model_alone(model: str) -> None:
    """Ragged prompts, generated together, against recomputing everything for each token of each prompt."""
    task = get_task("addition")
    recipe = tiny_recipe(model, task={"name": "addition", "test_lengths": [9], "validation_lengths": [8]})
    built = build_model(recipe).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(1.5)
    examples = Examples(task, "validation", (8,), 6, seed=3)
    ((_, said),) = predict(built, examples, generates=True)
    assert said.generated is not None
    for index in range(6):
        one = task.example("validation", 8, index, 3)
        start = next(place for place, target in enumerate(one.targets) if target != IGNORED)
        ids = list(one.tokens[: start + 1])
        for target, generated in zip(one.targets[start:], said.generated[index].tolist(), strict=False):
            token = int(built(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            assert generated == token and target != IGNORED
            ids.append(token)
    assert set(metrics_of(task, said)) == {"answer_tokens", "exact"}


def test_scores_do_not_depend_on_the_batch_size() -> None:
    task = get_task("addition")
    model = build_model(tiny_recipe("rlt-2", task={"name": "addition", "test_lengths": [9], "validation_lengths": [8]}))
    model.eval().double()
    said = [
        next(predict(model, Examples(task, "validation", (8,), 10, 1, batch_size=size), generates=False))[1]
        for size in (1, 3, 10)
    ]
    assert torch.equal(said[0].predicted, said[1].predicted) and torch.equal(said[1].predicted, said[2].predicted)
    assert said[0].loss == pytest.approx(said[2].loss, rel=1e-6)


def test_training_examples_follow_from_their_index() -> None:
    task = get_task("parity")
    data = TrainingExamples(task, (3, 4, 5, 20), seed=1, batch_size=8, group_size=4, num_steps=3)
    assert len(data) == 24
    assert data.batch([12, 13])["input_ids"][1].tolist() == list(task.example("train", data.length(13), 13, 1).tokens)
    lengths = [data.length(index) for index in range(24)]
    assert all(len(set(lengths[start : start + 4])) == 1 for start in range(0, 24, 4)) and len(set(lengths)) > 1
    assert {data.length(index, longest=4) for index in range(24)} == {3, 4}
    assert {data.length(index, longest=2) for index in range(24)} == {3}  # below the shortest the shortest is drawn


def test_a_share_of_training_examples_has_the_greatest_length() -> None:
    data = TrainingExamples(get_task("parity"), (3, 4, 5, 20), 1, 10, 10, 100, longest_share=0.5)
    lengths = [data.length(10 * step, longest=5) for step in range(100)]
    assert 55 <= lengths.count(5) <= 80 and set(lengths) == {3, 4, 5}
    always = replace(data, longest_share=1.0)
    assert {always.length(index, longest=5) for index in range(1000)} == {5}


def test_batches_are_cut_to_a_number_of_tokens() -> None:
    data = TrainingExamples(get_task("parity"), (7,), 1, 12, 12, 1, max_tokens=24)
    whole, cut = replace(data, max_tokens=None).batch(range(12)), data.batch(range(12))
    assert whole["input_ids"].shape == (12, 8)
    assert torch.equal(cut["input_ids"], whole["input_ids"][:3])
    assert replace(data, max_tokens=1).batch(range(12))["input_ids"].shape == (1, 8)
    sums = TrainingExamples(get_task("addition"), (8,), 1, 12, 12, 1, max_tokens=60)  # of different widths
    assert 1 < sums.batch(range(12))["input_ids"].numel() <= 60


def test_collate_pads_only_where_lengths_differ() -> None:
    task = get_task("parity")
    equal = collate([task.example("train", 5, index) for index in range(3)])
    assert "attention_mask" not in equal and equal["input_ids"].shape == (3, 6)
    ragged = collate([task.example("train", 5, 0), task.example("train", 3, 0)])
    assert ragged["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    assert ragged["labels"][1, 4:].tolist() == [IGNORED, IGNORED]


def prompted(name: str = "t2mlr", **changes: Any) -> Any:
    """A model for S5-Retrieval, large enough weights to make a difference, and its recipe."""
    task = {"name": "s5_retrieval", "train_lengths": [2], "validation_lengths": [2], "test_lengths": [3]}
    built = build_model(tiny_recipe(name, task=task, **changes)).eval()
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            parameter.mul_(3.0).add_(0.3 if "_scale" in parameter_name else 0.0)
    return built


def test_collate_marks_prompts() -> None:
    prompt = Example((2, 0, 1, 1), (IGNORED, IGNORED, IGNORED, 1), num_prompt=2)
    batch = collate([prompt, Example((2, 0, 1), (IGNORED, IGNORED, 1))])
    assert batch["recurrent_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


@pytest.mark.parametrize("name", ["t2mlr", "rlt-1", "transformer", "lstm"])
def test_recurrent_models_are_told_of_prompts_and_others_are_not(name: str) -> None:
    batch = collate([get_task("s5_retrieval").example("train", 2, index) for index in range(2)])
    taken = inputs_for(prompted(name), batch)
    assert set(taken) == {"input_ids", "recurrent_mask"} if name in ("t2mlr", "rlt-1") else {"input_ids"}


@pytest.mark.parametrize("name", ["t2mlr", "rlt-1"])
def test_prompts_are_not_recurrent_in_tests(name: str) -> None:
    """Logits, and so the loss, are those of a call with the mask, and others without it."""
    task, built = get_task("s5_retrieval"), prompted(name)
    examples = Examples(task, "test", (3,), 4, seed=1, solver=Sequential())
    ((_, said),) = predict(built, examples, generates=False)
    batch = collate([task.example("test", 3, index, 1) for index in range(4)])
    mask = (torch.arange(batch["input_ids"].shape[1]) >= 82).expand_as(batch["input_ids"])
    losses = []
    for recurrent_mask in (mask, None):
        logits = built(batch["input_ids"], recurrent_mask=recurrent_mask, solver=Sequential(), use_cache=False).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item())
    assert said.loss == pytest.approx(losses[0], rel=1e-5) and abs(losses[0] - losses[1]) > 1e-3


class WritesItsState(S5Retrieval):
    """As S5-Retrieval with a single step, whose answer is written by the model."""

    name = "writes_its_state"
    metrics = ("exact",)


def test_prompts_are_not_recurrent_in_generation() -> None:
    task, built = WritesItsState(), prompted("t2mlr")
    examples = Examples(task, "test", (1,), 3, seed=1, solver=Sequential())
    ((_, said),) = predict(built, examples, generates=True)
    assert said.generated is not None
    differing = 0
    for index in range(3):
        one = task.example("test", 1, index, 1)
        written = {}
        for num_prompt in (one.num_prompt, 0):
            ids = list(one.tokens[: one.num_prompt + 1])
            for _ in range(5):
                mask = torch.arange(len(ids))[None] >= num_prompt
                logits = built(torch.tensor([ids]), recurrent_mask=mask, solver=Sequential(), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            written[num_prompt] = ids[-5:]
        assert said.generated[index].tolist() == written[one.num_prompt]
        differing += written[0] != written[one.num_prompt]
    assert differing


@pytest.mark.parametrize("name", ["rlt-1", "lstm"])  # a T2MLR starts with closed gates: no mask would be missed
def test_prompts_are_not_recurrent_in_training(name: str, tmp_path: Path) -> None:
    """The first loss of a run against that of the starting weights, computed by hand."""
    task = {"name": "s5_retrieval", "train_lengths": [2], "validation_lengths": [2], "test_lengths": [3]}
    recipe = tiny_recipe(name, task=task, training={"max_steps": 1, "batch_size": 4})
    assert run(recipe, tmp_path / "run") is not None
    (row,) = [row for row in RunFolder(tmp_path / "run").metrics.rows() if "loss" in row]
    built = build_model(recipe)
    examples = [get_task("s5_retrieval").example("train", 2, index, recipe.data_seeds.train) for index in range(4)]
    batch = collate(examples)
    inputs = {"recurrent_mask": batch["recurrent_mask"]} if name == "rlt-1" else {}
    logits = built(batch["input_ids"], **inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
    assert row["loss"] == pytest.approx(loss, rel=1e-5)


WINDOWED = {"encoder_sliding_window": 4, "memory_sliding_window": 3, "sliding_window": 2}
SEGMENTED: dict[str, tuple[str, dict[str, Any]]] = {
    "rlt": ("rlt-1", {}),
    "rlt_chunks": ("rlt-2", {}),
    "rlt_without_feedback": ("rlt-0", {}),
    "rlt_windowed": ("rlt-1", {"model": WINDOWED}),
    "t2mlr": ("t2mlr", {"model": {"solver": {"name": "sequential"}}}),
    "transformer": ("transformer", {}),
    "no_positions": ("transformer", {"model": {"positions": "none"}}),
    "gpt2": ("gpt2", {}),
    "lstm": ("lstm", {}),
}
for_segmented = pytest.mark.parametrize("name", SEGMENTED)


def segmented_model(name: str, task: str) -> Any:
    """In float64, with weights large enough to make a difference."""
    base, changes = SEGMENTED[name]
    lengths = {"train_lengths": [8], "validation_lengths": [8], "test_lengths": [8]}
    built: Any = build_model(tiny_recipe(base, task={"name": task} | lengths, **changes)).double().eval()
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            parameter.mul_(3.0).add_(0.3 if "_scale" in parameter_name else 0.0)
    return built


@for_segmented
@pytest.mark.parametrize(
    "task", ["addition", "s5_retrieval"]
)  # rows of different lengths; prompts that are not recurrent
def test_segments_give_the_logits_of_one_call(name: str, task: str) -> None:
    built = segmented_model(name, task)
    batch = collate([get_task(task).example("validation", 8, index) for index in range(5)])
    assert ("attention_mask" if task == "addition" else "recurrent_mask") in batch
    inputs = inputs_for(built, batch)
    num_tokens = inputs["input_ids"].shape[1]
    is_real = batch.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    with torch.no_grad(), KeepFloat64():
        ((everything, whole),) = segment_logits(built, inputs, None)
        assert everything == slice(0, num_tokens)
        for length in (1, 7) if task == "addition" else (25,):
            columns, parts = zip(*segment_logits(built, inputs, length), strict=True)
            assert [part.shape[1] for part in parts[:-1]] == [length] * (len(parts) - 1) and len(parts) > 1
            assert [index for c in columns for index in range(c.start, c.stop)] == list(range(num_tokens))
            assert (torch.cat(parts, dim=1) - whole)[is_real].abs().max() < 1e-12 * whole.abs().max()


@for_segmented
def test_scores_do_not_depend_on_segments(name: str) -> None:
    """Nor does the model ever see more than one; every prefix is in the loss, the answer in the scores."""
    built, task = segmented_model(name, "addition"), get_task("addition")
    seen: list[int] = []
    built.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    said = []
    for length in (None, 7):
        examples = Examples(task, "validation", (8, 9), 6, 1, True, batch_size=4, segment_length=length)
        said.append([answers for _, answers in predict(built, examples, generates=False)])
        assert (max(seen) > 7) is (length is None)
        seen.clear()
    for whole, segmented in zip(*said, strict=True):
        assert torch.equal(whole.predicted, segmented.predicted) and torch.equal(whole.targets, segmented.targets)
        assert segmented.loss == pytest.approx(whole.loss, rel=1e-5)


def test_iterations_start_anew_from_what_is_exact_in_each_segment() -> None:
    """Three iterations are exact on segments of three tokens, and not on the whole."""
    built = segmented_model("rlt", "addition")
    inputs = {"input_ids": torch.arange(20)[None] % 13}
    with torch.no_grad():
        ((_, exact),) = segment_logits(built, inputs, None, solver=Sequential())
        for length, is_exact in ((3, True), (None, False)):
            parts = [part for _, part in segment_logits(built, inputs, length, solver=Jacobi(3, 1))]
            assert bool((torch.cat(parts, dim=1) - exact).abs().max() < 1e-10) is is_exact


def test_models_without_a_cache_are_not_read_in_segments() -> None:
    model = {"architecture": "transformers", "model_type": "rwkv"}
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    recipe = tiny_recipe("gpt2", model=model | small, evaluation={"segment_length": 4})
    with pytest.raises(ValueError, match=r"RwkvForCausalLM does not continue from a cache .*segment_length null"):
        build_model(recipe)
    build_model(recipe.model_copy(update={"evaluation": type(recipe.evaluation)()}))
    with pytest.raises(ValueError, match="segment_length=0"):
        Examples(get_task("parity"), "test", (9,), 4, 1, segment_length=0)


def test_a_run_is_scored_in_segments(tmp_path: Path) -> None:
    results = []
    for length in (None, 4):
        recipe = tiny_recipe("rlt-2", evaluation={"segment_length": length})
        assert examples_of(recipe, "test").segment_length == length
        results.append(run(recipe, tmp_path / f"{length}"))
    assert results[0] is not None and results[1] is not None
    for length, scores in results[0]["test"].items():
        assert results[1]["test"][length] == pytest.approx(scores, rel=1e-5)
