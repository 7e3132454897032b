"""Tokens before the first recurrent one of their document need no iterating: they are computed once, with their gradient.

Prompts that are not recurrent, as in fine-tuning on answers, are most of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crosscurrent.recurrence.problem import ColumnCore, Core, KnownStates, Problem, Solution


def solve_behind_prefix(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """Solve a problem by `solve`, given only the columns from the first recurrent one on, if a call can be split.

    Rows and documents whose own first recurrent token comes later are given the states that it reads: so each is solved as
    it would be alone.
    """
    first, plan = problem.plan.first_fused, problem.plan
    if plan.leading_stop == 0 or not problem.core.can_be_split:
        return solve(problem)
    columns = slice(0, first)
    past, register = problem.core.start(keeps_entries=True), problem.state.register
    outputs = states = problem.inputs[:, columns]
    if first > 0:
        outputs, past = problem.core.run(outputs, columns, past)
        states = problem.carried(outputs, torch.zeros_like(outputs), columns)
        register = problem.pick(plan.source_after[:, first - 1 : first], states)[:, 0]
    rest = replace(
        problem,
        inputs=problem.inputs[:, first:],
        plan=plan.behind(first),
        state=replace(problem.state, register=register),
        core=CoreBehindPrefix(problem.core, first, plan.num_tokens, past),
        known=_known_states(problem, first, past),
        of_stream=problem.of_stream[:, first:],
    )
    solution = solve(rest)
    registers = solution.registers
    if registers is not None and first > 0:
        registers = torch.cat([problem.pick(plan.source_after[:, columns], states), registers], dim=1)
    outputs = torch.cat([outputs, solution.outputs], dim=1) if first > 0 else solution.outputs
    return replace(solution, outputs=outputs, registers=registers)


def _known_states(problem: Problem, first: int, past: Any) -> KnownStates | None:
    """The states of the leading tokens from column `first` on, if any of them is read."""
    plan, columns = problem.plan, slice(first, problem.plan.leading_stop)
    if columns.start >= columns.stop:
        return None
    outputs, _ = problem.core.run(problem.inputs[:, columns], columns, past)
    mask = plan.leading[:, columns, None]
    states = problem.carry(outputs, torch.zeros_like(outputs), torch.zeros_like(mask))
    after = plan.num_tokens - columns.stop
    pad = torch.nn.functional.pad
    return KnownStates(pad(mask, (0, 0, 0, after)), pad(states, (0, 0, 0, after)))


@dataclass(frozen=True)
class CoreBehindPrefix:
    """A core whose call begins with column `first`, with the entries of the columns before it."""

    core: Core
    first: int
    num_tokens: int
    past: Any

    can_be_split = False

    @property
    def learns(self) -> bool:
        return self.core.learns

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
