"""HotpotQA: answers scored by the official rules, prompts, and where problems come from."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.tasks.reasoning import Problem, get_reasoning_task
from crosscurrent.tasks.reasoning.words import exact_match, f1, normalise
from crosscurrent.tasks.splits import split_of

DATA = os.environ.get("CROSSCURRENT_TEST_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="needs CROSSCURRENT_TEST_DATA")
TASK = get_reasoning_task("hotpotqa")

# answer, reference, exact match, precision and recall, all by hand. F1 is 2 p r / (p + r).
PAIRS: list[tuple[str, str, int, float, float]] = [
    ("Paris", "Paris", 1, 1, 1),
    ("paris", "PARIS", 1, 1, 1),
    ("Paris.", "Paris", 1, 1, 1),
    ("the Paris", "Paris", 1, 1, 1),
    ("A  cat\tand THE dog", "cat and dog", 1, 1, 1),
    ("Barack Obama", "Barack Hussein Obama", 0, 1, 2 / 3),
    ("Barack Hussein Obama II", "Barack Obama", 0, 2 / 4, 1),
    ("Obama Barack", "Barack Obama", 0, 1, 1),  # F1 knows no order
    ("U.S.", "US", 1, 1, 1),
    ("U. S.", "US", 0, 0, 0),  # two words against one
    ("well-known", "well known", 0, 0, 0),  # the hyphen goes, its place does not stay
    ("well-known", "wellknown", 1, 1, 1),
    ("1,234", "1234", 1, 1, 1),
    ("3.5 million", "35 million", 1, 1, 1),  # the point goes
    ("-5", "5", 1, 1, 1),  # so does a sign
    ("5–6", "56", 0, 0, 0),  # a dash that is not ASCII stays
    ("“Hello”", "Hello", 0, 0, 0),  # so do such quotation marks
    ('"Hello"', "Hello", 1, 1, 1),
    ("O'Brien", "OBrien", 1, 1, 1),
    ("O’Brien", "OBrien", 0, 0, 0),
    ("yes", "yes", 1, 1, 1),
    ("Yes.", "yes", 1, 1, 1),
    ("yes", "no", 0, 0, 0),
    ("yes, they are", "yes", 0, 0, 0),  # with a reference yes there is no part of a mark
    ("no", "no doubt", 0, 0, 0),  # nor with an answer no
    ("yes and no", "no and yes", 0, 1, 1),  # neither text is only yes or no
    ("noanswer", "no answer", 0, 0, 0),
    ("NoAnswer", "noanswer", 1, 1, 1),
    ("no answer", "answer", 0, 1 / 2, 1),  # two words, not the special one
    ("", "Paris", 0, 0, 0),
    ("the", "Paris", 0, 0, 0),
    ("...", "a", 1, 0, 0),  # both are nothing: equal, without a word in common
    ("theatre", "atre", 0, 0, 0),  # articles are whole words
    ("a-b", "ab", 1, 1, 1),  # punctuation goes first, so "ab" has no article
    ("a b", "b", 1, 1, 1),
    ("an.", "the", 1, 0, 0),
    ("the the dog", "dog", 1, 1, 1),
    ("dog dog", "dog", 0, 1 / 2, 1),  # a word counts as often as both have it
    ("dog dog cat", "dog dog dog", 0, 2 / 3, 2 / 3),
    ("Müller", "muller", 0, 0, 0),
    ("MÜLLER", "müller", 1, 1, 1),
    ("New York\u00a0City", "New York City", 1, 1, 1),  # a space that does not break is white space
    ("from 1986 to 2013", "1986 to 2013", 0, 3 / 4, 1),
    ("1986 until 2013", "1986 to 2013", 0, 2 / 3, 2 / 3),
    ("$10", "10", 1, 1, 1),
    ("€10", "10", 0, 0, 0),
    ("snake_case", "snakecase", 1, 1, 1),
    ("R&B", "rb", 1, 1, 1),
]


@pytest.mark.parametrize(("answer", "reference", "em", "precision", "recall"), PAIRS)
def test_pairs_by_hand(answer: str, reference: str, em: int, precision: float, recall: float) -> None:
    expected = 2 * precision * recall / (precision + recall) if precision else 0
    assert exact_match(answer, reference) == em == exact_match(reference, answer)
    assert f1(answer, reference) == pytest.approx(expected) == f1(reference, answer)


def test_normalising_twice_changes_nothing_more() -> None:
    for answer, reference, *_ in PAIRS:
        assert normalise(normalise(answer)) == normalise(answer)
        assert normalise(normalise(reference)) == normalise(reference)


PARIS = Problem("1", "", "Paris", "Paris")


@pytest.mark.parametrize(
    ("output", "parsed", "em"),
    [
        ("Paris", "Paris", 1),
        (" Paris \nQuestion: what next?\nAnswer: Rome", "Paris", 1),
        ("\n\nParis", "Paris", 1),
        ("Answer: Paris", "Paris", 1),
        ("answer:\nParis\nRome", "Paris", 1),
        ("Paris\r\nRome", "Paris", 1),
        ("The answer is Paris", "The answer is Paris", 0),
        ("Rome\nParis", "Rome", 0),
        ("Answer:", None, 0),
        (" \n ", None, 0),
        ("", None, 0),
    ],
)
def test_the_first_line_is_the_answer(output: str, parsed: str | None, em: float) -> None:
    verdict = TASK.judge(PARIS, output)
    assert (verdict.parsed, verdict.scores["em"]) == (parsed, em)


@needs_data
def test_published_dev_questions() -> None:
    problems = TASK.problems("test", Path(str(DATA)))
    records = [json.loads(line) for line in Path(str(DATA), "hotpotqa_distractor_dev.jsonl").read_text().splitlines()]
    assert len(problems) == len(records) == 295 == len({problem.id for problem in problems})
    for problem, record in zip(problems, records, strict=True):
        assert TASK.judge(problem, problem.completion).scores == {"em": 1.0, "f1": 1.0}
        assert problem.answer == record["answer"].strip() and problem.question.endswith(record["question"].strip())
        paragraphs = problem.question.split("\n\nQuestion: ")[0]
        for title, fact in zip(*record["supporting_facts"].values(), strict=True):
            sentences = record["context"]["sentences"][record["context"]["title"].index(title)]
            assert f"{title}: {sentences[0].strip()}" in paragraphs and sentences[fact].strip() in paragraphs
    message = TASK.message(problems[0])
    assert message.startswith("Answer the question") and TASK.plain_prompt(problems[0]) == f"{message}\nAnswer:\n"


def record(asked: str, **changes: Any) -> dict[str, Any]:
    context = {"title": ["Paris", "Rome"], "sentences": [["Paris is large.", " It is old."], []]}
    return {"id": None, "question": asked, "answer": "Paris", "context": context} | changes


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


TRAINING = [record(f"number {index}?") for index in range(40)]
DEV = [record("number 7?"), record("dev?")]


def asked(problems: Any) -> list[str]:
    return [problem.question.split("Question: ")[1] for problem in problems]


def check_splits(data: Path | None) -> None:
    train, validation, test = (asked(TASK.problems(split, data)) for split in ("train", "validation", "test"))
    assert test == ["number 7?", "dev?"] and not set(train) & set(validation)
    assert sorted(train + validation + ["number 7?"]) == sorted(one["question"] for one in TRAINING)
    assert 0 < len(validation) < 10 and all(split_of(question) == "validation" for question in validation)


def test_validation_is_cut_from_training(tmp_path: Path) -> None:
    write(tmp_path / "hotpotqa_distractor_train.jsonl", TRAINING)
    write(tmp_path / "hotpotqa_distractor_dev.jsonl", DEV)
    check_splits(tmp_path)
    alone = TASK.problems("train", tmp_path / "hotpotqa_distractor_train.jsonl")
    assert "number 7?" in asked(alone)
    assert alone[0].question == "Paris: Paris is large. It is old.\n\nRome: \n\nQuestion: number 0?"


def test_the_hub_is_read_if_no_data_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub cannot be reached in tests: its loader is replaced."""
    datasets = pytest.importorskip("datasets")

    def load(name: str, config: str, split: str) -> list[dict[str, Any]]:
        assert (name, config) == ("hotpotqa/hotpot_qa", "distractor")
        return {"train": TRAINING, "validation": DEV}[split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    check_splits(None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answer": ""}, "'answer' is empty"),
        ({"answer": 3}, "'answer' holds a int"),
        ({"question": "\n"}, "'question' is empty"),
        ({"context": None}, "'context' is not laid out"),
        ({"context": {"title": ["Paris"]}}, "'context' is not laid out"),
        ({"context": {"title": "Paris", "sentences": [["x"]]}}, "'context' is not laid out"),
        ({"context": {"title": ["Paris"], "sentences": ["x"]}}, "'context' is not laid out"),
        ({"context": {"title": ["Paris"], "sentences": [[3]]}}, "'context' is not laid out"),
        ({"context": {"title": ["Paris"], "sentences": []}}, "1 titles and 0 lists"),
        ({"context": {"title": [], "sentences": []}}, "0 titles and 0 lists"),
    ],
)
def test_wrong_records_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "hotpotqa_distractor_dev.jsonl"
    write(path, [record("right?"), record("wrong?", **changes)])
    with pytest.raises(ValueError, match=r"hotpotqa_distractor_dev\.jsonl, line 2") as caught:
        TASK.problems("test", tmp_path)
    assert words in str(caught.value)
    write(path, [{key: value for key, value in record("wrong?").items() if key != "context"}])
    with pytest.raises(ValueError, match="no field 'context'"):
        TASK.problems("test", tmp_path)


def test_missing_files_and_counts(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"hotpotqa_distractor_dev\.jsonl"):
        TASK.problems("test", tmp_path)
    write(tmp_path / "hotpotqa_distractor_dev.jsonl", DEV)
    assert len(TASK.problems("test", tmp_path, count=1)) == 1
    with pytest.raises(ValueError, match="count=3"):
        TASK.problems("test", tmp_path, count=3)
    with pytest.raises(ValueError, match="split="):
        TASK.problems("dev", tmp_path)  # type: ignore[arg-type]
