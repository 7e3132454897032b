"""Word problems of grade school: GSM8K, and GSM-Aug with its steps as equations or in natural language.

GSM-Aug is GSM8K with a training set of 385,000 problems, of which files are read if they are there; without them its
training set is that of GSM8K. The 500 validation questions, which are GSM-Aug's, are part of GSM8K's training file; they and
the test questions are left out of all training.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tqdm import tqdm

from crosscurrent.tasks.reasoning.mathematics import judge_number
from crosscurrent.tasks.reasoning.numbers import read_number
from crosscurrent.tasks.reasoning.records import (
    HubSplit,
    Record,
    first,
    leave_out,
    read_file,
    read_records,
    without_space,
)
from crosscurrent.tasks.reasoning.task import Part, Problem, PromptFormat, ReasoningTask, Verdict
from crosscurrent.tasks.splits import Split, check_request

_ANNOTATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class _Origin:
    """Where records are: file names, of which the first that is there counts, and a split of the hub."""

    names: tuple[str, ...]
    hub: HubSplit

    def read(self, data: Path | None) -> list[Record]:
        return read_records(self.names, data, self.hub)


@dataclass(frozen=True)
class Solution:
    """What a record says: lines of steps, and the answer, a number as text."""

    lines: list[str]
    answer: str


def solution_of(record: Record) -> Solution:
    """Of a record of GSM8K, whose answer holds the steps, "####" and the number, or of GSM-Aug, where they are apart.

    Raises:
        ValueError: a field is missing or empty, or the answer is no number.

    Example:
        >>> solution_of(Record({"answer": "48/2 = <<48/2=24>>24\\n#### 24"}, "line 1"))
        Solution(lines=['48/2 = <<48/2=24>>24'], answer='24')
    """
    text = record.text("answer")
    if "steps" in record.fields:
        steps = record.value("steps")
        lines, answer = [steps] if isinstance(steps, str) else steps, text.strip()
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise record.wrong("steps", "holds neither a text nor a list of texts")
    else:
        before, mark, answer = text.rpartition("####")
        if not mark:
            raise record.wrong("answer", f"has no '####' before the final answer: {text[-40:]!r}")
        lines, answer = before.strip().split("\n"), answer.strip()
    if read_number(answer) is None:
        raise record.wrong("answer", f"ends with no number: {answer[:40]!r}")
    return Solution([line.strip() for line in lines if line.strip()], answer)


class _GradeSchool(ReasoningTask):
    """What the three tasks share.

    Attributes:
        origins: of the records of each split.
        held_out: where the validation questions are named.
    """

    origins: ClassVar[Mapping[Split, _Origin]]
    held_out: ClassVar[_Origin]
    recurrent: ClassVar[Part] = "answer"

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        check_request(split, 0)
        records = self._records(split, data)
        with tqdm(records, desc=f"{self.name} ({split})", unit="problem", leave=False, delay=2) as bar:
            made = [self._problem(f"{split}-{number}", record) for number, record in enumerate(bar)]
        # Without steps an example would teach to answer at once.
        kept = [problem for problem in made if split != "train" or not problem.completion.startswith("####")]
        if not kept:
            raise ValueError(f"none of the {len(made)} records from {records[0].where} on has steps for {self.name}.")
        return first(kept, count, f"problems of {self.name} ({split})")

    def _records(self, split: Split, data: Path | None) -> list[Record]:
        if data is not None and data.is_file():
            owners = [owner for owner, origin in self.origins.items() if data.name in origin.names]
            if not owners:
                return read_file(data)
            if split not in owners:
                raise ValueError(f"{data} is the file for {' and '.join(owners)}, not for {split}: give its folder.")
            data = data.parent
        records = self.origins[split].read(data)
        if split == "test":
            return records
        held_out = self.held_out.read(data)
        if split == "validation":
            return _select(records, held_out)
        rest = leave_out(records, [*held_out, *self.origins["test"].read(data)], "question")
        if not rest:
            raise ValueError(f"all {len(records)} questions from {records[0].where} on are held out: none is left.")
        return rest

    def _problem(self, name: str, record: Record) -> Problem:
        solution = solution_of(record)
        steps = self._steps(solution)
        completion = f"{steps}{self._separator}#### {solution.answer}" if steps else f"#### {solution.answer}"
        return Problem(name, record.text("question").strip(), completion, solution.answer)

    _separator: ClassVar[str] = "\n"

    def _steps(self, solution: Solution) -> str:
        """The steps without annotations, one a line."""
        return "\n".join(_ANNOTATION.sub("", line) for line in solution.lines)

    def judge(self, problem: Problem, output: str) -> Verdict:
        return judge_number(output, problem.answer)


def _select(records: Sequence[Record], chosen: Sequence[Record]) -> list[Record]:
    """The records with the questions of the chosen ones, in the order of those."""
    by_question = {without_space(record.text("question")): record for record in records}
    questions = [without_space(record.text("question")) for record in chosen]
    found = [by_question[question] for question in questions if question in by_question]
    if not found:
        raise ValueError(f"none of the validation questions ({chosen[0].where}, ...) is in {records[0].where}, ...")
    return found


_TRAIN = _Origin(("gsm8k_train.jsonl",), HubSplit("openai/gsm8k", "train", "main"))
_TEST = _Origin(("gsm8k_test.jsonl",), HubSplit("openai/gsm8k", "test", "main"))
_VALIDATION = _Origin(("gsm8k_aug_valid.txt",), HubSplit("whynlp/gsm8k-aug", "validation"))


@dataclass(frozen=True)
class GSM8K(_GradeSchool):
    """Grade-school problems, asked as a chat, answered with all steps in natural language and "#### " and a number.

    Example:
        >>> task = GSM8K()
        >>> task.judge(Problem("p", "How many?", "", "72"), "48 + 24 = 72 clips.\\n#### 72")
        Verdict(parsed='72', scores={'accuracy': 1.0})
    """

    name: ClassVar[str] = "gsm8k"
    prompt_format: ClassVar[PromptFormat] = "chat"
    max_new_tokens: ClassVar[int] = 320
    origins: ClassVar[Mapping[Split, _Origin]] = {"train": _TRAIN, "validation": _TRAIN, "test": _TEST}
    held_out: ClassVar[_Origin] = _VALIDATION

    def message(self, problem: Problem) -> str:
        return (
            "Solve this problem step by step. End with a line that holds #### and the final answer, which is a number."
            f"\n\n{problem.question}"
        )

    def plain_prompt(self, problem: Problem) -> str:
        return f"Question: {problem.question}\nAnswer: "


class _Augmented(_GradeSchool):
    """What the two forms of GSM-Aug share: as published, the prompt is learned too, and only answers are recurrent."""

    loss_on: ClassVar[Part] = "all"

    def plain_prompt(self, problem: Problem) -> str:
        return f"{problem.question}\n"


@dataclass(frozen=True)
class GSMAugEquations(_Augmented):
    """GSM-Aug with its steps as equations: "<<48/2=24>> <<48+24=72>> #### 72".

    Records without equations are not trained on.
    """

    name: ClassVar[str] = "gsm_aug_equations"
    max_new_tokens: ClassVar[int] = 96
    origins: ClassVar[Mapping[Split, _Origin]] = {
        "train": _Origin(("gsm8k_aug_train.txt", "gsm8k_train.jsonl"), HubSplit("whynlp/gsm8k-aug", "train")),
        "validation": _VALIDATION,
        "test": _Origin(("gsm8k_aug_test.txt",), HubSplit("whynlp/gsm8k-aug", "test")),
    }
    held_out: ClassVar[_Origin] = _VALIDATION
    _separator: ClassVar[str] = " "

    def _steps(self, solution: Solution) -> str:
        """The annotations alone."""
        return " ".join(_ANNOTATION.findall(" ".join(solution.lines)))


@dataclass(frozen=True)
class GSMAugLanguage(_Augmented):
    """GSM-Aug with its steps in natural language. Of files it is GSM8K, asked as plain text."""

    name: ClassVar[str] = "gsm_aug_language"
    max_new_tokens: ClassVar[int] = 320
    origins: ClassVar[Mapping[Split, _Origin]] = {
        "train": _Origin(_TRAIN.names, HubSplit("whynlp/gsm8k-aug-nl", "train")),
        "validation": _Origin(_TRAIN.names, HubSplit("whynlp/gsm8k-aug-nl", "validation")),
        "test": _Origin(_TEST.names, HubSplit("whynlp/gsm8k-aug-nl", "test")),
    }
    held_out: ClassVar[_Origin] = _Origin(_VALIDATION.names, HubSplit("whynlp/gsm8k-aug-nl", "validation"))
