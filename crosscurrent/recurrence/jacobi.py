"""T2MLR's parallel training: guess all states, compute all tokens from the guess, repeat."""

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from crosscurrent.recurrence.gradients import GradientRule, LastPasses, check_gradient
from crosscurrent.recurrence.iteration import (
    Guess,
    Iteration,
    Stopping,
    can_scan,
    forget_constant_weights,
)
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
class Jacobi:
    """Jacobi iteration over the states of all tokens (arXiv 2607.15178).

    The guess is one pass without recurrence, which is not counted. Each iteration then fuses every token with the
    state guessed for the position that it reads, runs the core over the whole sequence and replaces the guess. By
    causality k iterations are exact on the first k stages of a document, so no more are run than the deepest document has;
    a call of one token, or without a recurrent token, is exact after one. Columns before the first recurrent token of any
    row are computed once.

    Args:
        iterations: D, at most this many fused passes (the paper's `d_forward`).
        backward_iterations: K, the last K of them carry gradient (`d_backward`): short for `gradient=LastPasses(K)`.
            None: 4, or all if there are fewer, unless `gradient` is given.
        tolerance: stop early once the relative change of the states, the largest over the batch, is below this. The
            passes that carry gradient are always run. None: run all iterations.
        on_nonconvergence: what to do if the tolerance is not reached: "record" it in the report, "warn", or "raise".
        gradient: how gradients flow: `LastPasses`, or `Implicit`, which differentiates the last of the D passes.
        scan: carry-scan Jacobi. With the outputs of a pass frozen, T2MLR's r_t = RMSNorm(y_t + r_{t-1}) is, but for the
            norm's scale, a linear recursion: it is solved to the end of each document at once, with the scale that the norm
            had, and then normalised again. Costs some elementwise work per pass; exact after no more passes than without.
            `Implicit` solves its equation likewise.
        guess: "pass", or "inputs": the guess is made from the core's inputs in place of its outputs, and costs no pass.

    Raises:
        ValueError: iterations below 1, backward_iterations outside 1..iterations or given beside a gradient, a tolerance
            that is not positive, or another setting that is not allowed.

    Example:
        >>> Jacobi(iterations=8, backward_iterations=2).backward_iterations
        2
        >>> Jacobi(iterations=3, gradient=LastPasses(2)) == Jacobi(3, 2)
        True
    """

    name: ClassVar[str] = "jacobi"
    iterations: int = 16
    backward_iterations: int | None = None
    tolerance: float | None = None
    on_nonconvergence: OnNonconvergence = "record"
    gradient: GradientRule | None = None
    scan: bool = False
    guess: Guess = "pass"

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)
        if self.gradient is not None:
            self._take_gradient()
        elif self.backward_iterations is None:
            object.__setattr__(self, "backward_iterations", min(4, self.iterations))
        if self.backward_iterations is not None:
            check_count(
                "backward_iterations", self.backward_iterations
            )  # 0 would leave the recurrent weights untrained
            if self.backward_iterations > self.iterations:
                raise ValueError(
                    f"backward_iterations={self.backward_iterations} is not allowed: give 1 to "
                    f"iterations={self.iterations}."
                )
        if not isinstance(self.scan, bool):
            raise ValueError(f"scan={self.scan!r} is not allowed: give True or False.")
        check_tolerance(self.tolerance)
        check_nonconvergence(self.on_nonconvergence, self.tolerance)
        if self.guess not in get_args(Guess):
            raise ValueError(
                f"guess={self.guess!r} is not allowed: give one of {', '.join(map(repr, get_args(Guess)))}."
            )

    def _take_gradient(self) -> None:
        check_gradient(self.gradient)
        if self.backward_iterations is not None:
            raise ValueError(
                f"backward_iterations={self.backward_iterations} is short for gradient=LastPasses(...), and "
                f"gradient={self.gradient} is given as well: leave one of them out."
            )
        if isinstance(self.gradient, LastPasses):  # one way to write one thing
            object.__setattr__(self, "backward_iterations", self.gradient.passes)
            object.__setattr__(self, "gradient", None)

    @property
    def rule(self) -> GradientRule:
        """How gradients flow."""
        return self.gradient if self.gradient is not None else LastPasses(self.backward_iterations or 1)

    def solve(self, problem: Problem) -> Solution:
        return solve_behind_prefix(problem, self._solve)

    def _solve(self, problem: Problem) -> Solution:
        iteration, depth = Iteration(problem, self.scan and can_scan(problem)), problem.plan.depth
        stopping = Stopping(self.name, self.tolerance, self.on_nonconvergence)
        num_passes = min(self.iterations, depth)
        num_finishing = min(self.rule.num_passes, num_passes)
        residuals: list[Tensor] = []
        with torch.no_grad():
            last = iteration.first(self.guess)
            states = last.states(problem)
            for _ in range(num_passes - num_finishing):
                last, _ = iteration.run(states)
                new_states = last.states(problem)
                residuals.append(iteration.residual(new_states, states))
                states = new_states
                if stopping.is_reached(residuals[-1]):
                    break
        forget_constant_weights(problem.inputs.device)
        final = self.rule.finish(iteration, last, num_finishing)
        exact = len(residuals) + len(final.residuals) >= depth
        return stopping.conclude(problem, final, residuals, exact)
