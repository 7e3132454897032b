"""What the dependent steps of a recurrence share: their weights.

A weight that T steps use would get its gradient as T thin matrix products and T additions of matrices of its size. Here
each step's backward pass only keeps the two factors, and one product makes the gradient when the last of them is there.
(With many rows there are several products, so that memory stays bounded.) And a weight that meets few rows in each step
costs mostly the time to bring it into the order that the kernel wants: on a CPU that is done once for all steps.

Shapes: a weight W [O, I], inputs x [..., I].
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscurrent.recurrence.backward_pass import PerBackwardPass

FEWEST_STEPS = 4  # for which a weight is worth reordering
_FEWEST_ELEMENTS = 2**17  # of a weight: smaller ones stay in the processor's cache, where their order matters little
_MOST_ROWS = 4096  # of kept factors, before they are multiplied

T = TypeVar("T")

_active: ContextVar["Steps | None"] = ContextVar("active_steps", default=None)


class Steps:
    """The steps of one recurrence. While it is active, `apply_linear` shares weights among them.

    Args:
        num_rows: of the inputs, in each step, if there are enough of them (`FEWEST_STEPS`) for weights to be reordered for;
            None: they stay as they are.

    Example:
        >>> linear, steps = nn.Linear(2, 3, bias=False), Steps(num_rows=1)
        >>> with steps.active():
        ...     total = sum(apply_linear(linear, torch.full((1, 2), float(t))).sum() for t in range(4))
        >>> total.backward()
        >>> linear.weight.grad.tolist()
        [[6.0, 6.0], [6.0, 6.0], [6.0, 6.0]]
    """

    def __init__(self, num_rows: int | None):
        self.num_rows = num_rows
        self._shared: dict[tuple[int, ...], SharedWeight] = {}
        self._prepared: dict[int, tuple[nn.Module, Any]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def shared(self, *weights: Tensor) -> "SharedWeight":
        """A weight, or several one below the other, for the products of all steps."""
        key = tuple(map(id, weights))
        if key not in self._shared:
            self._shared[key] = SharedWeight(weights, self.num_rows)
        return self._shared[key]

    def prepared(self, module: nn.Module, prepare: "Callable[[nn.Module, Steps], T]") -> T:
        """What `prepare` makes of a module, made once."""
        if id(module) not in self._prepared:
            self._prepared[id(module)] = module, prepare(module, self)
        found: T = self._prepared[id(module)][1]
        return found

    @property
    def is_current(self) -> bool:
        """Whether no weight has been changed or moved since it was first used."""
        return all(shared.is_current for shared in self._shared.values())


def apply_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """`linear(x)`, whose weight is shared by the steps of a recurrence.

    Whatever an adapter, a quantiser or an offloader has put in the layer's place or around it is called as it is.
    """
    steps = current_steps()
    if steps is None or not is_plain_linear(linear):
        found: Tensor = linear(x)
        return found
    plain: Any = linear
    product = steps.shared(plain.weight).product(x)
    return product if plain.bias is None else product + plain.bias.to(product.dtype)


def current_steps() -> Steps | None:
    """The recurrence in a step of which the code runs. Compiled code has no place for what a backward pass leaves aside."""
    return None if torch.compiler.is_compiling() else _active.get()


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether a layer is nothing but its weight and bias: no other class, no replaced forward, no hooks."""
    if type(linear) is not nn.Linear or "forward" in linear.__dict__:
        return False
    return not (linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks)


