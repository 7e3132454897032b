"""Whether the steps of a recurrence run as code that `torch.compile` has made, or operation by operation."""

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

VARIABLE = "CROSSCURRENT_COMPILE"

# Not a context variable: where activations are computed once more, the thread of the backward pass must find it, too.
_is_on = False


@contextmanager
def compiled_steps(on: bool = True) -> Iterator[None]:
    """Run an RLT's decoder, in the steps of `cc.Sequential`, as two compiled functions per layer: forward, and backward.

    A step has a few rows only, and much of its time goes to running about 150 small operations per layer one by one
    (docs/speed.md). Off by default: compiling takes half a minute or so at the first training step, and again when another
    batch size, dtype or kind of mask turns up; results differ from the plain code's in rounding. The environment
    variable CROSSCURRENT_COMPILE=1 turns it on for a whole process.

    The plain code runs all the same in a call's first and last step, in a window of one token, and where nothing can be
    compiled, which a warning tells: `torch.compile` needs a C++ compiler, and Triton on a GPU (where this has not been
    measured). Of other models nothing is compiled.

    The setting is the process's, not the thread's. A backward pass follows the forward pass it belongs to.

    Args:
        on: False turns it off.

    Example:
        >>> import crosscurrent as cc
        >>> with cc.compiled_steps(False):
        ...     pass  # loss = model(ids, labels=ids).loss
    """
    global _is_on  # noqa: PLW0603
    before, _is_on = _is_on, on
    try:
        yield
    finally:
        _is_on = before


def compiles_steps(device: str) -> bool:
    """Whether steps are to be compiled, and can be, on a type of device."""
    return _is_on and not torch.compiler.is_compiling() and _can_compile(device)


def compiled(
    function: Callable[..., Any], growing: Sequence[Tensor], masks: Sequence[Tensor | None] = ()
) -> Callable[..., Any]:
    """A function of tensors, compiled; itself, where its arguments would need code of their own.

    Args:
        function: of this package's own, without state.
        growing: those of its arguments [B, H, K, E], parts of larger ones, of which K changes from step to step.
        masks: those that are masks over them, [B or 1, 1, S, K].
    """
    # One key, or all there is room for, are special cases to the compiler: plain code is cheaper than two more compilations.
    if any(part.shape[2] < 2 or part.is_contiguous() for part in growing):
        return function
    for part in growing:
        torch._dynamo.maybe_mark_dynamic(part, 2)
    for mask in masks:
        if mask is not None:
            torch._dynamo.maybe_mark_dynamic(mask, 3)
    return _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@functools.cache
def _can_compile(device: str) -> bool:
    """Tried out once: a compiler, its headers, or a Python version can be what is missing."""
    try:
        torch.compile(_one_more)(torch.zeros(8, device=device))
    except (RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"steps are not compiled, since torch.compile fails here ({reason}): they run as plain code. It needs a C++ "
            "compiler (g++, or what the variable CXX names) and Python's headers, and on a GPU Triton.",
            stacklevel=2,
        )
        return False
    return True


def _one_more(x: Tensor) -> Tensor:
    return x + 1


def _from_environment() -> bool:
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} is not allowed: give 1 to compile the steps of a recurrence, or 0.")
    return value == "1"


_is_on = _from_environment()
