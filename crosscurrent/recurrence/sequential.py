"""The definition: token after token. All other solvers approximate this one, or reproduce it faster."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from crosscurrent.recurrence.problem import Problem, Solution, SolverReport
from crosscurrent.recurrence.schedule import INITIAL


@dataclass(frozen=True)
class Sequential:
    """Solve one stage after another: T dependent steps for T tokens at a feedback interval of 1, T / B at B.

    Tokens that read nothing new share a step, so a prompt that is not recurrent, or a model without feedback, takes one.

    Args:
        truncate: back-propagate through at most about this many tokens: at every `truncate`-th column of a call the
            carried state and the core's entries are cut off from the gradient. None: full back-propagation through
            time.

    Raises:
        ValueError: truncate is not None and below 1.

    Example:
        >>> Sequential(truncate=128)
        Sequential(truncate=128)
    """

    name: ClassVar[str] = "sequential"
    truncate: int | None = None

    def __post_init__(self) -> None:
        if self.truncate is not None and self.truncate < 1:
            raise ValueError(f"truncate={self.truncate} is not allowed: give at least 1, or None for full gradients.")

    def solve(self, problem: Problem) -> Solution:
        plan = problem.plan
        stages = self._stages(plan.stages)
        register, initial = problem.state.register, problem.initial()
        past = problem.core.start(keeps_entries=len(stages) > 1)
        outputs = []
        for start, stop in stages:
            if self.truncate is not None and start > 0 and start % self.truncate == 0:
                register, past = register.detach(), problem.core.detach(past)
            read = _read(plan.source[:, start:stop], register, initial)
            z = problem.fused(problem.inputs[:, start:stop], read, start, stop)
            y, past = problem.core.run(z, start, stop, past)
            register = _last_written(problem.carried(y, read, start, stop), plan.writes[:, start:stop], register)
            outputs.append(y)
        register = _final_register(plan.final_source, register, initial)
        report = SolverReport(self.name, len(stages), exact=True, converged=True, residuals=register.new_zeros(0))
        return Solution(torch.cat(outputs, dim=1), problem.final_state(register), past, report)

    def _stages(self, stages: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        """The plan's stages, cut at every column where the gradient is to be cut."""
        if self.truncate is None:
            return list(stages)
        cuts: list[tuple[int, int]] = []
        for start, stop in stages:
            inner = range(start - start % self.truncate + self.truncate, stop, self.truncate)
            edges = [start, *inner, stop]
            cuts += itertools.pairwise(edges)
        return cuts


def _read(source: Tensor, register: Tensor, initial: Tensor) -> Tensor:
    """What each token of a stage reads: within a stage no token can read another, so it is one register per row."""
    is_initial = (source == INITIAL)[..., None]
    if not is_initial.any():
        return register[:, None]
    return torch.where(is_initial, initial[:, None], register[:, None])


def _last_written(carried: Tensor, writes: Tensor, register: Tensor) -> Tensor:
    columns = torch.arange(1, writes.shape[1] + 1, device=writes.device)
    last = (writes * columns).amax(dim=1)
    row = torch.arange(len(last), device=last.device)
    return torch.where((last > 0)[:, None], carried[row, last.clamp(min=1) - 1], register)


def _final_register(final_source: Tensor, register: Tensor, initial: Tensor) -> Tensor:
    return torch.where((final_source == INITIAL)[:, None], initial, register)
