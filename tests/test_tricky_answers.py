"""Judging mathematical answers: a table of tricky ones, and that whatever a model writes is judged, and soon."""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from crosscurrent.tasks.reasoning import Problem, Verdict, get_reasoning_task, math_verify_process
from tests import tricky_answers
from tests.tricky_answers import Row

DATA = Path(os.environ.get("CROSSCURRENT_TEST_DATA", "/nonexistent"))


def judged(task: str, output: str, reference: str) -> Verdict:
    return get_reasoning_task(task).judge(Problem("p", "?", "", reference), output)


ROWS = [("gsm8k", row) for row in tricky_answers.GSM8K] + [("math500", row) for row in tricky_answers.MATH500]


@pytest.mark.parametrize(
    ("task", "row"), ROWS, ids=[f"{task}-{row.output[:30]!r}-{row.reference}" for task, row in ROWS]
)
def test_tricky_answers(task: str, row: Row) -> None:
    verdict = judged(task, row.output, row.reference)
    assert verdict.scores == {"accuracy": float(row.is_right)}, verdict
    assert (verdict.parsed is not None) == row.is_readable, verdict


def test_a_list_of_at_least_sixty() -> None:
    assert len(ROWS) >= 80 and len(set(ROWS)) == len(ROWS)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that gives up after a second of processor time."""
    monkeypatch.setattr(math_verify_process, "_SECONDS", 1.0)
    monkeypatch.setattr(math_verify_process, "_worker", math_verify_process._Worker())


@pytest.mark.usefixtures("impatient")
def test_answers_that_never_end() -> None:
    """Which also no time-out of the language stops, as they are one operation; the judge is as before afterwards."""
    assert judged("math500", r"\boxed{9^{9^{9^{9}}}}", r"\sqrt{2}") == Verdict(None, {"accuracy": 0.0})
    assert judged("math500", r"\boxed{2^{1/2}}", r"\sqrt{2}").scores == {"accuracy": 1.0}
    assert judged("math500", "#### 9**9**9**9", r"\sqrt{2}").scores == {"accuracy": 0.0}
    assert judged("gsm8k", "#### 9**9**9**9", "9") == Verdict(None, {"accuracy": 0.0})


@pytest.mark.parametrize("task", ["gsm8k", "math500"])
def test_very_long_outputs(task: str) -> None:
    pieces = ["{", "\\boxed{", "####", "answer is ", "1,", "$", "\\frac", "**", "(", "9", "- ", "\n", "x=", "<", "\\("]
    start = time.monotonic()
    for piece in pieces:
        judged(task, piece * (200_000 // len(piece)), r"\sqrt{2}" if task == "math500" else "3")
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("task", "count"), [("gsm8k", 2000), ("math500", 60)])
def test_whatever_is_written_is_judged_and_always_in_the_same_way(task: str, count: int) -> None:
    chance = random.Random(0)
    pieces = [*"0123456789.,-+=/()[]{}$%\\^_ \n#*", "####", "\\boxed{", "\\frac{", "\\text{", "\ud800", "\x00", "é٣",
              "The answer is ", "Question:", "\\sqrt", "\\left(", "\\begin{pmatrix}", "&", "\\\\", "x", "cm "]  # fmt: skip
    outputs = ["".join(chance.choices(pieces, k=chance.randrange(40))) for _ in range(count)]
    verdicts = [judged(task, output, "12") for output in outputs]
    assert all(verdict.scores["accuracy"] in (0.0, 1.0) for verdict in verdicts)
    assert all(verdict.parsed is not None for verdict in verdicts if verdict.scores["accuracy"])
    assert [judged(task, output, "12") for output in outputs[::4]] == verdicts[::4]


def test_in_threads() -> None:
    rows = [row for _, row in ROWS[-60:-20]]
    with ThreadPoolExecutor(4) as threads:
        verdicts = list(threads.map(lambda row: judged("math500", row.output, row.reference), rows))
    assert [verdict.scores["accuracy"] == 1.0 for verdict in verdicts] == [row.is_right for row in rows]


@pytest.mark.skipif(not DATA.is_dir(), reason="CROSSCURRENT_TEST_DATA is not set")
def test_reference_solutions_of_math500() -> None:
    """Every tenth is judged right when written by its reference, and wrong when the next problem's is written."""
    rows = [json.loads(line) for line in (DATA / "math500_test.jsonl").read_text().splitlines()][::10]
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        assert judged("math500", row["solution"], row["answer"]).scores == {"accuracy": 1.0}, row
        is_same = row["answer"] == other["answer"]
        assert judged("math500", other["solution"], row["answer"]).scores == {"accuracy": float(is_same)}, (row, other)
