"""Records of data sets: from files, or from the Hugging Face hub. What is wrong with one is said with its place."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from crosscurrent.suggestions import did_you_mean

SUFFIXES = (".jsonl", ".json", ".txt")

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """A record, and where it is from, for people.

    Example:
        >>> record = Record({"question": "1 + 1?", "answer": " "}, "sums.jsonl, line 7")
        >>> record.text("question")
        '1 + 1?'
        >>> record.text("answer")
        Traceback (most recent call last):
        ValueError: sums.jsonl, line 7: field 'answer' is empty. Mend the record or leave it out.
    """

    fields: Mapping[str, Any]
    where: str

    def value(self, field: str) -> Any:
        """What a field holds.

        Raises:
            ValueError: there is no such field.
        """
        if field not in self.fields:
            raise ValueError(
                f"{self.where} has no field {field!r}, it has {sorted(self.fields)}."
                f"{did_you_mean(field, self.fields)} Mend the record or leave it out."
            )
        return self.fields[field]

    def text(self, field: str) -> str:
        """The text in a field, as it is there.

        Raises:
            ValueError: there is no such field, or it holds no text, or white space only.
        """
        value = self.value(field)
        if not isinstance(value, str):
            raise self.wrong(field, f"holds a {type(value).__name__}, not a text")
        if not value.strip():
            raise self.wrong(field, "is empty")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.wrong(field, f"holds half of a character at place {error.start}") from error
        return value

    def wrong(self, field: str, what: str) -> ValueError:
        """What to raise if a field cannot be used."""
        return ValueError(f"{self.where}: field {field!r} {what}. Mend the record or leave it out.")


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set of the hub, such as HubSplit("openai/gsm8k", "test", "main")."""

    name: str
    split: str
    config: str | None = None


def read_records(names: Sequence[str], data: Path | None, hub: HubSplit | None = None) -> list[Record]:
    """All records of a file, or of a split of the hub.

    Args:
        names: of the file in a folder; the first one that is there is read.
        data: that folder, or the file itself, whatever it is called. None: `hub` is read.
        hub: None: the hub has none, so data has to be given.

    Raises:
        ValueError: the file is of another kind than SUFFIXES, a record is not laid out as the kind demands, or there is
            none; there is neither data nor `hub`; the package `datasets` is missing; the hub's data set has no such split.
        OSError: there is no such file, or the hub cannot be reached.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "sums_test.txt").write_text("1 + 1?||<<1+1=2>> #### 2")
        >>> read_records(["sums_test.jsonl", "sums_test.txt"], folder)[0].fields
        {'question': '1 + 1?', 'steps': '<<1+1=2>>', 'answer': '2'}
    """
    if data is not None:
        return read_file(find_file(names, data))
    if hub is None:
        raise ValueError(f"these problems are not on the hub: give the data, a folder with {' or '.join(names)}.")
    return _read_hub(hub)


def find_file(names: Sequence[str], data: Path) -> Path:
    """The first file of these names in a folder, or `data` itself where it is no folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if not data.is_dir():
        if not data.exists():
            raise FileNotFoundError(f"{data}: no such file or folder. Give a folder with {' or '.join(names)}.")
        return data
    found = [data / name for name in names if (data / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{data} holds no {' or '.join(names)}: put it there, or give another folder.")
    return found[0]


def read_file(path: Path) -> list[Record]:
    """All records of a file, in order. Text is in UTF-8, with or without a byte order mark.

    Args:
        path: of a .jsonl file (one JSON object per line), a .json file (one array of objects) or a .txt file (one line per
            record, "question||steps #### answer", where the steps may be empty).

    Raises:
        ValueError: the file is of another kind, a record is not laid out like that, or there is none.
        OSError: it cannot be read.
    """
    readers = {".jsonl": _json_lines, ".json": _json_array, ".txt": _question_lines}
    if path.suffix not in readers:
        raise ValueError(f"{path} is of no kind that is read here: allowed are {', '.join(SUFFIXES)}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    records = list(readers[path.suffix](text, path))
    if not records:
        raise ValueError(f"{path} holds no records.")
    return records


def _json_lines(text: str, path: Path) -> Iterator[Record]:
    for where, line in _lines(text, path):
        yield _record(_parsed(line, where, "a .jsonl file holds one JSON object per line"), where)


def _json_array(text: str, path: Path) -> Iterator[Record]:
    layout = "a .json file holds one array of objects"
    rows = _parsed(text, str(path), layout)
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a {type(rows).__name__}: {layout}.")
    for number, row in enumerate(rows, start=1):
        yield _record(row, f"{path}, record {number}")


def _question_lines(text: str, path: Path) -> Iterator[Record]:
    for where, line in _lines(text, path):
        question, bars, rest = line.rpartition("||")
        steps, mark, answer = rest.rpartition("####")
        if not bars or not mark:
            raise ValueError(
                f"{where} is not laid out as 'question||steps #### answer'. Mend the line or leave it out."
            )
        yield Record({"question": question, "steps": steps.strip(), "answer": answer.strip()}, where)


def _lines(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """Each line that holds something. Only a line feed ends a line, as in JSON other separators may stand in texts."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def _parsed(text: str, where: str, layout: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): {layout}. Mend it or leave it out.") from error


def _record(row: Any, where: str) -> Record:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object but a {type(row).__name__}. Mend the record or leave it out.")
    return Record(row, where)


def _read_hub(hub: HubSplit) -> list[Record]:
    if find_spec("datasets") is None:
        raise ValueError(
            f"to read {hub.name} from the hub the package datasets is needed: pip install 'crosscurrent[reasoning]', "
            "or give the data as files."
        )
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError

    try:
        rows = load_dataset(hub.name, hub.config, split=hub.split)
    except (OSError, HTTPError, DatasetsError) as error:
        raise OSError(
            f"the data set {hub.name} of the Hugging Face hub cannot be read: {error}. Give the data as files instead."
        ) from error
    where = f"{hub.name}, split {hub.split}"
    return [Record(row, f"{where}, record {number}") for number, row in enumerate(rows, start=1)]


def first(items: Sequence[T], count: int | None, what: str) -> Sequence[T]:
    """The first `count` items, all if None.

    Args:
        what: they are, for the message.

    Raises:
        ValueError: there are fewer, or the count is below 1.

    Example:
        >>> first("abc", 2, "letters")
        'ab'
        >>> first("abc", 5, "letters")
        Traceback (most recent call last):
        ValueError: count=5 is more than the 3 letters that there are: give at most 3, or leave it out for all.
    """
    if count is None:
        return items
    if count < 1:
        raise ValueError(f"count={count} is not allowed: give at least 1, or leave it out for all.")
    if count > len(items):
        raise ValueError(
            f"count={count} is more than the {len(items)} {what} that there are: give at most {len(items)}, or leave it out "
            "for all."
        )
    return items[:count]


def without_space(text: str) -> str:
    """A text to compare by, where white space makes no difference.

    Example:
        >>> without_space(" How  many?") == without_space("How many? ")
        True
    """
    return " ".join(text.split())


def leave_out(records: Iterable[Record], others: Iterable[Record], field: str) -> list[Record]:
    """The records whose text in a field is in none of the others; white space makes no difference."""
    known = {without_space(other.text(field)) for other in others}
    return [record for record in records if without_space(record.text(field)) not in known]
