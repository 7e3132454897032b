"""The train/decode gap: zero where the solver is exact, and otherwise what model outputs say it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli.main import app
from crosscurrent.evaluation.gap import train_decode_gap, train_decode_gaps
from tests.subjects import make_base, make_rlt, make_t2mlr, token_ids
from tests.tiny_base import save_opened_retrofit, save_tiny_base

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make_t2mlr("llama"),
    "gemma2": lambda: make_t2mlr("gemma2"),
    "interval": lambda: make_t2mlr("llama", feedback_interval=3),
    "rlt1": make_rlt,
}


def ragged_batch() -> dict[str, Any]:
    """Left and right padding, two documents in a row, tokens that are not recurrent."""
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :3] = 0
    mask[1, 7:] = 0
    segments = torch.zeros(3, 9, dtype=torch.int64)
    segments[2, 5:] = 1
    recurrent = torch.ones(3, 9, dtype=torch.bool)
    recurrent[:, :4] = False
    return {
        "input_ids": token_ids(3, 9),
        "attention_mask": mask,
        "segment_ids": segments,
        "recurrent_mask": recurrent,
    }


@pytest.mark.parametrize("name", MODELS)
def test_no_gap_once_iterations_reach_the_length(name: str, exact_arithmetic: None) -> None:
    model = MODELS[name]()
    late = torch.arange(7).expand(2, 7) > 1
    batches: list[Any] = [token_ids(2, 9), {"input_ids": token_ids(2, 7), "recurrent_mask": late}]
    if name != "gemma2":  # whose windows do not allow for padding inside documents
        batches.append(ragged_batch())
    coarse, exact = train_decode_gaps(model, batches, [cc.Jacobi(1, 1), cc.Jacobi(9, 1)])
    assert exact.token_agreement == 1.0
    assert abs(exact.loss_difference) < 1e-13 and exact.mean_difference < 1e-12 and exact.max_difference < 1e-11
    assert abs(coarse.loss_difference) > 1e-5 and coarse.max_difference > coarse.mean_difference > 1e-3
    assert coarse.exact_loss == exact.exact_loss and coarse.num_tokens == exact.num_tokens
    assert coarse.iterations == 1 and exact.iterations <= 9


def test_values_are_those_of_the_model() -> None:
    model, batch, solver = make_t2mlr("llama"), ragged_batch(), cc.Jacobi(1, 1)
    labels = torch.where(torch.rand(3, 9) < 0.3, -100, batch["input_ids"])
    for given in ({}, {"labels": labels}):
        gap = train_decode_gap(model, batch | given, solver)
        asked = {"labels": batch["input_ids"]} | given
        trained, exact = (model(**batch | asked, solver=one) for one in (solver, cc.Sequential()))
        assert gap.loss == pytest.approx(trained.loss.item(), abs=1e-12)
        assert gap.exact_loss == pytest.approx(exact.loss.item(), abs=1e-12)
        assert gap.mean_residuals == gap.max_residuals == tuple(trained.solver_report.residuals.tolist())
    by_hand = [(0, c, c + 1) for c in range(3, 8)] + [(1, c, c + 1) for c in range(6)]
    by_hand += [(2, c, c + 1) for c in range(8) if c != 4]
    gap = train_decode_gap(model, batch, solver)
    assert gap.num_tokens == len(by_hand)
    trained, exact = (model(**batch, solver=one).logits.log_softmax(-1) for one in (solver, cc.Sequential()))
    ids = batch["input_ids"]
    differences = [abs((trained - exact)[row, at, ids[row, to]].item()) for row, at, to in by_hand]
    assert gap.mean_difference == pytest.approx(sum(differences) / len(differences), abs=1e-12)
    assert gap.max_difference == pytest.approx(max(differences), abs=1e-12)
    same = [bool(trained[row, at].argmax() == exact[row, at].argmax()) for row, at, _ in by_hand]
    assert gap.token_agreement == pytest.approx(sum(same) / len(same)) and 0 < gap.token_agreement < 1


def test_tokens_count_alike_however_they_are_batched() -> None:
    model, solver = make_t2mlr("llama"), cc.Jacobi(2, 1)
    ids = token_ids(2, 9)
    together = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4])}
    positions = torch.tensor([[*range(9), *range(5)]])
    packed = {"input_ids": torch.cat([ids[0], ids[1, :5]])[None], "position_ids": positions}
    apart = train_decode_gap(model, [ids[:1], ids[1:, :5]], solver)
    for batch in (together, packed):
        gap = train_decode_gap(model, batch, solver)
        for name in ("num_tokens", "loss", "exact_loss", "token_agreement", "mean_difference", "max_difference"):
            assert getattr(gap, name) == pytest.approx(getattr(apart, name), abs=1e-12), name


def test_examples_of_a_data_set_are_taken_as_they_are() -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, 6)
    labels = torch.where(torch.arange(6) < 2, -100, ids)
    examples = [{"input_ids": ids[row].tolist(), "labels": labels[row].tolist(), "id": "x"} for row in range(2)]
    batches = [{"input_ids": ids[row : row + 1], "labels": labels[row : row + 1]} for row in range(2)]
    assert train_decode_gap(model, examples) == train_decode_gap(model, batches)
    assert train_decode_gap(model, Dataset.from_list(examples)) == train_decode_gap(model, batches)
    assert train_decode_gap(model, examples[0]) == train_decode_gap(model, batches[0])


def test_residuals_are_averaged_over_the_batches_that_ran_an_iteration() -> None:
    model, solver = make_t2mlr("llama"), cc.Jacobi(6, 1)
    batches = [token_ids(2, 9), token_ids(1, 4, seed=4)]
    long, short = (model(batch, solver=solver).solver_report.residuals.tolist() for batch in batches)
    gap = train_decode_gap(model, batches, solver)
    assert len(long) == 6 and len(short) == 4 and gap.iterations == 6
    assert gap.mean_residuals[:4] == pytest.approx([(a + b) / 2 for a, b in zip(long, short, strict=False)])
    assert gap.max_residuals[:4] == tuple(max(a, b) for a, b in zip(long, short, strict=False))
    assert gap.mean_residuals[4:] == gap.max_residuals[4:] == tuple(long[4:])


def test_the_configured_solver_is_the_default() -> None:
    model = make_t2mlr("llama", solver=cc.Jacobi(3, 1))
    assert train_decode_gap(model, token_ids(1, 9)) == train_decode_gap(model, token_ids(1, 9), cc.Jacobi(3, 1))
    model.config.solver = cc.Sequential()
    gap = train_decode_gap(model, token_ids(1, 9))
    assert gap.loss_difference == gap.max_difference == 0 and gap.token_agreement == 1 and gap.mean_residuals == ()


def test_the_model_is_left_as_it_was() -> None:
    model = make_t2mlr("gpt2").train()
    model.config.base_config.resid_pdrop = 0.5
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.fusion.eval()
    before, random = {name: module.training for name, module in model.named_modules()}, torch.get_rng_state()
    gap = train_decode_gap(model, token_ids(1, 9))
    assert gap == train_decode_gap(model, token_ids(1, 9))  # no dropout
    assert before == {name: module.training for name, module in model.named_modules()}
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_measured_is_refused() -> None:
    model = make_t2mlr("llama")
    for bad, ids, words in (
        (make_base("llama"), token_ids(1, 4), "LlamaForCausalLM has no recurrence"),
        (model, token_ids(2, 1), "no token is predicted"),
        (model, [], "no token is predicted"),
        (model, {"labels": token_ids(2, 3)}, "needs input_ids"),
        (model, {"input_ids": token_ids(2, 3), "labels": token_ids(2, 4)}, "labels has shape"),
        (model, {"input_ids": token_ids(2, 3), "recurrent_mask": torch.ones(2, 2)}, "recurrent_mask has shape"),
    ):
        with pytest.raises(ValueError, match=words):
            train_decode_gap(bad, ids)


TEXT = "three plus four is seven, and seven plus one is eight.\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def opened(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_opened_retrofit(base, tmp_path_factory.mktemp("models") / "opened", cc.Jacobi(3, 1))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [
        {"text": "one plus one", "story": "a"},
        {"text": "x", "story": "once upon"},
        {"text": TEXT, "story": "the end"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["gap", *(str(argument) for argument in arguments)])


def facts_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_command_measures_a_text_file_in_chunks(opened: Path, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(TEXT)
    facts = facts_of(opened, path, "--max-length", 16, "--batch-size", 2)
    ids = AutoTokenizer.from_pretrained(opened)(TEXT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(opened)
    chunks = [torch.tensor([ids[start : start + 16]]) for start in range(0, len(ids), 16)]
    expected = train_decode_gap(model, chunks)
    assert facts["num_documents"] == len(chunks) and facts["num_tokens"] == expected.num_tokens == len(ids) - len(
        chunks
    )
    (row,) = facts["rows"]
    assert row["solver"]["name"] == "jacobi" and row["iterations"] == 3
    assert facts["exact_loss"] == pytest.approx(expected.exact_loss, abs=1e-5)
    assert row["loss"] == pytest.approx(expected.loss, abs=1e-5)
    assert row["mean_difference"] == pytest.approx(expected.mean_difference, abs=1e-5)
    assert facts_of(opened, path, "--max-length", 16, "--max-documents", 1)["num_tokens"] == 15


def test_command_measures_lines_with_a_row_for_each_count(opened: Path, lines: Path) -> None:
    facts = facts_of(opened, lines, "--iterations", "1,2, 200")
    assert facts["num_documents"] == 2  # one is too short
    assert facts["num_tokens"] == len("one plus one") + len(TEXT) - 2
    assert [row["solver"]["iterations"] for row in facts["rows"]] == [1, 2, 200]
    assert [row["iterations"] for row in facts["rows"]] == [1, 2, len(TEXT)]
    first, second, exact = (row["mean_difference"] for row in facts["rows"])
    assert first > second > 1e-4 > exact
    assert facts["rows"][2]["token_agreement"] == 1.0 and len(facts["rows"][2]["max_residuals"]) == len(TEXT)
    assert (
        facts_of(opened, lines, "--field", "story", "--iterations", 1)["num_tokens"]
        == len("once upon") + len("the end") - 2
    )
    assert facts_of(opened, lines, "--max-length", 5, "--iterations", 1)["num_tokens"] == 8


def test_command_prints_a_table(opened: Path, lines: Path) -> None:
    result = run(opened, lines, "--iterations", "1,32")
    assert result.exit_code == 0 and "%|" not in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("jacobi")]
    assert [row[1] for row in rows] == ["1", "32"]
    assert "2 documents" in result.stdout and "16 more" in result.stdout


def test_command_answers_bad_input(opened: Path, base: Path, lines: Path, tmp_path: Path) -> None:
    def written(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(opened).save_pretrained(bare)
    cases: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
        ((opened, tmp_path / "missing.txt"), ("missing.txt", "No such file")),
        ((opened, written("data.csv", "a,b")), ("data.csv", ".txt", ".jsonl")),
        ((opened, written("empty.txt", "")), ("empty.txt", "two tokens")),
        ((opened, written("empty.jsonl", "\n")), ("empty.jsonl", "two tokens")),
        ((opened, lines, "--field", "stories"), ("line 1", "'stories'", "Did you mean 'story'")),
        ((opened, written("bad.jsonl", '{"text": "fine"}\n{"text": ')), ("bad.jsonl, line 2", "not JSON")),
        ((opened, written("list.jsonl", "[1]\n")), ("line 1", "not a JSON object")),
        ((opened, written("number.jsonl", '{"text": 7}\n')), ("line 1", "int")),
        ((opened, written("latin.txt", b"caf\xe9 cr\xe8me")), ("latin.txt", "UTF-8", "byte 3")),
        ((opened, written("half.jsonl", '{"text": "ab\\ud800cd"}\n')), ("line 1", "half of a character")),
        ((opened, written("deep.jsonl", "[" * 100_000 + "\n")), ("line 1", "not JSON")),
        ((opened, written("digits.jsonl", '{"text": ' + "7" * 6000 + "}\n")), ("line 1", "not JSON")),
        ((base, lines), ("LlamaForCausalLM", "no recurrence")),
        ((bare, lines), ("no tokenizer",)),
        ((opened, written("long.txt", "a" * 3000), "--max-length", 2500), ("2500 tokens", "2048 positions")),
    ]
    for arguments, words in cases:
        result = run(*arguments)
        assert result.exit_code == 1 and result.stdout == "", (arguments, result.output)
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        for word in words:
            assert word in line, line
    for count in ("0", "1,x", ""):
        assert run(opened, lines, "--iterations", count).exit_code == 2


def test_a_byte_order_mark_is_no_text(opened: Path, tmp_path: Path) -> None:
    for name, content in (("a.txt", "three plus four"), ("a.jsonl", '{"text": "three plus four"}\n')):
        path = tmp_path / name
        found = []
        for mark in (b"", b"\xef\xbb\xbf"):
            path.write_bytes(mark + content.encode())
            found.append(json.loads(run(opened, path, "--json").stdout)["exact_loss"])
        assert found[0] == found[1]
