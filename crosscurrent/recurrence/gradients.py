"""How gradients flow through a solution that was found by iterating: which of the passes carry them, and what stands in for
the others.

Shapes: B rows, T tokens of a call, D hidden_size.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from crosscurrent.recurrence.iteration import Final, Iterate, Iteration, relative_change
from crosscurrent.recurrence.problem import Problem, check_count, check_tolerance
from crosscurrent.suggestions import did_you_mean


class GradientRule(Protocol):
    """The last passes of a solve, run with gradient. A new rule joins by a line in `GRADIENT_RULES`."""

    name: ClassVar[str]

    @property
    def num_passes(self) -> int:
        """How many passes it runs itself."""
        ...

    def finish(self, iteration: Iteration, last: Iterate, num_passes: int) -> Final:
        """Run them, from the last iterate without gradient on."""
        ...


@dataclass(frozen=True)
class LastPasses:
    """The last K passes carry gradient (the paper's `d_backward`, arXiv 2607.15178). Outputs of older ones are constants.

    The carry that turns the last constant outputs into states is differentiated too; otherwise its norm would not learn
    with K = 1. With as many passes as the deepest document has stages this is full back-propagation through time.

    Each pass costs about two forward passes to differentiate, and keeps its activations.

    Args:
        passes: K.

    Raises:
        ValueError: passes is below 1, which would leave the recurrent weights untrained.

    Example:
        >>> LastPasses(passes=2)
        LastPasses(passes=2)
    """

    name: ClassVar[str] = "last_passes"
    passes: int = 4

    def __post_init__(self) -> None:
        check_count("passes", self.passes)

    @property
    def num_passes(self) -> int:
        return self.passes

    def finish(self, iteration: Iteration, last: Iterate, num_passes: int) -> Final:
        states = last.states(iteration.problem)
        residuals, past = [], None
        for _ in range(num_passes):
            last, past = iteration.run(states)
            new_states = last.states(iteration.problem)
            residuals.append(iteration.residual(new_states, states))
            states = new_states
        return Final(last.outputs, states, past, tuple(residuals))


@dataclass(frozen=True)
class Implicit:
    """The gradient of the fixed point itself, by the implicit function theorem (Bai et al., arXiv 1909.01377).

    One pass F is differentiated, at the solution. With s the states, l the loss and J = dF/ds, the gradient of the states
    obeys g = dl/ds + J^T g. In the backward pass this is solved by iteration, each term one product with J^T: a backward
    pass through that one pass, with respect to the states only, about as dear as a forward pass. The weights get their
    gradient once, in the end. Memory does not depend on how many iterations or terms there are.

    The gradient is exact, if the states are, after as many terms as the deepest document has stages less one. Second
    derivatives are refused by PyTorch. Where the last iterate is no solution yet, it is the gradient of neither it nor the
    solution.

    Args:
        iterations: at most so many terms. 0 is the one-step gradient, in which states are constants: then what only they
            depend on, the weight of a carry's norm, does not learn.
        tolerance: stop once the relative change of g, the largest over the rows, is below this. None: all terms.

    Raises:
        ValueError: iterations is below 0, or tolerance is not positive.

    Example:
        >>> Implicit(iterations=2)
        Implicit(iterations=2, tolerance=None)
    """

    name: ClassVar[str] = "implicit"
    iterations: int = 2
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations, at_least=0)
        check_tolerance(self.tolerance)

    @property
    def num_passes(self) -> int:
        return 1

    def finish(self, iteration: Iteration, last: Iterate, num_passes: int) -> Final:
        problem = iteration.problem
        with torch.no_grad():
            states = last.states(problem)
        states = states.detach().requires_grad_(torch.is_grad_enabled() and problem.learns)
        last, past = iteration.run(states)
        outputs, new_states = last.outputs, last.states(problem)
        residual = iteration.residual(new_states, states)
        num_terms = min(self.iterations, problem.plan.depth - 1)
        if outputs.requires_grad and num_terms > 0:
            adjoint = _Adjoint(num_terms, self.tolerance, problem.plan.writes, iteration.preconditioner(last))
            entries = _tensors(problem, past)  # later calls may read them, and send a gradient through them
            outputs, new_states, *entries = _AtFixedPoint.apply(adjoint, states, outputs, new_states, *entries)
            past = problem.core.map(past, lambda _: entries.pop(0))
        return Final(outputs, new_states, past, (residual,))


@dataclass(frozen=True)
class _Adjoint:
    """How g = dl/ds + J^T g is iterated.

    writes: [B, T] bool, the states that anything may read. precondition: turns a residual into a better correction.
    """

    num_terms: int
    tolerance: float | None
    writes: Tensor
    precondition: Callable[[Tensor], Tensor] | None

    def solve(self, product: Callable[[Tensor], Tensor], direct: Tensor) -> Tensor:
        """product: from g to dl/ds, through the outputs, plus J^T g. direct: what of dl/ds does not go through the pass."""
        gradient = direct
        for _ in range(self.num_terms):
            new = direct + product(gradient)
            if self.precondition is not None:
                new = gradient + self.precondition(new - gradient)
            change = relative_change(new, gradient, self.writes) if self.tolerance is not None else None
            gradient = new
            if change is not None and self.tolerance is not None and change.item() < self.tolerance:
                break
        return gradient


def _tensors(problem: Problem, past: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    problem.core.map(past, keep)
    return found


class _AtFixedPoint(torch.autograd.Function):
    """What one pass has made (outputs, states, entries) as it is; going back, the states' gradient is completed first.

    An ordinary node of the graph: the gradients of weights are made by the pass's own nodes behind it, once, so that
    hooks on them, of data-parallel wrappers for example, see what they always see.
    """

    @staticmethod
    def forward(ctx: Any, adjoint: _Adjoint, leaf: Tensor, *made: Tensor) -> tuple[Tensor, ...]:
        ctx.adjoint = adjoint
        ctx.save_for_backward(leaf, *made)
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in made)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaf, outputs, states, *entries = ctx.saved_tensors
        to_outputs, to_states, *to_entries = gradients
        direct = torch.zeros_like(states) if to_states is None else to_states
        others = [
            (made, gradient)
            for made, gradient in zip((outputs, *entries), (to_outputs, *to_entries), strict=True)
            if gradient is not None
        ]

        def product(gradient: Tensor) -> Tensor:
            made, sent = (states, *(pair[0] for pair in others)), (gradient, *(pair[1] for pair in others))
            (found,) = torch.autograd.grad(made, leaf, sent, retain_graph=True)
            return found

        return None, None, to_outputs, ctx.adjoint.solve(product, direct), *to_entries


GRADIENT_RULES: dict[str, Any] = {rule.name: rule for rule in (LastPasses, Implicit)}


def check_gradient(gradient: Any) -> None:
    """Raise unless it is a gradient rule."""
    if not isinstance(gradient, tuple(GRADIENT_RULES.values())):
        raise ValueError(
            f"gradient={gradient!r} is not allowed: give an object such as cc.Implicit(iterations=2) or "
            "cc.LastPasses(passes=4)."
        )


def gradient_to_dict(gradient: GradientRule) -> dict[str, Any]:
    """A gradient rule as plain data.

    Example:
        >>> gradient_to_dict(LastPasses(passes=2))
        {'name': 'last_passes', 'passes': 2}
    """
    return {"name": gradient.name} | asdict(gradient)  # type: ignore[call-overload]


def gradient_from_dict(data: dict[str, Any]) -> GradientRule:
    """The gradient rule that `data` describes.

    Raises:
        ValueError: the name or a setting is unknown, or a setting's value is not allowed.
    """
    rule: GradientRule = from_settings("gradient", GRADIENT_RULES, data)
    return rule


def from_settings(what: str, known: dict[str, Any], data: dict[str, Any]) -> Any:
    """The object of one of the classes `known` that `data`, its name and settings, describes."""
    settings = dict(data)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{what} name {name!r} is not known: give one of {sorted(known)}.{did_you_mean(name, known)}")
    fields = known[name].__dataclass_fields__
    for key in settings:
        if key not in fields:
            raise ValueError(f"{name} has no setting {key!r}: it has {sorted(fields)}.{did_you_mean(key, fields)}")
    return known[name](**settings)
