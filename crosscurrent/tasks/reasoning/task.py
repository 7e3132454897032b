"""What every reasoning task is: questions as text, completions to learn from, and a judge of what a model writes.

A task describes itself by class attributes and a few methods. Options, such as a depth, are fields of the frozen dataclass
that it is. How a question becomes tokens is not its business: see `crosscurrent.data.problems`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from crosscurrent.tasks.splits import Split, check_request

PromptFormat = Literal["chat", "plain"]
Part = Literal["answer", "all"]


@dataclass(frozen=True)
class Problem:
    """A question, and what is right.

    Attributes:
        id: names the problem in its task; the same in every run.
        question: what is asked, without the task's instruction.
        completion: what a model is trained to write, its steps and the answer, without an end-of-text token.
        answer: the reference that outputs are judged against.
        details: more that the judge needs; plain values, as in JSON.
    """

    id: str
    question: str
    completion: str
    answer: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What the judge found in an output.

    Attributes:
        parsed: the answer as it was read; None if there is none to be read.
        scores: the task's metrics, from 0 to 1. All are 0 where nothing could be read.
    """

    parsed: str | None
    scores: dict[str, float]


class ReasoningTask(ABC):
    """A set of problems. Subclasses are frozen dataclasses, registered by name in `crosscurrent.tasks.reasoning.registry`.

    Attributes:
        name: as recipes and the command line spell it.
        metrics: what `judge` scores; the first one is reported first.
        prompt_format: "chat": the question is a user's message in the tokenizer's chat template; "plain": text, which the
            completion continues. How the task is asked unless told otherwise.
        loss_on: the part of an example that the loss covers.
        recurrent: the part whose tokens are recurrent, in training and in generation.
        max_new_tokens: how long an output may be.
        is_generated: whether problems are made by a generator, and not read from files or the hub.
        num_problems: of a generated task, how many a split has unless told otherwise.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    prompt_format: ClassVar[PromptFormat] = "plain"
    loss_on: ClassVar[Part] = "answer"
    recurrent: ClassVar[Part] = "all"
    max_new_tokens: ClassVar[int] = 16
    is_generated: ClassVar[bool] = False
    num_problems: ClassVar[Mapping[Split, int]] = {"train": 100_000, "validation": 256, "test": 1024}

    @abstractmethod
    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        """The first problems of a split, always in the same order.

        Args:
            split: "train", "validation" or "test". No question is in two of them.
            data: a folder with the task's files, or one of them. None: the data set of the hub. Not for generated tasks.
            count: how many; None: all that there are, of a generated task `num_problems`.
            seed: of a generated task.

        Raises:
            ValueError: there is no such split, there are fewer than `count`, a record lacks a field or its answer is empty
                (the message names file, record and field), or a setting has no meaning for the task.
            OSError: files are missing, or the hub cannot be reached.
        """

    @abstractmethod
    def judge(self, problem: Problem, output: str) -> Verdict:
        """Score what a model wrote after the prompt. Whatever it wrote, this does not raise."""

    def message(self, problem: Problem) -> str:
        """What a user would write in a chat: the task's instruction and the question."""
        return problem.question

    def plain_prompt(self, problem: Problem) -> str:
        """The text that the completion continues."""
        return problem.question


@dataclass(frozen=True)
class _GeneratedProblems(Sequence[Problem]):
    """Problems made when asked for, by index."""

    make: Callable[[int], Problem]
    num_problems: int

    def __len__(self) -> int:
        return self.num_problems

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(one) for one in range(self.num_problems)[index]]
        return self.make(range(self.num_problems)[index])


def generated_problems(
    task: ReasoningTask, split: Split, data: Path | None, count: int | None, make: Callable[[int], Problem]
) -> Sequence[Problem]:
    """What `problems` of a generated task returns: problem number i is `make(i)`, made when it is asked for.

    Raises:
        ValueError: data was given, there is no such split, or the count is below 1.
    """
    check_request(split, 0)
    if data is not None:
        raise ValueError(f"{task.name} makes its problems itself: leave out the data ({data}).")
    num_problems = task.num_problems[split] if count is None else count
    if num_problems < 1:
        raise ValueError(f"count={count} is not allowed: give at least 1.")
    return _GeneratedProblems(make, num_problems)


def first_line(output: str) -> str:
    """The first line that holds something, without white space around it; "" if there is none.

    Example:
        >>> first_line("\\n  forty-two \\nQuestion: and now?")
        'forty-two'
    """
    return output.lstrip().partition("\n")[0].rstrip()