class SharedWeight:
    """One or several weights W, one below the other, ready for the products of all steps.

    Attributes:
        gate: a tensor of no size. An autograd function that uses the weight takes it as an input and gives it no gradient:
            so the weights' own gradient is made once all such functions have run backward.
    """

    def __init__(self, weights: tuple[Tensor, ...], num_rows: int | None):
        self.weights = weights  # held, so that their ids stay theirs
        self._seen = self._marks()
        device = weights[0].device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
        self.num_rows = num_rows
        self._factors = PerBackwardPass(_Factors)
        self.gate: Tensor = _Gate.apply(self._factors, *weights)
        self._forward: _Matrix | None = None
        self._backward: _Matrix | None = None

    def _marks(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self.weights]

    @property
    def is_current(self) -> bool:
        """Whether the weights are those that were seen first, unchanged."""
        return self._marks() == self._seen

    def product(self, x: Tensor) -> Tensor:
        """x W^T."""
        if not torch.is_grad_enabled():
            return self.forward(self.ready(x))
        found: Tensor = _Product.apply(self.ready(x), self.gate, self)
        return found

    def ready(self, x: Tensor) -> Tensor:
        """x in the dtype that products are computed in, as `forward` and `backward` want it."""
        return x.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T, without autograd."""
        if self._forward is None:
            self._forward = _Matrix(self._joined(), self.num_rows)
        return self._forward(x)

    def backward(self, gradient: Tensor, x: Tensor) -> Tensor:
        """From the gradient of `forward(x)` that of x. The weights' part is kept for the gate."""
        gradient = gradient.to(self.dtype)
        self.keep(gradient, x)
        if self._backward is None:
            self._backward = _Matrix(self._joined().T, self.num_rows)
        return self._backward(gradient)

    def keep(self, gradient: Tensor, x: Tensor) -> None:
        """Leave the weights' part of the gradient of `forward(x)` to the gate."""
        if self.gate.requires_grad:
            self._factors.value().keep(x.flatten(0, -2), gradient.flatten(0, -2))

    @torch.no_grad()
    def _joined(self) -> Tensor:
        joined = self.weights[0].detach() if len(self.weights) == 1 else torch.cat(self.weights)
        return joined.to(self.dtype)


class _Matrix:
    """A matrix W [O, I] that many thin inputs are multiplied by.

    Args:
        weight: W.
        num_rows: of the inputs, for which W is put in the order that oneDNN's kernel reads it in; None: W stays as it is.
    """

    def __init__(self, weight: Tensor, num_rows: int | None):
        is_reordered = num_rows is not None and _can_reorder(weight)
        if is_reordered:
            weight = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), num_rows)
        self.weight, self.is_reordered = weight, is_reordered

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_reordered:
            return F.linear(x, self.weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x.contiguous(), self.weight, None, "none", [], "")
        return product


def _can_reorder(weight: Tensor) -> bool:
    is_large = weight.numel() >= _FEWEST_ELEMENTS and weight.device.type == "cpu"
    if not is_large or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    has_bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(torch.backends.mkldnn.enabled) and (weight.dtype == torch.float32 or has_bfloat16)


class _Factors:
    """Inputs and output gradients of the steps whose backward pass has run."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._num_rows = 0
        self._sum: Tensor | None = None

    def keep(self, inputs: Tensor, gradients: Tensor) -> None:
        """inputs [N, I] and gradients [N, O] of one step."""
        self._inputs.append(inputs)
        self._gradients.append(gradients)
        self._num_rows += len(inputs)
        if self._num_rows >= _MOST_ROWS:
            self._multiply()

    def _multiply(self) -> None:
        product = torch.cat(self._gradients).T @ torch.cat(self._inputs)
        self._sum = product if self._sum is None else self._sum + product
        self._inputs, self._gradients, self._num_rows = [], [], 0

    def total(self) -> Tensor | None:
        """The sum of outer products [O, I] of all that was kept."""
        if self._inputs:
            self._multiply()
        return self._sum


class _Gate(torch.autograd.Function):
    """A tensor of no size that depends on the weights. Its backward pass runs when all steps have run theirs."""

    @staticmethod
    def forward(ctx: Any, factors: PerBackwardPass[_Factors], *weights: Tensor) -> Tensor:
        ctx.factors, ctx.sizes, ctx.dtype = factors, [len(weight) for weight in weights], weights[0].dtype
        ctx.set_materialize_grads(False)
        return weights[0].new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *_: Any) -> Any:
        factors = ctx.factors.take()
        total = None if factors is None else factors.total()
        if total is None:
            return None, *(None for _ in ctx.sizes)
        parts = total.to(ctx.dtype).split(ctx.sizes)
        return None, *(part if asked else None for part, asked in zip(parts, ctx.needs_input_grad[1:], strict=True))


class _Product(torch.autograd.Function):
    """x W^T, whose backward pass leaves the weight's part to the gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: SharedWeight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return weight.forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            return ctx.weight.backward(gradients[0], x), None, None
        ctx.weight.keep(gradients[0], x)
        return None, None, None
