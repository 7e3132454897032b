"""Questions and answers of a user's own."""

import json
from pathlib import Path

import pytest

from crosscurrent.tasks.reasoning import Problem, get_reasoning_task


def folder_of(path: Path, **splits: list[dict[str, str]]) -> Path:
    for split, records in splits.items():
        (path / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_fields_are_those_that_are_named(tmp_path: Path) -> None:
    rows = [{"q": "1 + 1?", "steps": "One and one. Answer: 2", "a": "2"}]
    held_out = [{"q": "2 + 2?", "a": "4", "steps": "4"}]
    data = folder_of(tmp_path, train=[*rows, *held_out], validation=held_out, test=[{"q": "2  + 2?", "a": "4"}])
    task = get_reasoning_task("question_answer", question="q", completion="steps", answer="a", judged_as="number")
    assert task.problems("train", data)[0] == Problem("train-0", "1 + 1?", "One and one. Answer: 2", "2")
    assert len(task.problems("train", data)) == 1  # the other is a test question
    with pytest.raises(ValueError, match="nothing is left of validation"):
        task.problems("validation", data)
    assert task.problems("test", data)[0].completion == "4"  # a test problem needs no steps
    plain = get_reasoning_task("question_answer", question="q", answer="a")
    assert plain.problems("train", data)[0].completion == "2"


@pytest.mark.parametrize(
    ("output", "answer", "is_right", "parsed"),
    [
        ("Paris", "paris", True, "Paris"),
        ("It is old.\nAnswer: the Nile.", "Nile", True, "the Nile."),
        ("Answer: Rome\nAnswer: Paris\nbecause", "Paris", True, "Paris"),
        ("First thoughts\n\nParis\n\n", "Paris", True, "Paris"),
        ("Paris\nLyon", "Paris", False, "Lyon"),
        ("", "Paris", False, None),
        ("Answer:", "Paris", False, None),
        ("...", "the", False, "..."),  # nothing is left of either, and nothing is not right
    ],
)
def test_text_is_judged_by_its_last_answer(output: str, answer: str, is_right: bool, parsed: str | None) -> None:
    verdict = get_reasoning_task("question_answer").judge(Problem("p", "", "", answer), output)
    assert (verdict.scores["accuracy"] == 1.0, verdict.parsed) == (is_right, parsed)


def test_mathematics_is_judged_by_math_verify() -> None:
    task = get_reasoning_task("question_answer", judged_as="mathematics")
    assert task.judge(Problem("p", "", "", r"\frac{1}{2}"), r"\boxed{0.5}").scores == {"accuracy": 1.0}


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'number'"):
        get_reasoning_task("question_answer", judged_as="numbers")
    for options, message in (
        ({"hub": "csv"}, "OWNER/NAME"),
        ({"hub": 5}, "give text"),
        ({"completion": []}, "give text"),
        ({"name": "x"}, "no option 'name'"),
    ):
        with pytest.raises(ValueError, match=message):
            get_reasoning_task("question_answer", **options)
    task = get_reasoning_task("question_answer")
    with pytest.raises(ValueError, match=r"validation\.jsonl or validation\.json"):
        task.problems("train")  # neither a folder nor a data set of the hub
    other = [{"question": "c?", "answer": "5"}]
    wrong = [{"question": "a?", "answer": "b"}, {"question": "a?", "answer": " "}]
    data = folder_of(tmp_path, train=wrong, validation=other, test=other)
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: field 'answer' is empty"):
        task.problems("train", data)
    with pytest.raises(ValueError, match="no field 'steps'"):
        get_reasoning_task("question_answer", completion="steps").problems("train", data)
    with pytest.raises(ValueError, match="is no number"):
        get_reasoning_task("question_answer", judged_as="number").problems("train", data)
