"""Whether the elementwise ends of fusions and carries run as Triton kernels (`triton_kernels.py`) or as plain PyTorch.

The plain code is the definition, and what runs wherever the kernels cannot.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn

VARIABLE = "CROSSCURRENT_TRITON"
WIDEST = 16384  # elements of a row that a kernel holds at once

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CLASSES = (Tensor, nn.Parameter)  # a subclass may be a shard, or not hold its elements at all

# Not a context variable: where activations are computed once more, the thread of the backward pass must find it, too.
_is_on = False


@contextmanager
def use_triton(on: bool = True) -> Iterator[None]:
    """Run what `GatedFusion`, `Merge` and `NormalizedSum` do elementwise as one Triton kernel each, forward and backward.

    In place of a dozen operations, five, and three; as many again and more in the backward pass. Off by default: it is not
    yet measured on a GPU whether this pays (`crosscurrent bench fusion --device cuda` shows it), and results differ from
    the plain code's in rounding, since the kernels compute in float32 whatever the dtype of the stream. The environment
    variable CROSSCURRENT_TRITON=1 turns it on for a whole process.

    The plain code runs all the same for tensors that are not on a GPU, float64, compiled code, subclasses of tensors,
    and more than 16,384 features. Second derivatives are refused. Needs the package triton.

    The setting is the process's, not the thread's. Put the backward pass inside, too, if activations are recomputed in it.

    Args:
        on: False turns it off.

    Raises:
        ValueError: triton is not installed.

    Example:
        >>> from crosscurrent.recurrence import GatedFusion
        >>> fuse, h = GatedFusion(hidden_size=8), torch.randn(2, 3, 8)
        >>> with use_triton(False):
        ...     torch.equal(fuse(h, torch.randn(2, 3, 8)), h)
        True
    """
    global _is_on  # noqa: PLW0603
    before, _is_on = _is_on, _checked(on)
    try:
        yield
    finally:
        _is_on = before


def triton_for(x: Tensor, *others: Tensor, of_dtype: torch.dtype | None = None) -> ModuleType | None:
    """The kernels, if they are on and can serve these tensors; None: use the plain code.

    x [B, T, D] is what is read at every token; `of_dtype`: of the result, if it is not theirs.
    """
    if not _is_on or torch.compiler.is_compiling():
        return None
    # Only the interpreter runs on a CPU; Triton looks at its variable when it meets the kernels, once.
    if x.device.type != "cuda" and not (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    if x.dim() != 3 or x.numel() == 0 or x.shape[-1] > WIDEST or of_dtype not in (None, *_DTYPES):
        return None
    if not all(type(one) in _CLASSES and one.dtype in _DTYPES and one.device == x.device for one in (x, *others)):
        return None
    from crosscurrent.recurrence import triton_kernels

    return triton_kernels


def _checked(on: bool) -> bool:
    if on and importlib.util.find_spec("triton") is None:
        raise ValueError("Triton kernels were asked for, but triton is not installed: pip install 'crosscurrent[gpu]'.")
    return on


def _from_environment() -> bool:
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} is not allowed: give 1 to use Triton kernels, or 0.")
    return _checked(value == "1")


_is_on = _from_environment()
