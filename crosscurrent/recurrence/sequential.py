"""The definition: token after token. All other solvers approximate this one, or reproduce it faster."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crosscurrent.recurrence.problem import Problem, Solution, SolverReport, check_count
from crosscurrent.recurrence.schedule import INITIAL, Stage
from crosscurrent.recurrence.steps import FEWEST_STEPS, Steps


@dataclass(frozen=True)
class Sequential:
    """Solve one stage after another: T dependent steps for T tokens at a feedback interval of 1, T / B at B.

    Tokens that read nothing new share a step, so a prompt that is not recurrent, or a model without feedback, takes one.

    For training: T2MLR keeps keys and values of every step for the backward pass, memory that grows with T^2.

    Args:
        truncate: back-propagate through at most about this many tokens: at every `truncate`-th column of a call the
            carried state and the core's entries are cut off from the gradient. None: full back-propagation through
            time.
        recompute_every: keep for the backward pass only what is carried past every so many columns, and compute the rest
            once more there: with about sqrt(T) columns, activations of 2 sqrt(T) columns in place of T. Gradients are the
            same. None: keep all.

    Raises:
        ValueError: truncate or recompute_every is not None and below 1.

    Example:
        >>> Sequential(truncate=128)
        Sequential(truncate=128, recompute_every=None)
    """

    name: ClassVar[str] = "sequential"
    truncate: int | None = None
    recompute_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("truncate", "recompute_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    def solve(self, problem: Problem) -> Solution:
        plan, steps = problem.plan, self._steps(problem)
        num_rows = plan.fused.numel() // len(steps) if len(steps) >= FEWEST_STEPS else None
        shared = Steps(num_rows) if len(steps) > 1 and problem.shares_weights else None
        carried = _Carried(problem.state.register, problem.core.start(keeps_entries=len(steps) > 1))
        initial = problem.initial()
        outputs: list[Tensor] = []
        states: list[Tensor] = []
        for segment in self._segments(steps):
            if self.truncate is not None and segment[0].stage.start > 0 and segment[0].stage.start % self.truncate == 0:
                carried = _Carried(carried.register.detach(), problem.core.detach(carried.past))
            run = partial(_run, problem, shared, segment, initial)
            is_kept = self.recompute_every is None or not torch.is_grad_enabled()
            carried, y, r = run(carried) if is_kept else checkpoint(run, carried, use_reentrant=False)
            outputs += y
            states += r
        register = torch.where((plan.source_after[:, -1] == INITIAL)[:, None], initial, carried.register)
        registers = problem.registers(torch.cat(states, dim=1)) if problem.keeps_registers else None
        report = SolverReport(self.name, len(steps), exact=True, converged=True, residuals=register.new_zeros(0))
        return Solution(torch.cat(outputs, dim=1), problem.final_state(register), carried.past, report, registers)

    def _steps(self, problem: Problem) -> list["_Step"]:
        stages = self._stages(problem.plan.stages)
        # Split once: a slice per step would each send a gradient of full length back.
        widths = [stage.stop - stage.start for stage in stages]
        inputs, of_stream = problem.inputs.split(widths, dim=1), problem.of_stream.split(widths, dim=1)
        return [_Step(*parts) for parts in zip(stages, inputs, of_stream, strict=True)]

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

    def _segments(self, steps: list["_Step"]) -> list[list["_Step"]]:
        """Steps between two places where the gradient is cut, or where activations are kept."""
        lengths = [length for length in (self.truncate, self.recompute_every) if length is not None]
        by_place = itertools.groupby(steps, key=lambda step: [step.stage.start // length for length in lengths])
        return [list(segment) for _, segment in by_place]


class _Step(NamedTuple):
    """A stage, its inputs, and what the fusion makes of them alone."""

    stage: Stage
    inputs: Tensor
    of_stream: Tensor


class _Carried(NamedTuple):
    """What goes from step to step: the register [B, D] and the core's entries."""

    register: Tensor
    past: Any


def _run(
    problem: Problem, shared: Steps | None, steps: list[_Step], initial: Tensor, carried: _Carried
) -> tuple[_Carried, list[Tensor], list[Tensor]]:
    """Some steps: what is carried after them, and the outputs and states of each."""
    plan = problem.plan
    register, past = carried
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    with shared.active() if shared is not None else nullcontext():
        for stage, x, of_x in steps:
            read = register[:, None]  # within a stage no token can read another: one register serves the row
            if stage.any_initial:
                is_initial = (plan.source[:, stage.columns] == INITIAL)[..., None]
                read = torch.where(is_initial, initial[:, None], read)
            z = problem.fused(x, read, stage.columns, stage.any_fused, of_x)
            y, past = problem.core.run(z, stage.columns, past)
            r = problem.carried(y, read, stage.columns)
            register = _last_written(r, plan.writes[:, stage.columns], register)
            outputs.append(y)
            if problem.keeps_registers:
                states.append(r)
    return _Carried(register, past), outputs, states


def _last_written(carried: Tensor, writes: Tensor, register: Tensor) -> Tensor:
    columns = torch.arange(1, writes.shape[1] + 1, device=writes.device)
    last = (writes * columns).amax(dim=1)
    row = torch.arange(len(last), device=last.device)
    return torch.where((last > 0)[:, None], carried[row, last.clamp(min=1) - 1], register)
