"""Sweeps over chunks: every chunk of a row at once, but inside of each, token after token."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from crosscurrent.recurrence.gradients import GradientRule, LastPasses, check_gradient
from crosscurrent.recurrence.iteration import Iterate, Iteration, Stopping, forget_constant_weights
from crosscurrent.recurrence.prefix import solve_behind_prefix
from crosscurrent.recurrence.problem import (
    OnNonconvergence,
    Problem,
    Solution,
    check_count,
    check_nonconvergence,
    check_tolerance,
)


@dataclass(frozen=True)
class Sweeps:
    """Columns j, j + C, j + 2C, ... are computed in parallel, for j = 0 .. C - 1 in turn, each from the newest states.

    A first pass without recurrence makes states, and keys and values of every layer, for all columns. A sweep then makes all
    of them anew, C dependent steps of T / C tokens each: a chunk of C tokens runs C exact steps from what the last sweep has
    left at its edge, against the newest keys and values. So a sweep costs the arithmetic of one pass and carries a state
    over C tokens where a Jacobi pass carries it over one; m sweeps are exact on the first m chunks. A last pass over all
    columns follows, the one that the gradient rule differentiates.

    With chunks of two and one sweep this is the interleaved refinement of the Latent Recurrent Transformer.

    Needs masks that can be cut to single columns (attention 'sdpa' or 'eager') and no gradient checkpointing. Dropout draws
    other features in the sweeps than in the last pass.

    Args:
        chunk_size: C.
        sweeps: m, at most so many.
        tolerance, on_nonconvergence: as in `Jacobi`.
        gradient: how gradients flow: `LastPasses(K)` or `Implicit`, whose passes come after the sweeps.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> Sweeps(chunk_size=2, sweeps=1).gradient
        LastPasses(passes=1)
    """

    name: ClassVar[str] = "sweeps"
    chunk_size: int = 16
    sweeps: int = 2
    tolerance: float | None = None
    on_nonconvergence: OnNonconvergence = "record"
    gradient: GradientRule = field(default_factory=lambda: LastPasses(passes=1))

    def __post_init__(self) -> None:
        check_count("chunk_size", self.chunk_size)
        check_count("sweeps", self.sweeps)
        check_tolerance(self.tolerance)
        check_nonconvergence(self.on_nonconvergence, self.tolerance)
        check_gradient(self.gradient)

    def solve(self, problem: Problem) -> Solution:
        return solve_behind_prefix(problem, self._solve)

    def _solve(self, problem: Problem) -> Solution:
        iteration, depth = Iteration(problem), problem.plan.depth
        stopping = Stopping(self.name, self.tolerance, self.on_nonconvergence)
        num_chunks = -(-problem.plan.num_tokens // self.chunk_size)
        residuals: list[Tensor] = []
        reads_nothing = depth == 1  # no token reads another's state
        last = iteration.first("inputs") if reads_nothing else self._sweep(iteration, stopping, num_chunks, residuals)
        forget_constant_weights(problem.inputs.device)
        final = self.gradient.finish(iteration, last, min(self.gradient.num_passes, depth))
        exact = len(residuals) >= num_chunks or len(final.residuals) >= depth
        return stopping.conclude(problem, final, residuals, exact)

    def _sweep(self, iteration: Iteration, stopping: Stopping, num_chunks: int, residuals: list[Tensor]) -> Iterate:
        """Run the sweeps, adding to the residuals, and return what they end with."""
        problem = iteration.problem
        core, plan = problem.core.by_columns(problem.core.start(keeps_entries=True), 0), problem.plan
        with torch.no_grad():
            all_columns = torch.arange(plan.num_tokens, device=problem.inputs.device)
            guess = Iterate(
                core.run(problem.inputs, all_columns), torch.zeros_like(problem.inputs), torch.zeros_like(plan.fused)
            )
            states = guess.states(problem)
            outputs, reads = guess.outputs.clone(), torch.zeros_like(states)
            for _ in range(min(self.sweeps, num_chunks)):
                old_states, states = states, states.clone()
                for offset in range(min(self.chunk_size, plan.num_tokens)):
                    columns = all_columns[offset :: self.chunk_size]
                    read = problem.pick(plan.source[:, columns], states)
                    y = core.run(problem.fused(problem.inputs[:, columns], read, columns), columns)
                    outputs[:, columns], reads[:, columns] = y, read
                    states[:, columns] = problem.carried(y, read, columns)
                residuals.append(iteration.residual(states, old_states))
                if stopping.is_reached(residuals[-1]):
                    break
        return Iterate(outputs, reads, plan.fused)
