"""Problems put to a model, its outputs judged and kept."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from crosscurrent.data.problems import ProblemTokenizer, check_vocabulary, context_length, some_of, too_long
from crosscurrent.data.texts import in_batches
from crosscurrent.evaluation.answering.generating import Writer
from crosscurrent.evaluation.answering.header import header_of
from crosscurrent.evaluation.answering.records import Record, RecordsFile
from crosscurrent.evaluation.answering.settings import AnsweringSettings
from crosscurrent.evaluation.answering.statistics import summary
from crosscurrent.tasks.reasoning import Problem, ReasoningTask


def score_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: ReasoningTask,
    problems: Sequence[Problem],
    settings: AnsweringSettings | None = None,
    file: Path | None = None,
    name: str = "",
) -> dict[str, Any]:
    """Put problems to a model and add up the scores. The arguments and errors are those of `answer_problems`.

    Returns:
        Plain values: what `summary` says of the records, with task, settings, recurrence and model of the file's header.

    Example::

        problems = task.problems("test", count=200)
        score_answers(model, tokenizer, task, problems)["metrics"]["accuracy"]  # {'mean': ..., 'low': ..., 'high': ...}
    """
    session = Session(model, tokenizer, task, problems, settings or AnsweringSettings(), name)
    return session.facts(session.answer(file))


def answer_problems(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: ReasoningTask,
    problems: Sequence[Problem],
    settings: AnsweringSettings | None = None,
    file: Path | None = None,
    name: str = "",
) -> list[Record]:
    """Put problems to a model, and judge what it writes.

    Prompts that do not fit the model's context together with an output are not cut: they are not asked, count as wrong, and
    a line on stderr names them.

    Args:
        model: any causal language model of transformers, or one of this library. It is left as it was.
        tokenizer: the model's.
        task: which says how problems are asked and judged.
        problems: of the task; ids must be unique.
        settings: how they are asked; None: `AnsweringSettings()`.
        file: a .jsonl where records are kept, batch by batch; a call that was killed goes on from there. None: nowhere.
        name: of the model, to be read by people.

    Returns:
        A record of each output, in the order of the problems.

    Raises:
        ValueError: there is no problem, an id is there twice, all prompts are too long, the tokenizer lacks a chat template
            or an end-of-text token, or the file holds outputs of something else.
        OSError: the file cannot be read or written.

    Example::

        task = get_reasoning_task("variable_assignment", depth=2)
        answer_problems(model, tokenizer, task, task.problems("test", count=8))[0].output
    """
    return Session(model, tokenizer, task, problems, settings or AnsweringSettings(), name).answer(file)


@dataclass(frozen=True)
class _Item:
    """One output to be written."""

    problem: Problem
    sample: int
    prompt: str
    prompt_ids: list[int]
    is_too_long: bool


class Session:
    """Problems made ready to be put to a model. The arguments and errors are those of `answer_problems`.

    Attributes:
        header: what the records will depend on.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        task: ReasoningTask,
        problems: Sequence[Problem],
        settings: AnsweringSettings,
        name: str,
    ):
        self.task, self.tokenizer, self.settings = task, tokenizer, settings
        self.writer = Writer(model, tokenizer, settings, settings.length_for(task))
        _check_ids(problems)
        tokens = ProblemTokenizer(task, tokenizer, settings.prompt_format)
        prompts = [tokens.prompt_ids(problem) for problem in problems]
        check_vocabulary(prompts, model, tokenizer)
        context = context_length(model)
        longest = None if context is None else max(0, context - settings.length_for(task))
        left_out = set(too_long(list(map(len, prompts)), longest))
        _say_what_is_too_long([problems[place].id for place in sorted(left_out)], len(problems), longest, context)
        self.header = header_of(model, task, problems, prompts, settings, self.writer.end_ids, name)
        self._items = [
            _Item(problem, sample, tokens.prompt_text(problem), prompts[place], place in left_out)
            for place, problem in enumerate(problems)
            for sample in range(settings.num_samples)
        ]

    @property
    def prompts(self) -> dict[str, list[int]]:
        """The token ids of the prompts that are asked, by problem."""
        return {item.problem.id: item.prompt_ids for item in self._items if not item.is_too_long}

    def answer(self, file: Path | None = None) -> list[Record]:
        """The records, kept in a file if there is one."""
        records_file = None if file is None else RecordsFile(file)
        records = [] if records_file is None else records_file.open(self.header)
        expected = [(item.problem.id, item.sample) for item in self._items[: len(records)]]
        if [(record.id, record.sample) for record in records] != expected:
            raise ValueError(
                f"{file} does not hold its outputs in the order of the problems: restore it, or delete it."
            )
        with tqdm(total=len(self._items), initial=len(records), desc=self.task.name, unit="output", leave=False) as bar:
            for batch in in_batches(self._items[len(records) :], self.settings.batch_size):
                found = self._records(batch)
                if records_file is not None:
                    records_file.append(found)
                records += found
                bar.update(len(found))
        return records

    def facts(self, records: Sequence[Record]) -> dict[str, Any]:
        """What the records add up to, and what they depend on."""
        kept = ("task", "settings", "recurrence", "model", "data")
        return {**summary(records), **{part: self.header[part] for part in kept}}

    def _records(self, batch: Sequence[_Item]) -> list[Record]:
        asked = [item for item in batch if not item.is_too_long]
        started = time.perf_counter()
        prompts = [item.prompt_ids for item in asked]
        written = self.writer.write(prompts, [(item.problem.id, item.sample) for item in asked]) if asked else []
        seconds = (time.perf_counter() - started) / max(1, len(asked))
        outputs = iter(written)
        return [
            self._not_asked(item) if item.is_too_long else self._judged(item, next(outputs), seconds) for item in batch
        ]

    def _judged(self, item: _Item, new: list[int], seconds: float) -> Record:
        has_end = new[-1] in self.writer.end_ids
        output = self.tokenizer.decode(new[:-1] if has_end else new, skip_special_tokens=True)
        assert isinstance(output, str)
        verdict = self.task.judge(item.problem, output)
        return Record(
            id=item.problem.id,
            sample=item.sample,
            prompt=item.prompt,
            output=output,
            parsed=verdict.parsed,
            answer=item.problem.answer,
            scores=verdict.scores,
            num_prompt_tokens=len(item.prompt_ids),
            num_new_tokens=len(new),
            is_truncated=not has_end,
            is_too_long=False,
            seconds=seconds,
        )

    def _not_asked(self, item: _Item) -> Record:
        return Record(
            id=item.problem.id,
            sample=item.sample,
            prompt=item.prompt,
            output="",
            parsed=None,
            answer=item.problem.answer,
            scores=dict.fromkeys(self.task.metrics, 0.0),
            num_prompt_tokens=len(item.prompt_ids),
            num_new_tokens=0,
            is_truncated=False,
            is_too_long=True,
            seconds=0.0,
        )


def _check_ids(problems: Sequence[Problem]) -> None:
    if len(problems) == 0:
        raise ValueError("there is no problem to be answered: give at least one.")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ValueError(f"two problems have the id {problem.id!r}: give each an id of its own.")
        seen.add(problem.id)


def _say_what_is_too_long(ids: list[str], num_problems: int, longest: int | None, context: int | None) -> None:
    if not ids:
        return
    named = some_of(ids)
    what = (
        f"{len(ids)} of {num_problems} prompts have more than {longest} tokens, what the model's context of {context} "
    )
    if len(ids) == num_problems:
        raise ValueError(
            f"{what}leaves for a prompt ({named}): give fewer max_new_tokens, or a model with a longer context."
        )
    tqdm.write(f"{what}leaves for a prompt: they are not asked and count as wrong ({named}).", file=sys.stderr)
