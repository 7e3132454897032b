"""The definition: token after token. All other solvers approximate this one, or reproduce it faster."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from crosscurrent.recurrence.problem import Problem, Solution, SolverReport, check_count
from crosscurrent.recurrence.schedule import INITIAL, Stage
from crosscurrent.recurrence.steps import Steps


@dataclass(frozen=True)
class Sequential:
    """Solve one stage after another: T dependent steps for T tokens at a feedback interval of 1, T / B at B.

    Tokens that read nothing new share a step, so a prompt that is not recurrent, or a model without feedback, takes one.

    For training: T2MLR keeps keys and values of every step for the backward pass, memory that grows with T^2.

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
        if self.truncate is not None:
            check_count("truncate", self.truncate)

    def solve(self, problem: Problem) -> Solution:
        stages = self._stages(problem.plan.stages)
        if len(stages) == 1 or not problem.shares_weights:
            return self._solve(problem, stages)
        with Steps(len(stages), num_rows=problem.inputs[..., 0].numel() // len(stages)).active():
            return self._solve(problem, stages)

    def _solve(self, problem: Problem, stages: list[Stage]) -> Solution:
        plan = problem.plan
        # Split once: a slice per step would each send a gradient of full length back.
        widths = [stage.stop - stage.start for stage in stages]
        inputs, of_stream = problem.inputs.split(widths, dim=1), problem.of_stream.split(widths, dim=1)
        register, initial = problem.state.register, problem.initial()
        past = problem.core.start(keeps_entries=len(stages) > 1)
        outputs, states = [], []
        for stage, x, of_x in zip(stages, inputs, of_stream, strict=True):
            if self.truncate is not None and stage.start > 0 and stage.start % self.truncate == 0:
                register, past = register.detach(), problem.core.detach(past)
            read = register[:, None]  # within a stage no token can read another: one register serves the row
            if stage.any_initial:
                is_initial = (plan.source[:, stage.columns] == INITIAL)[..., None]
                read = torch.where(is_initial, initial[:, None], read)
            z = problem.fused(x, read, stage.columns, stage.any_fused, of_x)
            y, past = problem.core.run(z, stage.columns, past)
            carried = problem.carried(y, read, stage.columns)
            register = _last_written(carried, plan.writes[:, stage.columns], register)
            outputs.append(y)
            if problem.keeps_registers:
                states.append(carried)
        register = torch.where((plan.source_after[:, -1] == INITIAL)[:, None], initial, register)
        registers = problem.registers(torch.cat(states, dim=1)) if states else None
        report = SolverReport(self.name, len(stages), exact=True, converged=True, residuals=register.new_zeros(0))
        return Solution(torch.cat(outputs, dim=1), problem.final_state(register), past, report, registers)

    def _stages(self, stages: tuple[Stage, ...]) -> list[Stage]:
        """The plan's stages, cut at every column where the gradient is to be cut."""
        if self.truncate is None:
            return list(stages)
        cut: list[Stage] = []
        for stage in stages:
            first_cut = stage.start - stage.start % self.truncate + self.truncate
            edges = [stage.start, *range(first_cut, stage.stop, self.truncate), stage.stop]
            cut += [replace(stage, start=start, stop=stop) for start, stop in itertools.pairwise(edges)]
        return cut


def _last_written(carried: Tensor, writes: Tensor, register: Tensor) -> Tensor:
    columns = torch.arange(1, writes.shape[1] + 1, device=writes.device)
    last = (writes * columns).amax(dim=1)
    row = torch.arange(len(last), device=last.device)
    return torch.where((last > 0)[:, None], carried[row, last.clamp(min=1) - 1], register)
