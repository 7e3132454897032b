"""The columns of a range of layers in any order, against the keys and values of all of them.

Shapes: B rows, T columns from `first` on, N entries before them, S columns of one run, D hidden_size.
"""

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import StaticLayer

from crosscurrent.recurrence.entries import with_columns

if TYPE_CHECKING:
    from crosscurrent.models.t2mlr.layer_range import LayerRange


class RangeColumns:
    """A `ColumnCore` over the layers of a range.

    Args:
        core: the range, with the arguments of its layers.
        past: the entries before column `first`.
    """

    def __init__(self, core: "LayerRange", past: DynamicCache, first: int):
        self.core, self.first = core, first
        self.buffers = {call.index: _ColumnBuffer(past.layers[call.index]) for call in core.calls}
        self.cache = copy.copy(past)
        self.cache.layers = [self.buffers.get(index, layer) for index, layer in enumerate(past.layers)]  # type: ignore[misc]

    def run(self, z: Tensor, columns: Tensor) -> Tensor:
        self.core.runs.append(range(0))  # what is recorded of it is no whole range of columns
        for call in self.core.calls:
            buffer = self.buffers[call.index]
            buffer.columns = columns
            num_keys = buffer.num_before + call.num_tokens - self.first
            cut_mask = partial(self._cut_mask, num_keys=num_keys, buffer=buffer)
            z = call.run_cut(z, self.first + columns, self.cache, cut_mask)
        return z

    def _cut_mask(self, mask: Any, num_keys: int, buffer: "_ColumnBuffer") -> Tensor:
        assert buffer.columns is not None
        if mask is None:  # causal
            places = torch.arange(num_keys, device=buffer.columns.device)
            return (places <= buffer.num_before + buffer.columns[:, None])[None, None]
        rows = mask[..., self.first + buffer.columns, :]
        return rows[..., :num_keys] if buffer.is_static else rows[..., rows.shape[-1] - num_keys :]


class _ColumnBuffer:
    """In place of a layer of a cache: it puts the keys and values of some columns among those of all."""

    def __init__(self, layer: Any):
        self.is_static = isinstance(layer, StaticLayer)
        self.num_before = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        if layer.is_initialized:
            count = int(layer.cumulative_length) if self.is_static else layer.keys.shape[-2]
            self.keys, self.values, self.num_before = layer.keys[..., :count, :], layer.values[..., :count, :], count
        self.columns: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._put(self.keys, keys), self._put(self.values, values)
        return self.keys, self.values

    def _put(self, old: Tensor | None, new: Tensor) -> Tensor:
        assert self.columns is not None
        return new if old is None else with_columns(old, new, self.num_before, self.columns)
