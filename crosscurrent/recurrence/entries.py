"""A sequence that grows step by step, and of which each step reads a part: keys or values of attention.

Concatenating copies all that was there in every step, and slicing sends a gradient of full length back from every step. Here
all steps write into and read from one tensor, and what they send back is added up in one.

Shapes: B rows, H heads, N entries, E head width.  Entries are [B, H, N, E].
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscurrent.recurrence.backward_pass import PerBackwardPass, refuse_second_derivatives

_MOST_ROWS = 64  # of factors kept for a gradient, before they are multiplied


class Entries:
    """The entries so far, in a tensor with room for more. An object never changes; `append` gives a new one.

    The new one lies in the same tensor. Whoever appends to one that has been appended to before gets a copy of it.

    Args:
        first: [B, H, N, E] the entries at the start.
        room: for how many entries there is to be room in all.
        in_place: whether they are to grow in place. Else, and in compiled code, which has no place for what a backward pass
            leaves aside, they are concatenated.

    Example:
        >>> entries = Entries(torch.zeros(1, 1, 2, 4), room=3).append(torch.ones(1, 1, 1, 4))
        >>> entries.part(1, 3).tensor()[0, 0, :, 0].tolist()
        [0.0, 1.0]
    """

    def __init__(self, first: Tensor, room: int, in_place: bool = True):
        self.length, self.room = first.shape[2], room
        self._num_used = [self.length]  # of the storage, by whichever object
        self.after: Tensor | None = None
        self.gradient: EntriesGradient | None = None
        if not in_place or torch.compiler.is_compiling():
            self.storage = first
            return
        is_full = self.length == room
        shape = (*first.shape[:2], room, first.shape[3])
        self.storage = first.detach().contiguous() if is_full else first.new_empty(shape)
        self.gradient = EntriesGradient(self.storage)
        self.after = _written(first, first.new_empty(0), None if is_full else self.storage, 0, self.gradient)

    def append(self, new: Tensor) -> "Entries":
        """The entries followed by new ones [B, H, S, E]."""
        new = new.to(self.storage.dtype)
        if self.gradient is None:
            changed = copy.copy(self)
            changed.length, changed.storage = self.length + new.shape[2], torch.cat([self.storage, new], dim=2)
            return changed
        own = self.with_room()
        assert own.after is not None and own.gradient is not None
        after = _written(new, own.after, own.storage, own.length, own.gradient)
        return own.extended(new.shape[2], after)

    def with_room(self) -> "Entries":
        """The entries, with nothing in the storage behind them: a copy if there is something."""
        is_free = self.gradient is None or self._num_used[0] == self.length
        return self if is_free else Entries(self.whole(), self.room)

    def extended(self, count: int, after: Tensor) -> "Entries":
        """The entries with `count` more, which a function of one's own has written: it gave the tensor `after`."""
        changed = copy.copy(self)
        changed.length, changed.after = self.length + count, after
        self._num_used[0] = changed.length
        return changed

    def whole(self) -> Tensor:
        """All entries [B, H, N, E]."""
        return self.part(0, self.length).tensor()

    def part(self, start: int, stop: int) -> "Part":
        """Entries `start` to `stop`."""
        return Part(self.storage, self.after, self.gradient, start, stop)

    def detach(self) -> "Entries":
        """The same entries without gradient history."""
        detached = copy.copy(self)
        if self.after is None:
            detached.storage = self.storage.detach()
        else:
            detached.after, detached.gradient = self.after.detach(), EntriesGradient(self.storage)
        return detached


@dataclass(frozen=True)
class Part:
    """A part of a sequence of entries.

    Attributes:
        storage: of the whole sequence.
        after: a tensor of no size that depends on all entries written so far: with `gradient`, what a function of one's own
            needs to read from the storage itself. None in compiled code.
        start, stop: the part.
    """

    storage: Tensor
    after: Tensor | None
    gradient: "EntriesGradient | None"
    start: int
    stop: int

    def view(self) -> Tensor:
        """The entries [B, H, stop - start, E], without gradient history (but in compiled code)."""
        return self.storage.narrow(2, self.start, self.stop - self.start)

    def tensor(self) -> Tensor:
        """The entries [B, H, stop - start, E]."""
        if self.after is None or not torch.is_grad_enabled():
            return self.view()
        found: Tensor = _Read.apply(self.after, self)
        return found


