"""Texts from files, as token ids."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosscurrent.suggestions import did_you_mean


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """The texts of a file, in order: one of a .txt file, one per line of a .jsonl file.

    Args:
        path: of the file, in UTF-8, with or without a byte order mark.
        field: the key of the text in each line of a .jsonl file.

    Raises:
        ValueError: the file's kind is another, it is not UTF-8, or a line does not hold a text under that key.
        OSError: it cannot be read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "two.jsonl"
        >>> _ = path.write_text('{"text": "one"}\\n{"text": "two"}\\n')
        >>> list(read_texts(path))
        ['one', 'two']
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path} is neither a .txt file (one text) nor a .jsonl file (one JSON object per line).")
    with refuse_other_encodings(path):
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8-sig")
            return
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of_line(line, field, f"{path}, line {number}")


@contextmanager
def refuse_other_encodings(path: Path) -> Iterator[None]:
    """Raise ValueError if what is read of a file proves not to be UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error


def _text_of_line(line: str, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "") or str(error)
        raise ValueError(f"{where} is not JSON ({reason}): a .jsonl file holds one JSON object per line.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object: each line needs one, such as {{{field!r}: '...'}}.")
    if field not in row:
        raise ValueError(f"{where} has no field {field!r}, it has {sorted(row)}.{did_you_mean(field, row)}")
    if not isinstance(row[field], str):
        raise ValueError(f"{where}: field {field!r} holds a {type(row[field]).__name__}, not a text.")
    refuse_half_characters(row[field], where)
    text: str = row[field]
    return text


def refuse_half_characters(text: str, where: str) -> None:
    """Raise ValueError if a text holds half of a character (a lone surrogate), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half of a character at place {error.start}: it is no valid text.") from error


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
