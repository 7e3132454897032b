"""Questions and answers of one's own, from files or from a data set of the hub."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from crosscurrent.suggestions import did_you_mean
from crosscurrent.tasks.reasoning.math_verify_process import require_math_verify
from crosscurrent.tasks.reasoning.mathematics import judge_expression, judge_number
from crosscurrent.tasks.reasoning.numbers import read_number
from crosscurrent.tasks.reasoning.records import HubSplit, Record, first, leave_out, read_records
from crosscurrent.tasks.reasoning.task import Part, Problem, PromptFormat, ReasoningTask, Verdict, first_line
from crosscurrent.tasks.reasoning.words import exact_match, normalise
from crosscurrent.tasks.splits import Split, check_request

Judge = Literal["text", "number", "mathematics"]
_MARK = re.compile(r"\banswer\s*:", re.IGNORECASE)


@dataclass(frozen=True)
class QuestionAnswer(ReasoningTask):
    """Records with a question, a completion to be learned, and an answer to be judged by.

    Of a folder the files train.jsonl, validation.jsonl and test.jsonl (or .json) are read, of the hub splits of these names.
    Test questions are left out of training and validation, validation questions out of training.

    Attributes:
        question, answer: fields of the records.
        completion: field of what is learned, such as steps that end with the answer. None: the answer is.
        judged_as: "text": what follows the last "Answer:", or else the last line, compared as HotpotQA's answers are;
            "number": as GSM8K is judged; "mathematics": as MATH500 is.
        hub: a data set, as OWNER/NAME, read where no folder is given.
        hub_config: of the data set.
        train, validation, test: its splits, or slices of them as the package `datasets` writes them.

    Raises:
        ValueError: there is no such judge.

    Example:
        >>> task = QuestionAnswer(judged_as="number")
        >>> task.judge(Problem("p", "1 + 1?", "", "2"), "It is 2.").scores
        {'accuracy': 1.0}
        >>> QuestionAnswer().judge(Problem("p", "Where?", "", "the Nile"), "It is in Egypt.\\nAnswer: Nile").parsed
        'Nile'
    """

    question: str = "question"
    answer: str = "answer"
    completion: str | None = None
    judged_as: Judge = "text"
    hub: str | None = None
    hub_config: str | None = None
    train: str = "train"
    validation: str = "validation"
    test: str = "test"

    name: ClassVar[str] = "question_answer"
    prompt_format: ClassVar[PromptFormat] = "chat"
    recurrent: ClassVar[Part] = "answer"
    max_new_tokens: ClassVar[int] = 512

    def __post_init__(self) -> None:
        for name in ("question", "answer", "completion", "hub", "hub_config", "train", "validation", "test"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in ("completion", "hub", "hub_config")):
                raise ValueError(f"{name}={value!r} is not allowed: give text.")
        if self.hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub):
            raise ValueError(f"hub={self.hub!r} is not allowed: give a data set of the hub, as OWNER/NAME.")
        if self.judged_as not in get_args(Judge):
            raise ValueError(
                f"judged_as={self.judged_as!r} is not allowed.{did_you_mean(self.judged_as, get_args(Judge))} Give one of "
                f"{', '.join(get_args(Judge))}."
            )

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        check_request(split, 0)
        if self.judged_as == "mathematics":
            require_math_verify()
        kept_for: dict[Split, tuple[Split, ...]] = {
            "train": ("validation", "test"),
            "validation": ("test",),
            "test": (),
        }
        others = [record for other in kept_for[split] for record in self._records(other, data)]
        records = leave_out(self._records(split, data), others, self.question)
        if not records:
            raise ValueError(
                f"nothing is left of {split} when the questions of {' and '.join(kept_for[split])} are left out: give files "
                "with different questions."
            )
        chosen = first(records, count, f"problems of {self.name} ({split})")
        return [self._problem(f"{split}-{number}", split, record) for number, record in enumerate(chosen)]

    def _records(self, split: Split, data: Path | None) -> list[Record]:
        hub = None if self.hub is None else HubSplit(self.hub, getattr(self, split), self.hub_config)
        return read_records([f"{split}.jsonl", f"{split}.json"], data, hub)

    def _problem(self, name: str, split: Split, record: Record) -> Problem:
        answer = record.text(self.answer).strip()
        if self.judged_as == "number" and read_number(answer) is None:
            raise record.wrong(self.answer, f"is no number: {answer[:40]!r}")
        # Nothing is learned from test problems, which often have no steps.
        has_steps = self.completion is not None and (split != "test" or self.completion in record.fields)
        completion = record.text(self.completion).strip() if self.completion is not None and has_steps else answer
        return Problem(name, record.text(self.question).strip(), completion, answer)

    def judge(self, problem: Problem, output: str) -> Verdict:
        if self.judged_as == "number":
            return judge_number(output, problem.answer)
        if self.judged_as == "mathematics":
            return judge_expression(output, problem.answer)
        *_, last = _MARK.split(output)
        answer = first_line(last) if _MARK.search(output) else first_line("\n".join(reversed(output.split("\n"))))
        is_right = bool(normalise(answer)) and exact_match(answer, problem.answer) == 1.0
        return Verdict(answer or None, {"accuracy": float(is_right)})

    def plain_prompt(self, problem: Problem) -> str:
        return f"Question: {problem.question}\nAnswer: "
