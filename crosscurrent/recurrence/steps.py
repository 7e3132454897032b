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

from crosscurrent.recurrence.backward_pass import PerBackwardPass, refuse_second_derivatives

FEWEST_STEPS = 4  # for which a weight is worth reordering
_FEWEST_ELEMENTS = 2**17  # of a weight: smaller ones stay in the processor's cache, where their order matters little
_MOST_ROWS = 4096  # of kept factors, before they are multiplied

T = TypeVar("T")

_active: ContextVar["Steps | None"] = ContextVar("active_steps", default=None)
_fixed: ContextVar["Steps | None"] = ContextVar("steps_of_decoding", default=None)


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
        self._shared: dict[tuple[Any, ...], SharedWeight] = {}
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
        dtype = _product_dtype(weights[0])
        key = (dtype, *map(id, weights))
        if key not in self._shared:
            self._shared[key] = SharedWeight(weights, dtype, self.num_rows)
        return self._shared[key]

    def prepared(self, module: nn.Module, prepare: "Callable[[nn.Module, Steps], T]") -> T:
        """What `prepare` makes of a module, made once."""
        if id(module) not in self._prepared:
            self._prepared[id(module)] = module, prepare(module, self)
        found: T = self._prepared[id(module)][1]
        return found


def _product_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


@contextmanager
def fixed_weights() -> Iterator[None]:
    """Within this, which promises that no weight is changed, tokens are decoded faster on a CPU.

    Reading the weights is most of the time of a single token there, twice as much of it if they lie as they are saved. Here
    those of the recurrence, and of an RLT all, are put once into the order that products want, and take their size in memory
    once more until the end. `generate` does this by itself; it is for loops of one's own that call a model with one token
    and a cache.

    Example:
        >>> with fixed_weights():
        ...     pass  # for _ in range(100): output = model(token, cache=cache) ...
    """
    token = _fixed.set(Steps(num_rows=1))
    try:
        yield
    finally:
        _fixed.reset(token)


def steps_of_decoding() -> Steps | None:
    """Those of `fixed_weights`."""
    return None if torch.compiler.is_compiling() else _fixed.get()


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


_LINEAR_FORWARD = nn.Linear.forward


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether a layer is nothing but its weight and bias: no other class, no replaced forward, no hooks."""
    return type(linear) is nn.Linear and is_bare(linear, _LINEAR_FORWARD)


def is_bare(module: nn.Module, forward: Any) -> bool:
    """Whether calling a module runs `forward` and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    is_wrapped = any(hooks) or "forward" in module.__dict__ or module._compiled_call_impl is not None
    return type(module).forward is forward and not is_wrapped and not nn.modules.module._has_any_global_hook()


class SharedWeight:
    """One or several weights W, one below the other, ready for the products of all steps.

    Attributes:
        gate: a tensor of no size. An autograd function that uses the weight takes it as an input and gives it no gradient:
            so the weights' own gradient is made once all such functions have run backward.
    """

    def __init__(self, weights: tuple[Tensor, ...], dtype: torch.dtype, num_rows: int | None):
        self.weights = weights  # held, so that their ids stay theirs
        self.dtype, self.num_rows = dtype, num_rows
        self._versions = [weight._version for weight in weights] if torch.is_grad_enabled() else []
        self._factors = PerBackwardPass(_Factors)
        self.gate: Tensor = _Gate.apply(self._factors, *weights)
        self._matrix: Tensor | None = None
        self._transposed: Tensor | None = None

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
        return multiply(x, self.matrix())

    def backward(self, gradient: Tensor, x: Tensor) -> Tensor:
        """From the gradient of `forward(x)` that of x. The weights' part is kept for the gate."""
        gradient = gradient.to(self.dtype)
        self.keep(gradient, x)
        return multiply(gradient, self.transposed())

    def matrix(self) -> Tensor:
        """W as `multiply` takes it."""
        if self._matrix is None:
            self._matrix = _ordered(self._joined(), self.num_rows)
        return self._matrix

    def transposed(self) -> Tensor:
        """W^T as `multiply` takes it, for the backward pass."""
        if self._transposed is None:
            if [weight._version for weight in self.weights] != self._versions:
                raise RuntimeError("a weight was changed between the forward and the backward pass that needs it.")
            self._transposed = _ordered(self._joined().T, self.num_rows)
        return self._transposed

    def keep(self, gradient: Tensor, x: Tensor) -> None:
        """Leave the weights' part of the gradient of `forward(x)` to the gate."""
        if self.gate.requires_grad:
            self._factors.value().keep(x.flatten(0, -2), gradient.flatten(0, -2))

    @torch.no_grad()
    def _joined(self) -> Tensor:
        joined = self.weights[0].detach() if len(self.weights) == 1 else torch.cat(self.weights)
        return joined.to(self.dtype)


def _ordered(matrix: Tensor, num_rows: int | None) -> Tensor:
    """A matrix [O, I] that many thin inputs are multiplied by, for inputs of `num_rows` rows in the order that oneDNN's
    kernel reads it in. None: it stays as it is."""
    if num_rows is None or not _can_reorder(matrix):
        return matrix
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(matrix.contiguous(), num_rows)
    return reordered


def multiply(x: Tensor, matrix: Tensor) -> Tensor:
    """x W^T without autograd, by a matrix of a `SharedWeight`: [..., I] and [O, I] to [..., O]."""
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.crosscurrent.multiply.default(x, matrix)
        return product
    return _multiply(x, matrix)


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    if not matrix.is_mkldnn:
        return F.linear(x, matrix)
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x.contiguous(), matrix, None, "none", [], "")
    return product


def _shape_of_product(x: Tensor, matrix: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], matrix.shape[0])


# Compiled code cannot look into a reordered matrix: to it a product is one operation.
_library = torch.library.Library("crosscurrent", "DEF")
_library.define("multiply(Tensor x, Tensor matrix) -> Tensor")
_library.impl("multiply", _multiply, "CompositeExplicitAutograd")
_library.impl("multiply", _shape_of_product, "Meta")


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
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivatives()
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
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivatives()
        (x,) = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            return ctx.weight.backward(gradients[0], x), None, None
        ctx.weight.keep(gradients[0], x)
        return None, None, None
