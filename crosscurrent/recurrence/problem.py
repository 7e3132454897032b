"""What a solver is given, and what it returns. How to solve is the solver's own affair.

Shapes: B rows, T tokens of this call, D hidden_size.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from crosscurrent.recurrence.carry import Carry
from crosscurrent.recurrence.fuse import Fuse
from crosscurrent.recurrence.schedule import CARRIED, INITIAL, Plan
from crosscurrent.recurrence.state import RecurrentState

OnNonconvergence = Literal["record", "warn", "raise"]


def check_count(name: str, value: Any, at_least: int = 1) -> None:
    """Raise unless a solver's setting is an integer of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r} is not allowed: give an integer of at least {at_least}.")


def check_tolerance(tolerance: Any) -> None:
    """Raise unless it is None or a positive number."""
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 < tolerance < math.inf):
        raise ValueError(f"tolerance={tolerance!r} is not allowed: give a positive number, or None.")


def check_nonconvergence(action: Any, tolerance: float | None) -> None:
    """Raise unless it is known what to do if a tolerance is missed, and there is one to miss."""
    if action not in get_args(OnNonconvergence):
        allowed = ", ".join(map(repr, get_args(OnNonconvergence)))
        raise ValueError(f"on_nonconvergence={action!r} is not allowed: give one of {allowed}.")
    if action != "record" and tolerance is None:
        raise ValueError(f"on_nonconvergence={action!r} needs a tolerance to judge by: give one.")


