"""Records of data sets: what is read, and what is said of files that are not as they should be."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from crosscurrent.tasks.reasoning.records import HubSplit, first, read_file, read_records

ROWS = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?\u2028", "answer": "4"}]
HUB = HubSplit("owner/sums", "test", "main")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_the_three_kinds_of_files(tmp_path: Path) -> None:
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    for path in (
        write(tmp_path, "a.jsonl", lines),
        write(tmp_path, "b.jsonl", "\ufeff" + lines.replace("\n", "\r\n")),
        write(tmp_path, "a.json", json.dumps(ROWS)),
    ):
        assert [dict(record.fields) for record in read_file(path)] == ROWS
    text = write(tmp_path, "a.txt", "Is 1 || 2 #### a?||<<1+1=2>> #### 2\n3?|| #### 3\n")
    read = [dict(record.fields) for record in read_file(text)]
    assert read[1] == {"question": "3?", "steps": "", "answer": "3"}
    assert read[0] == {"question": "Is 1 || 2 #### a?", "steps": "<<1+1=2>>", "answer": "2"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": ', r"a\.jsonl, line 3 is not JSON"),
        ("a.jsonl", "[1]", r"a\.jsonl, line 1 is not a JSON object but a list\. Mend"),
        ("a.jsonl", " \n", r"a\.jsonl holds no records"),
        ("a.json", "[[]", r"a\.json is not JSON .* one array of objects"),
        ("a.json", '{"a": 1}', r"a\.json holds a dict: a \.json file holds one array of objects"),
        ("a.json", '[{"a": 1}, 3]', r"a\.json, record 2 is not a JSON object but a int"),
        ("a.json", "[" * 100_000, r"a\.json is not JSON"),
        ("a.txt", "q||<<1=1>> 1", r"a\.txt, line 1 is not laid out as 'question\|\|steps #### answer'"),
        ("a.txt", "q <<1=1>> #### 1", r"a\.txt, line 1 is not laid out as"),
        ("a.csv", "q,a", r"a\.csv is of no kind that is read here: allowed are \.jsonl, \.json, \.txt"),
    ],
)
def test_files_that_are_not_as_they_should_be(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_file(write(tmp_path, name, text))


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"not UTF-8 text .* at byte 7"):
        read_file(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answr": "2"}, r"line 1 has no field 'answer', it has \['answr'\]\. Did you mean 'answr'\?"),
        ({"answer": 2}, "line 1: field 'answer' holds a int, not a text"),
        ({"answer": None}, "line 1: field 'answer' holds a NoneType, not a text"),
        ({"answer": "\n "}, r"line 1: field 'answer' is empty\. Mend the record"),
        ({"answer": "\ud800"}, "line 1: field 'answer' holds half of a character at place 0"),
    ],
)
def test_fields_that_are_not_as_they_should_be(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    record = read_file(write(tmp_path, "a.jsonl", json.dumps(row)))[0]
    with pytest.raises(ValueError, match=message):
        record.text("answer")


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    wanted = write(tmp_path, "b.jsonl", json.dumps(ROWS[0]))
    for data in (tmp_path, wanted):
        assert read_records(["a.jsonl", "b.jsonl"], data)[0].fields == ROWS[0]
    with pytest.raises(FileNotFoundError, match=r"holds no c\.jsonl or d\.jsonl: put it there"):
        read_records(["c.jsonl", "d.jsonl"], tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file or folder. Give a folder with c\.jsonl"):
        read_records(["c.jsonl"], tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not on the hub: give the data"):
        read_records(["c.jsonl"], None)


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of which is a function, since tests are offline."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    records = read_records(["a.jsonl"], None, HUB)
    assert [record.fields for record in records] == ROWS and asked == [("owner/sums", "main", "test")]
    assert records[1].where == "owner/sums, split test, record 2"


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(OSError, match=r"owner/sums of the Hugging Face hub cannot be read.*Give the data as files"):
        read_records(["a.jsonl"], None, HUB)
    monkeypatch.setattr("crosscurrent.tasks.reasoning.records.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"the package datasets is needed: pip install 'crosscurrent\[reasoning\]'"):
        read_records(["a.jsonl"], None, HUB)


def test_counts() -> None:
    assert first([1, 2], None, "problems") == first([1, 2], 2, "problems") == [1, 2]
    with pytest.raises(ValueError, match="count=3 is more than the 2 problems"):
        first([1, 2], 3, "problems")
    with pytest.raises(ValueError, match="count=0 is not allowed"):
        first([1, 2], 0, "problems")
