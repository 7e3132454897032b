"""Small texts, a tokenizer of single characters that ends documents, and what to compare of them."""

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosscurrent.data.packing import PackedRows
from crosscurrent.data.shards import PreparedText
from tests.tiny_base import character_tokenizer


def ending_tokenizer() -> Any:
    """One id per character, from 0; the EOS is 0."""
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "<pad>"
    return tokenizer


def random_texts(count: int, longest: int = 20, seed: int = 0) -> list[str]:
    """Texts of 1 to `longest` letters."""
    source = random.Random(seed)
    return ["".join(source.choices(string.ascii_letters, k=source.randint(1, longest))) for _ in range(count)]


def write_jsonl(path: Path, texts: Sequence[Any]) -> Path:
    """A line for each text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def ids_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """What documents are to become, written out."""
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]


def documents_in(prepared: PreparedText, split: str) -> list[list[int]]:
    """The documents of a split, in the order of the shards."""
    documents, start = [], 0
    for length in prepared.lengths(split).tolist():
        documents.append(prepared.read(split, start, start + length).tolist())
        start += length
    return documents


def documents_of_epoch(rows: PackedRows, eos_token_id: int, epoch: int = 0) -> list[list[int]]:
    """Documents put together again from the rows, in the order in which they come."""
    tokens: list[int] = []
    for index in range(epoch * len(rows), (epoch + 1) * len(rows)):
        row = rows[index]
        tokens += row["input_ids"][row["attention_mask"] == 1].tolist()
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == eos_token_id:
            documents.append([])
    assert documents.pop() == []
    return documents