class Core(Protocol):
    """A causal stack of layers whose attention sees the entries (keys and values) of earlier tokens.

    `past` holds those entries. It is opaque to solvers. `run` leaves the one it is given as it was, so that a range can
    be run again from it.

    Attributes:
        can_be_split: whether a call can be run in several ranges, each longer than one token. `Sequential` does not ask: it
            lets `start` raise.
    """

    @property
    def can_be_split(self) -> bool: ...

    def start(self, keeps_entries: bool) -> Any:
        """The entries before this call. `keeps_entries` is True if the call will be run in several ranges."""
        ...

    @property
    def learns(self) -> bool:
        """Whether its weights, or the entries before this call, have gradients."""
        ...

    def run(self, z: Tensor, columns: slice, past: Any) -> tuple[Tensor, Any]:
        """Outputs y [B, S, D] for z [B, S, D] of the given columns of the call, and the entries including them."""
        ...

    def by_columns(self, past: Any, first: int) -> "ColumnCore":
        """The columns from `first` on, to be run in any order against the entries of all of them. past: before `first`.

        Raises:
            ValueError: the architecture cannot do that.
        """
        ...

    def map(self, past: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """The entries with each of their floating-point tensors changed, always in the same order."""
        ...

    def detach(self, past: Any) -> Any:
        """The same entries without gradient history."""
        ...


class ColumnCore(Protocol):
    """A core that keeps entries for all columns of a call, and computes any of them from the newest of those before it."""

    def run(self, z: Tensor, columns: Tensor) -> Tensor:
        """Outputs [B, S, D] for z [B, S, D] of the given columns ([S] int64, ascending), whose entries become the newest.

        The first run is for all columns.
        """
        ...


@dataclass(frozen=True)
class KnownStates:
    """States [B, T, D] that are known before a problem is solved, where the mask [B, T, 1] says so."""

    mask: Tensor
    states: Tensor


@dataclass(frozen=True)
class Problem:
    """The coupled equations for the known tokens of one call.

        z_t = fuse(x_t, r_sigma(t)),   y_t = core(z_1..z_t),   r_t = carry(y_t, r_sigma(t))

    Attributes:
        inputs: x [B, T, D].
        plan: sigma, worked out for these tokens.
        state: what the call continues from.
        fuse, core, carry: the architecture. `fuse` is None only if the plan fuses no token.
        keeps_registers: whether the solution is to hold the register after every column, so that tokens can be taken back.
        known: states that are known beforehand.
        state_noise: standard deviation of the noise on each carried state, as a share of the state's root mean square.
            `Sequential` alone solves such a problem.
        shares_weights: whether steps and passes find the same weights, so that they can share what is made of them. Not if
            the weights are sharded or offloaded, and come and go with every call of their module.
        of_stream: [B, T, N] what the fusion makes of the inputs alone, for all steps and passes; N = 0 if it takes no part.
            None: it is made.
    """

    inputs: Tensor
    plan: Plan
    state: RecurrentState
    fuse: Fuse | None
    core: Core
    carry: Carry
    keeps_registers: bool = False
    shares_weights: bool = True
    known: KnownStates | None = None
    state_noise: float = 0.0
    of_stream: Tensor = field(default=None, kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.of_stream is None:  # now: a solver may begin with passes without gradient
            object.__setattr__(self, "of_stream", self._of_stream())

    def _of_stream(self) -> Tensor:
        if self.fuse is None or not (torch.is_grad_enabled() or any(stage.any_fused for stage in self.plan.stages)):
            return self.inputs[..., :0]
        return self.fuse(self.inputs)

    def fused(
        self,
        x: Tensor,
        r: Tensor,
        columns: slice | Tensor,
        any_fused: bool = True,
        of_stream: Tensor | None = None,
    ) -> Tensor:
        """z of the given columns (a range, or [S] int64), from their inputs x and what they read.

        With gradients on, the fusion takes part even if no token is fused (`any_fused`): data-parallel training needs
        every parameter to have a gradient, be it zero. `of_stream`: those columns of it, if they are at hand.
        """
        if self.fuse is None or not (any_fused or torch.is_grad_enabled()):
            return x
        of_stream = self.of_stream[:, columns] if of_stream is None else of_stream
        if of_stream.shape[-1] == 0:
            return x
        return torch.where(self.plan.fused[:, columns, None], self.fuse(x, r, of_stream), x)

    def carried(self, y: Tensor, r: Tensor, columns: slice | Tensor) -> Tensor:
        """The states of the given columns."""
        states = self.carry(y, r, self.plan.fused[:, columns, None])
        if self.state_noise:
            size = states.detach().square().mean(dim=-1, keepdim=True).sqrt()
            states = states + self.state_noise * size * torch.randn_like(states)
        return states

    @property
    def learns(self) -> bool:
        """Whether anything that the solution depends on has a gradient."""
        own = (self.inputs, self.of_stream, self.state.register, self.initial())
        return self.core.learns or any(tensor.requires_grad for tensor in own)

    def with_known(self, states: Tensor) -> Tensor:
        """The states [B, T, D], with those that are known beforehand in their places."""
        return states if self.known is None else torch.where(self.known.mask, self.known.states, states)

    def initial(self) -> Tensor:
        """[B, D] the state read where there is no predecessor."""
        register = self.state.register
        if self.fuse is None:
            return torch.zeros_like(register)
        return self.fuse.initial_state(register.shape[0]).to(register.dtype)

    def pick(self, source: Tensor, states: Tensor) -> Tensor:
        """The states [B, N, D] named by `source` [B, N], out of `states` [B, T, D] of this call's columns."""
        index = source.clamp(min=0)[..., None].expand(-1, -1, states.shape[-1])
        picked = states.gather(1, index)
        picked = torch.where((source == CARRIED)[..., None], self.state.register[:, None], picked)
        return torch.where((source == INITIAL)[..., None], self.initial()[:, None], picked)

    def final_state(self, register: Tensor) -> RecurrentState:
        return RecurrentState(register, self.plan.final_num_tokens, self.plan.final_segment)

    def registers(self, states: Tensor) -> Tensor | None:
        """[B, T, D] the register after each column, if they are to be kept, from the columns' states [B, T, D]."""
        return self.pick(self.plan.source_after, states) if self.keeps_registers else None


@dataclass(frozen=True)
class SolverReport:
    """How a solve went.

    Attributes:
        solver: its name.
        iterations: parallel passes (Jacobi; Sweeps, its sweeps and the passes after them) or dependent steps (Sequential).
        exact: the result is the definition's, up to rounding.
        converged: True if exact or the last residual is within the tolerance, False if it is not, None if there was no
            tolerance to judge by.
        residuals: [iterations] relative change of the states in each pass, the largest over the rows; empty if exact
            from the start. Row b's change is ||r_new - r_old|| / ||r_new|| over the states that a token may read.
    """

    solver: str
    iterations: int
    exact: bool
    converged: bool | None
    residuals: Tensor


@dataclass(frozen=True)
class Solution:
    """Outputs y [B, T, D], the final state, the core's entries, the report, and the registers if they were asked for."""

    outputs: Tensor
    state: RecurrentState
    past: Any
    report: SolverReport
    registers: Tensor | None


class ConvergenceError(RuntimeError):
    """A solver asked to raise did not reach its tolerance."""


def answer_nonconvergence(report: SolverReport, action: OnNonconvergence) -> None:
    """Do what the caller chose for a solve that missed its tolerance."""
    if report.converged is not False or action == "record":
        return
    message = (
        f"{report.solver} did not converge in {report.iterations} iterations: the last residual is "
        f"{report.residuals[-1].item():.3g}. Allow more iterations, or use Sequential()."
    )
    if action == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, stacklevel=2)
