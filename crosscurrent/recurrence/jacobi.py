"""T2MLR's parallel training: guess all states, compute all tokens from the guess, repeat."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from crosscurrent.recurrence.problem import (
    OnNonconvergence,
    Problem,
    Solution,
    SolverReport,
    answer_nonconvergence,
    check_count,
)

_ALL = slice(None)  # columns of a call


@dataclass(frozen=True)
class Jacobi:
    """Jacobi iteration over the states of all tokens (arXiv 2607.15178).

    The guess is one pass without recurrence, which is not counted. Each iteration then fuses every token with the
    state guessed for the position that it reads, runs the core over the whole sequence and replaces the guess. By
    causality k iterations are exact on the first k stages of a document, so no more are run than the deepest document has;
    a call of one token, or without a recurrent token, is exact after one.

    Args:
        iterations: D, at most this many fused passes (the paper's `d_forward`).
        backward_iterations: K, the last K of them carry gradient (`d_backward`). Outputs of older passes are constants;
            the carry that turns the last of them into states is differentiated too.
        tolerance: stop early once the relative change of the states, the largest over the batch, is below this. The
            K passes that carry gradient are always run. None: run all iterations.
        on_nonconvergence: what to do if the tolerance is not reached: "record" it in the report, "warn", or "raise".

    Raises:
        ValueError: iterations below 1, backward_iterations outside 1..iterations, or a tolerance that is not positive.

    Example:
        >>> Jacobi(iterations=8, backward_iterations=2).backward_iterations
        2
    """

    name: ClassVar[str] = "jacobi"
    iterations: int = 16
    backward_iterations: int = 4
    tolerance: float | None = None
    on_nonconvergence: OnNonconvergence = "record"

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)
        check_count("backward_iterations", self.backward_iterations)  # 0 would leave the recurrent weights untrained
        if self.backward_iterations > self.iterations:
            raise ValueError(
                f"backward_iterations={self.backward_iterations} is not allowed: give 1 to iterations={self.iterations}."
            )
        if self.tolerance is not None and not (isinstance(self.tolerance, int | float) and self.tolerance > 0):
            raise ValueError(f"tolerance={self.tolerance!r} is not allowed: give a positive number, or None.")
        if self.on_nonconvergence not in get_args(OnNonconvergence):
            allowed = ", ".join(map(repr, get_args(OnNonconvergence)))
            raise ValueError(f"on_nonconvergence={self.on_nonconvergence!r} is not allowed: give one of {allowed}.")
        if self.on_nonconvergence != "record" and self.tolerance is None:
            raise ValueError(f"on_nonconvergence={self.on_nonconvergence!r} needs a tolerance to judge by: give one.")

    def solve(self, problem: Problem) -> Solution:
        depth = problem.plan.depth
        iterations = min(self.iterations, depth)
        with_gradient = min(self.backward_iterations, iterations)
        guess = _first_guess(problem)
        residuals: list[Tensor] = []
        with torch.no_grad():
            states = guess.states(problem)
            for _ in range(iterations - with_gradient):
                guess, _ = _iterate(problem, states)
                new_states = guess.states(problem)
                residuals.append(_residual(new_states, states, problem.plan.writes))
                states = new_states
                if self.tolerance is not None and residuals[-1].item() < self.tolerance:
                    break
        if torch.is_autocast_enabled(problem.inputs.device.type):
            torch.clear_autocast_cache()  # weights cast without gradient must not serve the passes with one
        states = guess.states(problem)  # with gradient: so the carry's weights learn from even one backward iteration
        for _ in range(with_gradient):
            guess, past = _iterate(problem, states)
            new_states = guess.states(problem)
            residuals.append(_residual(new_states, states, problem.plan.writes))
            states = new_states
        register = problem.pick(problem.plan.source_after[:, -1:], states)[:, 0]
        report = self._report(residuals, depth)
        answer_nonconvergence(report, self.on_nonconvergence)
        return Solution(guess.outputs, problem.final_state(register), past, report, problem.registers(states))

    def _report(self, residuals: list[Tensor], depth: int) -> SolverReport:
        exact = len(residuals) >= depth
        converged = True if exact else None
        if not exact and self.tolerance is not None:
            converged = residuals[-1].item() < self.tolerance
        compared = torch.stack(residuals) if depth > 1 else residuals[0].new_zeros(0)
        return SolverReport(self.name, len(residuals), exact, converged, compared)


@dataclass(frozen=True)
class _Guess:
    """Outputs y and what was read r, both [B, T, D], of one pass; the states follow from them.

    fused: [B, T] bool, the tokens that read anything in that pass.
    """

    outputs: Tensor
    read: Tensor
    fused: Tensor

    def states(self, problem: Problem) -> Tensor:
        return problem.carry(self.outputs, self.read, self.fused[..., None])


@torch.no_grad()
def _first_guess(problem: Problem) -> _Guess:
    """The pass without recurrence. It is left out if no token reads a state of this call."""
    none = torch.zeros_like(problem.inputs)
    nobody = torch.zeros_like(problem.plan.fused)
    if problem.plan.depth == 1:
        return _Guess(none, none, nobody)
    outputs, _ = problem.core.run(problem.inputs, _ALL, problem.core.start(keeps_entries=False))
    return _Guess(outputs, none, nobody)


def _iterate(problem: Problem, states: Tensor) -> tuple[_Guess, Any]:
    """One fused pass, and the core's entries after it."""
    read = problem.pick(problem.plan.source, states)
    z = problem.fused(problem.inputs, read, _ALL)
    outputs, past = problem.core.run(z, _ALL, problem.core.start(keeps_entries=False))
    return _Guess(outputs, read, problem.plan.fused), past


@torch.no_grad()
def _residual(new: Tensor, old: Tensor, writes: Tensor) -> Tensor:
    counted = writes[..., None]
    change = torch.where(counted, new - old, 0).float().flatten(1).norm(dim=1)
    size = torch.where(counted, new, 0).float().flatten(1).norm(dim=1)
    return (change / size.clamp(min=torch.finfo(torch.float32).tiny)).max()
