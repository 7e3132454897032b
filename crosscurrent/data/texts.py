"""Texts from files, as they are and as token ids."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosscurrent.suggestions import did_you_mean

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")


class TextError(ValueError):
    """A place where a text should be and none is.

    Attributes:
        kind: of mistake: "broken JSON", "field missing", "not a text", "not UTF-8" or "half of a character".
        where: the place.
    """

    def __init__(self, kind: str, where: str, message: str):
        super().__init__(message)
        self.kind = kind
        self.where = where


@dataclass(frozen=True)
class Document:
    """A text, and where it is from, for people."""

    text: str
    where: str


def suffix_of(path: Path) -> str | None:
    """Which of SUFFIXES a file has, None if another."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def check_suffix(path: Path) -> str:
    """Which of SUFFIXES a file has; ValueError if another."""
    suffix = suffix_of(path)
    if suffix is None:
        raise ValueError(
            f"{path} is of no kind that is read here: allowed are .txt (one text), .jsonl and .jsonl.gz (one JSON object "
            "per line) and .parquet."
        )
    return suffix


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """The texts of a file, in order.

    Args:
        path: of a .txt file (one text), a .jsonl or .jsonl.gz file (one JSON object per line) or a .parquet file (one text
            per row). Text is in UTF-8, with or without a byte order mark.
        field: the key of the text in each line, or its column.

    Raises:
        ValueError: the file's kind is another, it is not UTF-8, or a line or row does not hold a text under that key.
        OSError: it cannot be read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "two.jsonl"
        >>> _ = path.write_text('{"text": "one"}\\n{"text": "two"}\\n')
        >>> list(read_texts(path))
        ['one', 'two']
    """
    for found in read_file(path, field):
        if isinstance(found, TextError):
            raise found
        yield found.text


def read_file(path: Path, field: str, name: str | None = None, first: int = 0) -> Iterator[Document | TextError]:
    """The documents of a file, in order; in place of one that is no text, what is wrong with it, which is not raised.

    Args:
        path, field: as `read_texts` takes them.
        name: to call the file by; None: its path.
        first: how many to leave out at the start, the wrong ones counted; they are not looked into.

    Raises:
        ValueError: the file's kind is another, or it cannot be read as one of its kind from some place on.
        OSError: it cannot be read.
    """
    name = name or str(path)
    suffix = check_suffix(path)
    if suffix == ".txt":
        places: Iterator[tuple[str, Any]] = iter([(name, path)])
    elif suffix == ".parquet":
        places = _parquet_values(path, field, name)
    else:
        places = _json_lines(path, name)
    read = {".txt": _text_of_file, ".parquet": text_of_value}.get(suffix, _text_of_line)
    for where, place in islice(places, first, None):
        yield document_of(read, place, field, where)


def document_of(read: Any, place: Any, field: str, where: str) -> Document | TextError:
    """The document that `read(place, field, where)` gives, or the TextError that it raises."""
    try:
        return Document(read(place, field, where), where)
    except TextError as error:
        return error


def _json_lines(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Each line that holds something."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{name}, line {number}", line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}): it was cut short or is damaged.") from error


def _parquet_values(path: Path, field: str, name: str) -> Iterator[tuple[str, Any]]:
    require_package("pyarrow", f"{path} is a .parquet file: to read it")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            refuse_missing_field(field, file.schema_arrow.names, str(path))
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield f"{name}, row {number}", value.as_py()
    except (ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a .parquet file: {error}") from error


def require_package(package: str, purpose: str) -> None:
    """Raise ValueError, beginning with the purpose, if a package is not installed."""
    if find_spec(package) is None:
        raise ValueError(f"{purpose} the package {package} is needed: pip install 'crosscurrent[data]'")


@contextmanager
def refuse_other_encodings(where: object) -> Iterator[None]:
    """Raise TextError if what is read there proves not to be UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        message = f"{where} is not UTF-8 text ({error.reason} at byte {error.start})."
        raise TextError("not UTF-8", str(where), message) from error


def _text_of_file(path: Path, field: str, where: str) -> str:
    with refuse_other_encodings(where):
        return path.read_text(encoding="utf-8-sig")


def _text_of_line(line: bytes, field: str, where: str) -> str:
    with refuse_other_encodings(where):
        decoded = line.decode("utf-8-sig")
    try:
        row = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "") or str(error)
        message = f"{where} is not JSON ({reason}): a .jsonl file holds one JSON object per line."
        raise TextError("broken JSON", where, message) from error
    if not isinstance(row, dict):
        message = f"{where} is not a JSON object: each line needs one, such as {{{field!r}: '...'}}."
        raise TextError("broken JSON", where, message)
    return text_of_row(row, field, where)


def text_of_row(row: Mapping[str, Any], field: str, where: str) -> str:
    """The text in a field of a row.

    Raises:
        TextError: it has no such field, or it holds no text.
    """
    if field not in row:
        message = f"{where} has no field {field!r}, it has {sorted(row)}.{did_you_mean(field, row)}"
        raise TextError("field missing", where, message)
    return text_of_value(row[field], field, where)


def text_of_value(value: Any, field: str, where: str) -> str:
    """The text that the value of a field is.

    Raises:
        TextError: it is none.
    """
    if not isinstance(value, str):
        message = f"{where}: field {field!r} holds a {type(value).__name__}, not a text."
        raise TextError("not a text", where, message)
    refuse_half_characters(value, where)
    return value


def refuse_missing_field(field: str, columns: Sequence[str], where: str) -> None:
    """Raise ValueError if a table has no such column."""
    if field not in columns:
        raise ValueError(f"{where} has no column {field!r}, it has {sorted(columns)}.{did_you_mean(field, columns)}")


def refuse_half_characters(text: str, where: str) -> None:
    """Raise TextError if a text holds half of a character (a lone surrogate), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{where} holds half of a character at place {error.start}: it is no valid text."
        raise TextError("half of a character", where, message) from error


def read_documents(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, max_documents: int, field: str = "text"
) -> list[list[int]]:
    """Token ids of the first documents of a file.

    A .txt file is cut into documents of `max_length` tokens; of a .jsonl file each line is one, of which `max_length` tokens
    are taken. Documents of less than two tokens, in which nothing can be predicted, are passed over.

    Args:
        path, field: as `read_texts` takes them.
        tokenizer: puts special tokens where it always does.
        max_length: the most tokens per document.
        max_documents: how many are taken.

    Raises:
        ValueError: there is no document, or as for `read_texts`.
        OSError: the file cannot be read.
    """
    documents: list[list[int]] = []
    for text in read_texts(path, field):
        ids: list[int] = tokenizer(text)["input_ids"]
        starts = range(0, len(ids), max_length) if path.suffix == ".txt" else range(1)
        parts = (ids[start : start + max_length] for start in starts)
        documents += [part for part in parts if len(part) > 1]
        if len(documents) >= max_documents:
            return documents[:max_documents]
    if not documents:
        raise ValueError(f"{path} holds no text of at least two tokens.")
    return documents


def in_batches(documents: Sequence[Any], batch_size: int) -> list[Sequence[Any]]:
    """The documents, in order, `batch_size` at a time."""
    return [documents[start : start + batch_size] for start in range(0, len(documents), batch_size)]
