"""HotpotQA in the distractor setting: two-hop questions over ten paragraphs, answered in a few words."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from crosscurrent.tasks.reasoning.records import HubSplit, Record, first, leave_out, read_records
from crosscurrent.tasks.reasoning.task import Problem, PromptFormat, ReasoningTask, Verdict, first_line
from crosscurrent.tasks.reasoning.words import exact_match, f1
from crosscurrent.tasks.splits import Split, check_request, split_of

_HUB = "hotpotqa/hotpot_qa"
_INSTRUCTION = "Answer the question from the paragraphs. Write only the answer, in as few words as possible."
_LAYOUT = "is not laid out as {'title': [text, ...], 'sentences': [[text, ...], ...]}"


@dataclass(frozen=True)
class Hotpotqa(ReasoningTask):
    """Questions whose answer takes facts from two of some ten paragraphs.

    The published dev questions are the test split; a tenth of the published training questions, chosen by what they say,
    is the validation split. The first line of an output is its answer, an "Answer:" before it left out, scored by exact
    match and F1 as in the official evaluation.

    Example::

        problems = get_reasoning_task("hotpotqa").problems("test", Path("folder"), count=100)
    """

    name: ClassVar[str] = "hotpotqa"
    metrics: ClassVar[tuple[str, ...]] = ("em", "f1")
    prompt_format: ClassVar[PromptFormat] = "chat"
    max_new_tokens: ClassVar[int] = 32

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        check_request(split, 0)
        records = first(_records(split, data), count, f"problems of {self.name}, {split}")
        return [_read(record, f"{split}-{number}") for number, record in enumerate(records)]

    def message(self, problem: Problem) -> str:
        return f"{_INSTRUCTION}\n\n{problem.question}"

    def plain_prompt(self, problem: Problem) -> str:
        return f"{self.message(problem)}\nAnswer:\n"

    def judge(self, problem: Problem, output: str) -> Verdict:
        answer = first_line(re.sub(r"\A\s*answer:", "", output, flags=re.IGNORECASE))
        scores = {"em": exact_match(answer, problem.answer), "f1": f1(answer, problem.answer)}
        return Verdict(answer, scores) if answer else Verdict(None, dict.fromkeys(self.metrics, 0.0))


def _records(split: Split, data: Path | None) -> list[Record]:
    if split == "test":
        return _published("validation", "dev", data)
    training = _published("train", "train", data)
    if data is None or data.is_dir():
        training = leave_out(training, _published("validation", "dev", data), "question")
    wants_validation = split == "validation"
    return [one for one in training if (split_of(one.text("question")) == "validation") == wants_validation]


def _published(hub_split: str, file_split: str, data: Path | None) -> list[Record]:
    return read_records([f"hotpotqa_distractor_{file_split}.jsonl"], data, HubSplit(_HUB, hub_split, "distractor"))


def _read(record: Record, problem_id: str) -> Problem:
    answer = record.text("answer").strip()
    question = f"{_paragraphs(record)}\n\nQuestion: {record.text('question').strip()}"
    return Problem(problem_id, question, answer, answer)


def _paragraphs(record: Record) -> str:
    context = record.value("context")
    titles, sentences = _column(record, context, "title"), _column(record, context, "sentences")
    if not _are_texts(titles) or not all(map(_are_texts, sentences)):
        raise record.wrong("context", _LAYOUT)
    if not titles or len(titles) != len(sentences):
        raise record.wrong("context", f"has {len(titles)} titles and {len(sentences)} lists of sentences")
    return "\n\n".join(
        f"{title}: {' '.join(sentence.strip() for sentence in said)}"
        for title, said in zip(titles, sentences, strict=True)
    )


def _column(record: Record, context: Any, key: str) -> list[Any]:
    column = context.get(key) if isinstance(context, dict) else None
    if not isinstance(column, list):
        raise record.wrong("context", _LAYOUT)
    return column


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
