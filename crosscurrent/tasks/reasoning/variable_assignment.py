"""Variable assignment as a reasoning task: see `crosscurrent.tasks.variable_assignment` for the problems."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from crosscurrent.tasks import variable_assignment
from crosscurrent.tasks.reasoning.task import Problem, ReasoningTask, Verdict, generated_problems
from crosscurrent.tasks.splits import Split


@dataclass(frozen=True)
class VariableAssignment(ReasoningTask):
    """Follow a chain of aliases through shuffled lines to a digit, which is all that is to be written.

    The first digit of an output is taken for its answer. The published range: depth 2, in the hard case 5.

    Attributes:
        depth: number of aliases to follow.

    Raises:
        ValueError: the depth is not allowed.

    Example:
        >>> task = VariableAssignment(depth=2)
        >>> problem = task.problems("test", count=1)[0]
        >>> task.judge(problem, f" {problem.answer}").scores
        {'accuracy': 1.0}
    """

    depth: int = 2

    name: ClassVar[str] = "variable_assignment"
    max_new_tokens: ClassVar[int] = 4
    is_generated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        variable_assignment.check_depth(self.depth)

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        return generated_problems(self, split, data, count, lambda index: self._problem(split, index, seed))

    def _problem(self, split: Split, index: int, seed: int) -> Problem:
        example = variable_assignment.example(split, index, seed, self.depth)
        return Problem(f"{split}-{seed}-{index}", example.prompt, example.answer, example.answer)

    def judge(self, problem: Problem, output: str) -> Verdict:
        found = re.search(r"[0-9]", output)
        parsed = found.group() if found else None
        return Verdict(parsed, {"accuracy": float(parsed == problem.answer)})