class EntriesGradient:
    """What was sent back to the entries in the backward pass that is running."""

    def __init__(self, storage: Tensor):
        self._sum = PerBackwardPass(lambda: _GradientSum(storage))

    def of(self, start: int, stop: int) -> Tensor:
        """The gradient of entries `start` to `stop`, to be added to in place."""
        return self._sum.value().total().narrow(2, start, stop - start)

    def keep(self, weights: Tensor, rows: Tensor, start: int) -> None:
        """Leave weights^T rows, to be added to the gradient of K entries from `start` on, until it is asked for: one
        product for many steps. weights [B, H, S, K], rows [B, H, S, E]."""
        self._sum.value().keep(weights, rows, start)


class _GradientSum:
    """A gradient [B, H, N, E], and factors whose products are still to be added to it."""

    def __init__(self, storage: Tensor):
        self._sum = torch.zeros_like(storage, memory_format=torch.contiguous_format)
        self._weights: list[tuple[int, Tensor]] = []  # and of which entry the first is
        self._rows: list[Tensor] = []
        self._num_rows = 0

    def keep(self, weights: Tensor, rows: Tensor, start: int) -> None:
        self._weights.append((start, weights))
        self._rows.append(rows)
        self._num_rows += rows.shape[2]
        if self._num_rows >= _MOST_ROWS:
            self._multiply()

    def _multiply(self) -> None:
        first = min(start for start, _ in self._weights)
        num_keys = max(start + weights.shape[3] for start, weights in self._weights) - first
        places = [(start - first, weights) for start, weights in self._weights]
        padded = [F.pad(one, (before, num_keys - before - one.shape[3])) for before, one in places]
        product = torch.matmul(torch.cat(padded, dim=2).transpose(-1, -2), torch.cat(self._rows, dim=2))
        self._sum.narrow(2, first, num_keys).add_(product)
        self._weights, self._rows, self._num_rows = [], [], 0

    def total(self) -> Tensor:
        if self._rows:
            self._multiply()
        return self._sum


def with_columns(entries: Tensor, new: Tensor, num_before: int, columns: Tensor) -> Tensor:
    """Entries of some columns [S], counted behind the first `num_before` entries, put among those of all, out of place.

    As long as there are only those first ones, the new entries are those of all columns.
    """
    if entries.shape[2] == num_before:
        return torch.cat([entries, new], dim=2)
    return entries.index_copy(2, num_before + columns, new)


def _written(new: Tensor, before: Tensor, storage: Tensor | None, start: int, gradient: EntriesGradient) -> Tensor:
    """Put entries into the storage (None: they are it), and what depends on them, and on `before`."""
    if torch.is_grad_enabled():
        after: Tensor = _Write.apply(new, before, storage, start, gradient)
        return after
    _put(new, storage, start)
    return before


def _put(new: Tensor, storage: Tensor | None, start: int) -> None:
    if storage is not None:
        # .data: what was written before does not change, so no reader's backward pass need complain.
        storage.data.narrow(2, start, new.shape[2]).copy_(new)


class _Write(torch.autograd.Function):
    """Puts entries into the storage. The result, a tensor of no size, is what later reads and writes depend on, so that
    the backward pass comes here after theirs."""

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, before: Tensor, storage: Tensor | None, start: int, gradient: EntriesGradient
    ) -> Tensor:
        _put(new, storage, start)
        ctx.start, ctx.stop, ctx.gradient = start, start + new.shape[2], gradient
        ctx.set_materialize_grads(False)
        return new.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivatives()
        found = ctx.gradient.of(ctx.start, ctx.stop) if ctx.needs_input_grad[0] else None
        return found, None, None, None, None


class _Read(torch.autograd.Function):
    """A part of the storage, whose backward pass leaves what it is given to the writes."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return part.view()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivatives()
        ctx.part.gradient.of(ctx.part.start, ctx.part.stop).add_(gradients[0])
        return None, None
