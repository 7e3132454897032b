"""Pathfinding as a reasoning task: see `crosscurrent.tasks.pathfinding` for the problems."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from crosscurrent.tasks import pathfinding
from crosscurrent.tasks.reasoning.task import Problem, ReasoningTask, Verdict, first_line, generated_problems
from crosscurrent.tasks.splits import Split


@dataclass(frozen=True)
class Pathfinding(ReasoningTask):
    """Write the one shortest path between two nodes of a graph of shuffled edges.

    An output's path is the names in its first line, up to the first one that is the last node. `valid_shortest` is 1 if it
    is the shortest path, `valid_path` if it leads from the first node to the last along edges, and `prefix` is the share
    of the shortest path's steps that come before the first mistake.

    Attributes:
        min_steps, max_steps: of the shortest path.

    Raises:
        ValueError: not 1 <= min_steps <= max_steps <= 30.

    Example:
        >>> task = Pathfinding()
        >>> problem = task.problems("test", count=1)[0]
        >>> task.judge(problem, problem.completion).scores
        {'valid_shortest': 1.0, 'valid_path': 1.0, 'prefix': 1.0}
    """

    min_steps: int = pathfinding.MIN_STEPS
    max_steps: int = pathfinding.MAX_STEPS

    name: ClassVar[str] = "pathfinding"
    metrics: ClassVar[tuple[str, ...]] = ("valid_shortest", "valid_path", "prefix")
    max_new_tokens: ClassVar[int] = 160
    is_generated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        pathfinding.check_steps(self.min_steps, self.max_steps)

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        return generated_problems(self, split, data, count, lambda index: self._problem(split, index, seed))

    def _problem(self, split: Split, index: int, seed: int) -> Problem:
        one = pathfinding.example(split, index, seed, self.min_steps, self.max_steps)
        lines = [f"{origin} -> {end}" for origin, end in one.edges]
        question = "\n".join([*lines, f"shortest path from {one.path[0]} to {one.path[-1]}:\n"])
        path = " ".join(one.path)
        return Problem(f"{split}-{seed}-{index}", question, path, path, {"edges": [list(edge) for edge in one.edges]})

    def judge(self, problem: Problem, output: str) -> Verdict:
        shortest = problem.answer.split()
        path = _first_path(output, shortest[-1])
        if not path:
            return Verdict(None, dict.fromkeys(self.metrics, 0.0))
        edges = {(origin, end) for origin, end in problem.details["edges"]}
        follows_edges = all(step in edges for step in pairwise(path))
        is_valid = follows_edges and path[0] == shortest[0] and path[-1] == shortest[-1]
        return Verdict(
            " ".join(path),
            {
                "valid_shortest": float(path == shortest),
                "valid_path": float(is_valid),
                "prefix": _right_steps(path, shortest) / (len(shortest) - 1),
            },
        )


def _first_path(output: str, last: str) -> list[str]:
    """The names in the first line, up to the last node if it is there."""
    names = re.findall(r"\w+", first_line(output))
    return names[: names.index(last) + 1] if last in names else names


def _right_steps(path: list[str], shortest: list[str]) -> int:
    """How many steps of the shortest path a path takes before it leaves it."""
    right = [given == wanted for given, wanted in zip(path, shortest, strict=False)]
    nodes = right.index(False) if False in right else len(right)
    return max(nodes - 1, 0)
