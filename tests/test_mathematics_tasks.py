"""The mathematical tasks: what their splits hold, how examples look, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from crosscurrent.tasks.reasoning import get_reasoning_task
from crosscurrent.tasks.reasoning.records import without_space

DATA = Path(os.environ.get("CROSSCURRENT_TEST_DATA", "/nonexistent"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="CROSSCURRENT_TEST_DATA is not set")

GRADE_SCHOOL = ["gsm8k", "gsm_aug_equations", "gsm_aug_language"]


def folder_of(tmp_path: Path, **extra: str) -> Path:
    """Three training questions, of which one is the validation's and one the test's but for white space."""
    solution = "4/2 = <<4/2=2>>2 a day.\n2 + 1 = <<2+1=3>>3.\n#### 1,003"
    rows = [{"question": question, "answer": solution} for question in ("One?", " Two?", "Three  is?")]
    rows.append({"question": "Four?", "answer": "No equation.\n#### 4"})
    files = {
        "gsm8k_train.jsonl": "\n".join(map(json.dumps, rows)),
        "gsm8k_test.jsonl": json.dumps({"question": "Three is?", "answer": solution}),
        "gsm8k_aug_valid.txt": "Two? ||<<4/2=2>> #### 1,003",
        "gsm8k_aug_test.txt": "Three is?|| #### 1,003",
    }
    for name, text in (files | extra).items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("gsm8k", "4/2 = 2 a day.\n2 + 1 = 3.\n#### 1,003"),
        ("gsm_aug_language", "4/2 = 2 a day.\n2 + 1 = 3.\n#### 1,003"),
        ("gsm_aug_equations", "<<4/2=2>> <<2+1=3>> #### 1,003"),
    ],
)
def test_splits_of_a_folder(name: str, completion: str, tmp_path: Path) -> None:
    task, data = get_reasoning_task(name), folder_of(tmp_path)
    train = task.problems("train", data)
    assert [problem.question for problem in train] == (["One?"] if "equations" in name else ["One?", "Four?"])
    assert train[0].completion == completion and train[0].answer == "1,003" and train[0].id == "train-0"
    assert [problem.question for problem in task.problems("validation", data)] == ["Two?"]
    test = task.problems("test", data)
    assert [problem.question for problem in test] == ["Three is?"]
    if "equations" in name:
        assert test[0].completion == "#### 1,003"


@needs_data
@pytest.mark.parametrize("name", GRADE_SCHOOL)
def test_no_question_is_in_two_splits(name: str) -> None:
    task = get_reasoning_task(name)
    splits = [task.problems(split, DATA) for split in ("train", "validation", "test")]
    assert list(map(len, splits)) == [6884 if "equations" in name else 6973, 500, 1319]
    questions = [{without_space(problem.question) for problem in problems} for problems in splits]
    assert sum(map(len, questions)) == len(set.union(*questions)) == sum(map(len, splits))
    ids = [problem.id for problems in splits for problem in problems]
    assert len(ids) == len(set(ids))


@needs_data
@pytest.mark.parametrize("name", GRADE_SCHOOL)
def test_reference_solutions_are_judged_right_and_others_wrong(name: str) -> None:
    task = get_reasoning_task(name)
    problems = task.problems("test", DATA)[::5]
    for problem, other in zip(problems, [*problems[1:], problems[0]], strict=True):
        assert task.judge(problem, problem.completion).scores == {"accuracy": 1.0}, problem
        same = task.judge(problem, f"#### {problem.answer}").parsed == task.judge(other, other.completion).parsed
        assert task.judge(problem, other.completion).scores["accuracy"] == float(same), (problem, other)
