"""Records of outputs, in a file that survives being killed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from crosscurrent.files import write_whole
from crosscurrent.suggestions import differences

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """An output, and what the judge found in it.

    Attributes:
        id: of the problem.
        sample: which of the problem's outputs this is, from 0.
        prompt: the whole prompt as text.
        output: what the model wrote, without special tokens.
        parsed: the answer as it was read; None if there was none to be read.
        answer: the reference.
        scores: the task's metrics, from 0 to 1.
        num_prompt_tokens: of the prompt.
        num_new_tokens: of the output, with the end-of-text token.
        is_truncated: whether the output was cut off, having no end within max_new_tokens.
        is_too_long: whether the prompt does not fit the model's context; then nothing was written, and all scores are 0.
        seconds: the output's share of its batch's time.
    """

    id: str
    sample: int
    prompt: str
    output: str
    parsed: str | None
    answer: str
    scores: dict[str, float]
    num_prompt_tokens: int
    num_new_tokens: int
    is_truncated: bool
    is_too_long: bool
    seconds: float


_FIELDS = {field.name for field in fields(Record)}
_HEADER = {"format", "task", "num_problems", "data", "settings", "prompts", "recurrence", "model"}


@dataclass(frozen=True)
class Answers:
    """What a file of records holds.

    Attributes:
        header: what the records depend on, as `header_of` makes it.
        records: in the order of the problems, and of each problem's outputs.
    """

    header: dict[str, Any]
    records: list[Record]

    @property
    def is_complete(self) -> bool:
        """Whether there is an output for each problem."""
        return len(self.records) == self.header["num_problems"] * self.header["settings"]["num_samples"]


class RecordsFile:
    """A file of records: a first line that says what they depend on (the header), then a line for each record.

    Records are appended batch by batch. A process that is killed leaves at most one incomplete line at the end.

    Args:
        path: of the file, a .jsonl; it need not exist.
    """

    def __init__(self, path: Path):
        self.path = path

    def open(self, header: dict[str, Any]) -> list[Record]:
        """Begin the file, or go on with it.

        Args:
            header: what the records will depend on. The model's name may differ from the file's, all else may not.

        Returns:
            The records that are there already. What is incomplete at the end is cut off.

        Raises:
            ValueError: the file's records depend on something else, or it is damaged or no file of records.
            OSError: it cannot be read or written.
        """
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(header) + "\n")
            return []
        answers = self.read()
        found = [line for line in differences(answers.header, header) if not line.startswith("model.name:")]
        if found:
            raise ValueError(
                f"{self.path} holds outputs of something else ({'; '.join(found[:3])}): give another place, or delete it "
                "to begin again."
            )
        whole = self.path.read_bytes().rfind(b"\n") + 1
        with self.path.open("r+b") as file:
            file.truncate(whole)
        return answers.records

    def append(self, records: Sequence[Record]) -> None:
        """Add records."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(record)) + "\n" for record in records))
        except OSError as error:  # of a full disk, which names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def read(self) -> Answers:
        """All that is there, without what is incomplete at the end.

        Raises:
            ValueError: it is damaged, or no file of records.
            OSError: it cannot be read.
        """
        *lines, _ = self.path.read_bytes().split(b"\n")
        rows = [self._row(number, line) for number, line in enumerate(lines, start=1)]
        if not rows or not _is_header(rows[0]):
            raise ValueError(
                f"{self.path} is no file of records of this version: its first line does not say what they depend on."
            )
        for number, row in enumerate(rows[1:], start=2):
            if not _is_record(row):
                raise ValueError(f"{self.path}: line {number} is no record: restore the file, or delete it.")
        return Answers(rows[0], [Record(**row) for row in rows[1:]])

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{self.path}: line {number} is damaged: restore the file, or delete it.")
        return row


def _is_header(row: dict[str, Any]) -> bool:
    if not row.keys() >= _HEADER or row["format"] != FORMAT:
        return False
    parts = (row["task"], row["settings"], row["model"])
    return type(row["num_problems"]) is int and all(isinstance(part, dict) for part in parts)


def _is_record(row: dict[str, Any]) -> bool:
    if row.keys() != _FIELDS or not isinstance(row["id"], str) or not isinstance(row["scores"], dict):
        return False
    counts = (row["sample"], row["num_prompt_tokens"], row["num_new_tokens"])
    scores = [*row["scores"].values()]
    return (
        all(type(count) is int for count in counts)
        and isinstance(row["seconds"], int | float)
        and bool(scores)
        and all(isinstance(score, int | float) and 0 <= score <= 1 for score in scores)
    )


def read_answers(path: Path) -> Answers:
    """The records in a file, and what they depend on.

    Raises:
        ValueError: it is damaged, or no file of records.
        OSError: it cannot be read.

    Example::

        wrong = [record for record in read_answers(Path("scores/gsm8k.jsonl")).records if not record.scores["accuracy"]]
    """
    return RecordsFile(path).read()
