"""The mathematical tasks: what their splits hold, how examples look, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
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


@pytest.mark.parametrize("name", GRADE_SCHOOL)
def test_files_in_place_of_a_folder(name: str, tmp_path: Path) -> None:
    task, data = get_reasoning_task(name), folder_of(tmp_path)
    train = data / "gsm8k_train.jsonl"
    assert task.problems("train", train) == task.problems("train", data)
    with pytest.raises(ValueError, match=r"gsm8k_train\.jsonl is the file for train.*, not for test: give its folder"):
        task.problems("test", train)
    mine = data / "mine.jsonl"
    mine.write_text(json.dumps({"question": "Mine?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}))
    assert [problem.question for problem in task.problems("validation", mine)] == ["Mine?"]


def test_the_augmented_file_is_preferred(tmp_path: Path) -> None:
    text = "New? ||<<1+1=2>> #### 2\nTwo?||<<1+1=2>> #### 2\nEmpty?|| #### 2\n"
    data = folder_of(tmp_path, **{"gsm8k_aug_train.txt": text})
    problems = get_reasoning_task("gsm_aug_equations").problems("train", data)
    assert [(problem.question, problem.completion) for problem in problems] == [("New?", "<<1+1=2>> #### 2")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "One?"}, r"gsm8k_test\.jsonl, line 1 has no field 'answer'"),
        ({"question": "One?", "answer": ""}, "line 1: field 'answer' is empty"),
        ({"question": " ", "answer": "#### 2"}, "line 1: field 'question' is empty"),
        ({"question": "One?", "answer": "It is 2."}, r"line 1: field 'answer' has no '####' before the final answer"),
        ({"question": "One?", "answer": "2", "steps": None}, "line 1: field 'steps' holds neither a text nor a list"),
        ({"question": "One?", "answer": "2", "steps": [2]}, "line 1: field 'steps' holds neither a text nor a list"),
        ({"question": "One?", "answer": "#### two"}, r"line 1: field 'answer' ends with no number: 'two'\. Mend"),
    ],
)
def test_records_that_cannot_be_used(row: dict[str, str], message: str, tmp_path: Path) -> None:
    data = folder_of(tmp_path, **{"gsm8k_test.jsonl": json.dumps(row)})
    with pytest.raises(ValueError, match=message):
        get_reasoning_task("gsm8k").problems("test", data)


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    task, data = get_reasoning_task("gsm8k"), folder_of(tmp_path)
    with pytest.raises(ValueError, match="count=3 is more than the 2 problems of gsm8k"):
        task.problems("train", data, count=3)
    with pytest.raises(ValueError, match="split='dev' is not allowed"):
        task.problems("dev", data)  # type: ignore[arg-type]
    (data / "mine.txt").write_text("Mine?|| #### 2")
    with pytest.raises(ValueError, match=r"none of the 1 records from .*mine\.txt, line 1 on has steps for gsm8k"):
        task.problems("train", data / "mine.txt")
    (data / "gsm8k_train.jsonl").write_text(json.dumps({"question": "Two?", "answer": "#### 2"}))
    with pytest.raises(ValueError, match=r"all 1 questions from .* are held out: none is left"):
        task.problems("train", data)
    (data / "gsm8k_aug_valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no gsm8k_aug_valid\.txt: put it there"):
        task.problems("train", data)
    (data / "gsm8k_aug_valid.txt").write_text("Other?|| #### 2")
    with pytest.raises(ValueError, match=r"none of the validation questions .*gsm8k_aug_valid\.txt, line 1"):
        task.problems("validation", data)


@pytest.mark.parametrize("name", [*GRADE_SCHOOL, "math500"])
def test_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of which are tables with the columns that the data sets have."""
    gsm8k = [{"question": f"{number}?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"} for number in range(3)]
    steps = {"equations": ["<<1+1=2>>", "<<2*1=2>>"], "language": ["One and one is 2.", "That is it."]}
    hub: dict[tuple[str, str], list[dict[str, Any]]] = {
        ("openai/gsm8k", "train"): gsm8k[:2],
        ("openai/gsm8k", "test"): gsm8k[2:],
        ("HuggingFaceH4/MATH-500", "test"): [{"problem": "2?", "solution": r"\boxed{x}", "answer": "x", "level": 1}],
    }
    for which, repository in (("equations", "whynlp/gsm8k-aug"), ("language", "whynlp/gsm8k-aug-nl")):
        rows = [{"question": f"{number}?", "steps": steps[which], "answer": "2"} for number in range(3)]
        hub |= {(repository, "train"): rows[:2], (repository, "validation"): rows[1:2], (repository, "test"): rows[2:]}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, split: datasets.Dataset.from_list(hub[name, split])
    )
    task = get_reasoning_task(name)
    assert [problem.question for problem in task.problems("test")] == ["2?"]
    if name != "math500":
        assert [problem.question for problem in task.problems("train")] == ["0?"]
        assert [problem.question for problem in task.problems("validation")] == ["1?"]
    if name == "gsm_aug_equations":
        assert task.problems("train")[0].completion == "<<1+1=2>> <<2*1=2>> #### 2"
    if name == "gsm_aug_language":
        assert task.problems("train")[0].completion == "One and one is 2.\nThat is it.\n#### 2"


def test_math500_is_for_testing_only(tmp_path: Path) -> None:
    task = get_reasoning_task("math500")
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match="it is for testing only: train on another task, such as gsm8k"):
            task.problems(split, tmp_path)  # type: ignore[arg-type]


def test_references_of_math500_that_cannot_be_read(tmp_path: Path) -> None:
    row = {"problem": "?", "solution": "!", "answer": r"\frac{1}{"}
    (tmp_path / "math500_test.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"line 1: field 'answer' cannot be read as an expression: .*Mend the record"):
        get_reasoning_task("math500").problems("test", tmp_path)


def test_without_math_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscurrent.tasks.reasoning.math_verify_process.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"math-verify is needed: pip install 'crosscurrent\[reasoning\]'"):
        get_reasoning_task("math500").problems("test", tmp_path)


@needs_data
def test_problems_of_math500() -> None:
    problems = get_reasoning_task("math500").problems("test", DATA, count=3)
    assert [problem.id for problem in problems] == ["test-0", "test-1", "test-2"]
    assert problems[0].details == {"subject": "Precalculus", "level": 2}
    assert "\\boxed{}" in get_reasoning_task("math500").message(problems[0])
