"""What the solvers that start from a guess have in common: a pass over all tokens, its residual, when to stop.

Shapes: B rows, T tokens of a call, D hidden_size.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from crosscurrent.recurrence.carry import ResidualCarry
from crosscurrent.recurrence.problem import (
    OnNonconvergence,
    Problem,
    Solution,
    SolverReport,
    answer_nonconvergence,
)
from crosscurrent.recurrence.scan import change_of_reads

ALL = slice(None)  # columns of a call
Guess = Literal["pass", "inputs"]


@dataclass(frozen=True)
class Iterate:
    """Outputs y and what was read r, both [B, T, D]; the states follow from them.

    fused: [B, T] bool, the tokens that read anything.
    """

    outputs: Tensor
    read: Tensor
    fused: Tensor

    def states(self, problem: Problem) -> Tensor:
        """[B, T, D], with gradient if that is on and y, r or the carry have one."""
        return problem.with_known(problem.carry(self.outputs, self.read, self.fused[..., None]))


@dataclass(frozen=True)
class Final:
    """What a gradient rule makes of the last passes: outputs y and states [B, T, D], the core's entries, residuals."""

    outputs: Tensor
    states: Tensor
    past: Any
    residuals: tuple[Tensor, ...]


@dataclass(frozen=True)
class Iteration:
    """The map from states to better states whose fixed point is the solution.

    Args:
        problem: what is solved.
        scan: with the outputs y of a pass frozen, solve the carry's own recursion along the tokens at once
            (`ResidualCarry`), instead of moving it on by one token.
    """

    problem: Problem
    scan: bool = False

    @torch.no_grad()
    def first(self, guess: Guess) -> Iterate:
        """The guess: a pass without recurrence, or, for nothing, the inputs in place of the outputs.

        The pass is left out if no token reads a state of this call. What leading tokens compute owes nothing to a guess: if
        that is not known already, a pass tells it.
        """
        problem, plan = self.problem, self.problem.plan
        outputs, none = problem.inputs.detach(), torch.zeros_like(problem.inputs)
        needs_leading = plan.leading_stop > 0 and problem.known is None
        if plan.depth > 1 and (guess == "pass" or needs_leading):
            passed, _ = problem.core.run(problem.inputs, ALL, problem.core.start(keeps_entries=False))
            outputs = passed if guess == "pass" else torch.where(plan.leading[..., None], passed, outputs)
        iterate = Iterate(outputs, none, torch.zeros_like(plan.fused))
        if not self.scan or plan.depth == 1:
            return iterate
        states = iterate.states(problem)
        return self.scanned(Iterate(outputs, problem.pick(plan.source, states), plan.fused), states)

    def run(self, states: Tensor) -> tuple[Iterate, Any]:
        """One fused pass, and the core's entries after it."""
        problem = self.problem
        read = problem.pick(problem.plan.source, problem.with_known(states))
        z = problem.fused(problem.inputs, read, ALL)
        outputs, past = problem.core.run(z, ALL, problem.core.start(keeps_entries=False))
        iterate = Iterate(outputs, read, problem.plan.fused)
        return (self.scanned(iterate, states) if self.scan else iterate), past

    @torch.no_grad()
    def _decay(self, iterate: Iterate) -> tuple[Tensor, Tensor]:
        states = iterate.states(self.problem)
        carry: Any = self.problem.carry
        return states, carry.decay(iterate.outputs, iterate.read, iterate.fused[..., None], states)

    def scanned(self, iterate: Iterate, old_states: Tensor) -> Iterate:
        """What was read, as it would be if the carry's recursion had run on to the end of each document.

        Where a token has read what is exact nothing changes, and so neither do gradients: the correction is a constant.
        """
        with torch.no_grad():
            states, decay = self._decay(iterate)
            correction = change_of_reads(self.problem.plan, states - old_states, decay)
        return replace(iterate, read=iterate.read + correction)

    def preconditioner(self, iterate: Iterate) -> Callable[[Tensor], Tensor] | None:
        """The transpose of that scan, for the adjoint equation: from a residual [B, T, D] to a correction. None: none."""
        if not self.scan or getattr(self.problem.carry, "detach_residual", True):
            return None
        plan, known = self.problem.plan, self.problem.known
        _, decay = self._decay(iterate)

        def transposed(residual: Tensor) -> Tensor:
            with torch.enable_grad():
                change = residual.detach().requires_grad_()
                read = change_of_reads(plan, change, decay)
            (found,) = torch.autograd.grad(read, change, decay * residual)
            return residual + (found if known is None else torch.where(known.mask, 0, found))

        return transposed

    def residual(self, new: Tensor, old: Tensor) -> Tensor:
        """The relative change of the states, the largest over the rows."""
        return relative_change(new, old, self.problem.plan.writes)


@torch.no_grad()
def relative_change(new: Tensor, old: Tensor, counted: Tensor) -> Tensor:
    """max over rows of ||new - old|| / ||new||, over the columns counted ([B, T] bool)."""
    columns = counted[..., None]
    change = torch.where(columns, new - old, 0).float().flatten(1).norm(dim=1)
    size = torch.where(columns, new, 0).float().flatten(1).norm(dim=1)
    return (change / size.clamp(min=torch.finfo(torch.float32).tiny)).max()


@dataclass(frozen=True)
class Stopping:
    """When a solver may stop early, and what happens if it does not get there."""

    solver: str
    tolerance: float | None
    on_nonconvergence: OnNonconvergence

    def is_reached(self, residual: Tensor) -> bool:
        return self.tolerance is not None and residual.item() < self.tolerance

    def conclude(self, problem: Problem, final: Final, residuals: list[Tensor], exact: bool) -> Solution:
        """The solution with its report, if that is good enough for the caller."""
        residuals = residuals + list(final.residuals)
        converged = True if exact else None
        if not exact and self.tolerance is not None:
            converged = residuals[-1].item() < self.tolerance
        compared = torch.stack(residuals) if problem.plan.depth > 1 else residuals[0].new_zeros(0)
        report = SolverReport(self.solver, len(residuals), exact, converged, compared)
        answer_nonconvergence(report, self.on_nonconvergence)
        register = problem.pick(problem.plan.source_after[:, -1:], final.states)[:, 0]
        registers = problem.registers(final.states)
        return Solution(final.outputs, problem.final_state(register), final.past, report, registers)


def forget_constant_weights(device: torch.device) -> None:
    """Under autocast, weights that were cast without gradient must not serve the passes with one."""
    if torch.is_autocast_enabled(device.type):
        torch.clear_autocast_cache()


def can_scan(problem: Problem) -> bool:
    """Whether there is a recursion to scan. A warning says so if there is none."""
    if isinstance(problem.carry, ResidualCarry):
        return True
    warnings.warn(
        f"scan=True has no effect: the carry {type(problem.carry).__name__} keeps nothing of the state that was read, so "
        "there is nothing to scan. It is for carries that add it to the output, as T2MLR's; leave scan=False.",
        stacklevel=2,
    )
    return False
