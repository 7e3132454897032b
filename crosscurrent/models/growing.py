"""Keys and values of one layer, with room for tokens to come: a token's are written into it, not concatenated.

transformers' `DynamicLayer` copies all entries for every token of decoding. Here they are copied when the room is used up,
which it is more and more seldom: it is half as large again as what it holds.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

# Fewer elements than this are copied sooner than written beside.
FEWEST_ELEMENTS = 2**15
_LOCK = threading.Lock()
FEWEST_COLUMNS = 64  # of a new room, beyond what it is made for


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are views of a larger tensor.

    Nothing else about them differs: any of them can be put in place of `keys` and `values`, and copies of a layer can be
    continued apart. Whoever finds that the room behind its entries has been written to, or is not its own, moves on into
    a new one. With gradients on, and in compiled code, entries are concatenated.
    """

    _room: "_Room | None" = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in transformers: put new keys and values, each [B, H, S, E], behind those that there are, and return all."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not self._is_worth_room():
            self._room = None
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return found
        assert self.keys is not None and self.values is not None
        with _LOCK:  # copies that threads go on from may share a room
            new = key_states, value_states
            if self._room is None or not self._room.continues(self.keys, self.values, new):
                self._room = _Room(self.keys, self.values, new)
            self.keys, self.values = self._room.append(key_states, value_states)
        return self.keys, self.values

    def keep_last(self, num_columns: int) -> None:
        """Forget all but the last entries, and free what the others took."""
        assert self.keys is not None and self.values is not None
        first = self.keys.shape[2] - num_columns
        self.keys, self.values = (part.narrow(2, first, num_columns).clone() for part in (self.keys, self.values))
        self._room = None

    def _is_worth_room(self) -> bool:
        return self.is_initialized and self.keys is not None and self.keys.numel() >= FEWEST_ELEMENTS


class _Room:
    """The tensors that layers' keys and values are views of.

    Attributes:
        num_used: columns that hold entries, of whichever layer. What lies behind them belongs to nobody.
    """

    __slots__ = ("keys", "num_used", "values")

    def __init__(self, keys: Tensor, values: Tensor, new: tuple[Tensor, Tensor]):
        self.num_used = keys.shape[2]
        columns = self.num_used + new[0].shape[2]
        columns += max(columns // 2, FEWEST_COLUMNS)
        self.keys, self.values = (
            part.new_empty(
                (*part.shape[:2], columns, part.shape[3]), dtype=torch.promote_types(part.dtype, added.dtype)
            )
            for part, added in zip((keys, values), new, strict=True)
        )
        self.keys.narrow(2, 0, self.num_used).copy_(keys)
        self.values.narrow(2, 0, self.num_used).copy_(values)

    def continues(self, keys: Tensor, values: Tensor, new: tuple[Tensor, Tensor]) -> bool:
        """Whether these entries lie in this room, with nothing behind them, and the new ones fit in."""
        num_columns = keys.shape[2]
        return (
            num_columns == self.num_used
            and num_columns + new[0].shape[2] <= self.keys.shape[2]
            and keys.data_ptr() == self.keys.data_ptr()
            and values.data_ptr() == self.values.data_ptr()
            and keys.shape[:2] == self.keys.shape[:2]
            and (new[0].dtype, new[1].dtype) == (self.keys.dtype, self.values.dtype)
            and self.keys.is_inference() == torch.is_inference_mode_enabled()
        )

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        start, count = self.num_used, keys.shape[2]
        self.keys.narrow(2, start, count).copy_(keys)
        self.values.narrow(2, start, count).copy_(values)
        self.num_used = start + count
        return self.keys.narrow(2, 0, self.num_used), self.values.narrow(2, 0, self.num_used)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's entries are tensors of their own, no views of a room."""
