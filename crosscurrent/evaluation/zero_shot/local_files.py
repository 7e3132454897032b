"""Evaluation sets from local files, in the columns of the hub's data sets, from which the harness makes its prompts."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from crosscurrent.data.texts import refuse_other_encodings

Row = dict[str, Any]


@dataclass(frozen=True)
class LocalFile:
    """Where the examples of a task lie in a folder, one JSON object per line.

    Attributes:
        name: of the file.
        split: of the hub's data set that the file is a copy of, or a part.
        reshape: makes a row of the hub's data set of a line. Raises LookupError, TypeError or ValueError if it is not laid
            out as it should be.
        labels: name of the file with one label per line, where they are apart.
    """

    name: str
    split: str
    reshape: Callable[[Row], Row]
    labels: str | None = None


def _arc(row: Row) -> Row:
    """Of {id, question: {stem, choices: [{text, label}]}, answerKey}."""
    choices = row["question"]["choices"]
    found = {key: [choice[key] for choice in choices] for key in ("text", "label")}
    if row["answerKey"] not in found["label"]:
        raise ValueError(f"answerKey {row['answerKey']!r} is not one of the labels {found['label']}")
    return {"id": row["id"], "question": row["question"]["stem"], "choices": found, "answerKey": row["answerKey"]}


def _hellaswag(row: Row) -> Row:
    """Of {ctx_a, ctx_b, activity_label, endings, label, ...}, as published; the hub's labels are text."""
    if not 0 <= int(row["label"]) < len(row["endings"]):
        raise ValueError(f"label {row['label']!r} is not one of {len(row['endings'])} endings")
    return {name: row[name] for name in ("activity_label", "ctx_a", "ctx_b", "endings")} | {"label": str(row["label"])}


def _piqa(row: Row) -> Row:
    """Of {goal, sol1, sol2} and a label."""
    if row["label"] not in ("0", "1"):
        raise ValueError(f"label {row['label']!r} is neither 0 nor 1")
    return {name: row[name] for name in ("goal", "sol1", "sol2")} | {"label": int(row["label"])}


def _winogrande(row: Row) -> Row:
    """Of {context_options, continuation, gold}, which the two fillings of a gap have been made into.

    What both options begin with, up to a space, is the sentence before the gap.
    """
    options, gold = row["context_options"], row["gold"]
    first, second = options
    if gold not in (0, 1) or "_" in first + second:
        raise ValueError(f"gold {gold!r} is neither 0 nor 1, or there is a gap in the options")
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    before = shared[: shared.rfind(" ") + 1]
    return {
        "sentence": f"{before}_ {row['continuation']}",
        "option1": first.removeprefix(before),
        "option2": second.removeprefix(before),
        "answer": str(gold + 1),
    }


LOCAL_FILES = {
    "arc_easy": LocalFile("arc_easy_test.jsonl", "test", _arc),
    "arc_challenge": LocalFile("arc_challenge_test.jsonl", "test", _arc),
    "hellaswag": LocalFile("hellaswag_val_1000.jsonl", "validation", _hellaswag),
    "piqa": LocalFile("piqa_valid.jsonl", "validation", _piqa, labels="piqa_valid_labels.lst"),
    "winogrande": LocalFile("winogrande_dev.jsonl", "validation", _winogrande),
}


def read_rows(source: LocalFile, folder: Path) -> list[Row]:
    """The rows of the hub's data set, in the order of the file.

    Raises:
        ValueError: a line is not laid out as it should be, there is none, or there are not as many labels.
        OSError: a file is missing or cannot be read.
    """
    path = folder / source.name
    lines = list(_objects(path))
    if not lines:
        raise ValueError(f"{path} holds no examples.")
    if source.labels is not None:
        labels = (folder / source.labels).read_text(encoding="utf-8").split()
        if len(labels) != len(lines):
            raise ValueError(
                f"{folder / source.labels} holds {len(labels)} labels for the {len(lines)} of {path.name}."
            )
        lines = [line | {"label": label} for line, label in zip(lines, labels, strict=True)]
    return [_reshaped(line, source, f"{path}, example {number}") for number, line in enumerate(lines, start=1)]


def _objects(path: Path) -> Iterator[Row]:
    with refuse_other_encodings(path), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object.")
            yield row


def _reshaped(line: Row, source: LocalFile, where: str) -> Row:
    try:
        return source.reshape(line)
    except KeyError as error:
        raise ValueError(f"{where} has no field {error}: it has {sorted(line)}.") from error
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is not laid out as it should be: {error}.") from error


def checksum(source: LocalFile, folder: Path) -> str:
    """SHA-256 of the examples' file."""
    return hashlib.sha256((folder / source.name).read_bytes()).hexdigest()
