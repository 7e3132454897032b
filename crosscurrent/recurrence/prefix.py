"""Columns before the first recurrent token of any row need no iterating: they are computed once.

Prompts that are not recurrent, as in fine-tuning on answers, are most of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crosscurrent.recurrence.problem import ColumnCore, Core, Problem, Solution


def solve_behind_prefix(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """Solve a problem by `solve`, given only the columns from the first recurrent one on, if a call can be split."""
    first = problem.plan.first_fused
    if first == 0 or not problem.core.can_be_split:
        return solve(problem)
    columns = slice(0, first)
    x, plan = problem.inputs[:, columns], problem.plan
    outputs, past = problem.core.run(x, columns, problem.core.start(keeps_entries=True))
    states = problem.carried(outputs, torch.zeros_like(outputs), columns)
    register = problem.pick(plan.source_after[:, first - 1 : first], states)[:, 0]
    rest = replace(
        problem,
        inputs=problem.inputs[:, first:],
        plan=plan.behind(first),
        state=replace(problem.state, register=register),
        core=CoreBehindPrefix(problem.core, first, plan.num_tokens, past),
    )
    solution = solve(rest)
    registers = solution.registers
    if registers is not None:
        registers = torch.cat([problem.pick(plan.source_after[:, columns], states), registers], dim=1)
    return replace(solution, outputs=torch.cat([outputs, solution.outputs], dim=1), registers=registers)


@dataclass(frozen=True)
class CoreBehindPrefix:
    """A core whose call begins with column `first`, with the entries of the columns before it."""

    core: Core
    first: int
    num_tokens: int
    past: Any

    can_be_split = False

    def start(self, keeps_entries: bool) -> Any:
        return self.past

    def run(self, z: Tensor, columns: slice, past: Any) -> tuple[Tensor, Any]:
        start, stop, _ = columns.indices(self.num_tokens - self.first)
        return self.core.run(z, slice(self.first + start, self.first + stop), past)

    def by_columns(self, past: Any, first: int) -> ColumnCore:
        return self.core.by_columns(past, self.first + first)

    def map(self, past: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return self.core.map(past, change)

    def detach(self, past: Any) -> Any:
        return self.core.detach(past)
