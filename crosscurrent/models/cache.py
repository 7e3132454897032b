"""The cache that `generate` carries: attention entries and the recurrent state, always changed together."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from crosscurrent.models.growing import GrowingLayer
from crosscurrent.recurrence import PADDING, RecurrentState, Solution


class RecurrentCache(DynamicCache):
    """A transformers `DynamicCache` that also holds what the recurrence carries from call to call.

    Args:
        config: the configuration of the layers whose keys and values are kept. None: layers are added as they are used.
        max_cache_len: room for so many tokens is made at once and never grows (a static cache, for `torch.compile`); None:
            the cache grows with the sequence.

    Attributes:
        state: what the next token reads; None before the first call.
        key_labels: [B, P] int64, the document of every token seen so far, -1 for padding; None before the first call.
        is_plain: no padding and one document per row so far.
        num_places: how many tokens there is room for; None: as many as come.
        records_past: whether tokens can be taken back.
        registers: [B, 1 + N, D] if tokens can be taken back: the register before the first of the last N columns, and after
            each of them; else None.

    `copy.deepcopy` gives an independent cache without gradient history. Rows can be reordered, repeated and selected.
    After `activate_past_recording` the tokens that follow can be taken back exactly (`crop`).
    """

    def __init__(self, config: PreTrainedConfig | None = None, max_cache_len: int | None = None):
        super().__init__(config=config)
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = GrowingLayer
        self.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        self.num_places = max_cache_len
        if max_cache_len is not None:
            # Also for layers with a sliding window: the attention mask alone limits what they see.
            self.layers = [StaticLayer(max_cache_len=max_cache_len) for _ in self.layers]
        self.state: RecurrentState | None = None
        self.key_labels: Tensor | None = None
        self.is_plain = True
        self.records_past = False
        self.registers: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """How many tokens of each row it holds, padding included."""
        return 0 if self.key_labels is None else self.key_labels.shape[1]

    @property
    def has_plain_tokens(self) -> bool:
        """Whether every row is in the middle of its one document, without padding, so that a token more is of the same."""
        return self.is_plain and self.num_columns > 0

    def branch(self) -> "RecurrentCache":
        """A cache that can be written to without changing this one. Tensors are shared."""
        branch = shallow_copy(self)
        branch.layers = [branch_layer(layer) for layer in self.layers]
        return branch

    def commit_to(self, given: "RecurrentCache | None") -> "RecurrentCache":
        """Give the cache that this is a branch of all that it holds, once a call has succeeded as a whole."""
        if given is None:
            return self
        given.__dict__.update(self.__dict__)
        return given

    def record(self, before: RecurrentState, solution: Solution, key_labels: Tensor, is_plain: bool) -> None:
        """Take over what a call leaves behind."""
        self.state, self.key_labels, self.is_plain = solution.state, key_labels, is_plain
        if solution.registers is not None:
            known = before.register[:, None] if self.registers is None else self.registers
            self.registers = torch.cat([known, solution.registers], dim=1)

    def activate_past_recording(self) -> None:
        """Keep what is needed to take back tokens (`crop`) from here on: one register per token.

        Raises:
            ValueError: a sliding window has dropped entries already that taking back tokens would need.
        """
        self.layers = [_without_window(layer) for layer in self.layers]
        self.records_past = True

    def deactivate_past_recording(self) -> None:
        """Forget what was kept to take back tokens, and keep no more of it."""
        self.records_past, self.registers = False, None

    @property
    def is_croppable(self) -> bool:
        return self.records_past

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of all that this class holds beside the layers."""
        if self.state is not None and self.key_labels is not None:
            self.state = self.state.map(change)
            self.key_labels = change(self.key_labels)
        if self.registers is not None:
            self.registers = change(self.registers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows into the order of beam_idx ([B] integer)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._map_rows(lambda tensor: tensor[beam_idx.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies of a row side by side."""
        self._map_all_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows ([N] integer or [B] boolean)."""
        self._map_all_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def _map_all_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        layers: list[Any] = self.layers
        for layer in layers:
            if layer.is_initialized:
                layer.keys, layer.values = change(layer.keys), change(layer.values)
        self._map_rows(change)

    def detach(self) -> "RecurrentCache":
        """The same tokens without gradient history, for training that goes on from them but not back through them.

        The tensors are shared, and this cache keeps its history. Truncated back-propagation through time, call by call:
        `model(ids, labels=labels, cache=cache.detach(), use_cache=True)`.
        """
        detached = self.branch()
        detached.layers = [map_layer(layer, Tensor.detach) for layer in self.layers]
        detached._map_rows(Tensor.detach)
        return detached

    def reset(self) -> None:
        """Back to the cache before the first call."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = _empty_like(layer)
        self.state, self.key_labels, self.is_plain, self.registers = None, None, True, None

    def crop(self, max_length: int) -> None:
        """Take back tokens: the cache is then what it was before them, exactly.

        Args:
            max_length: how many columns to keep; a negative number: how many to take back (at most all). 0 takes back
                nothing.

        Raises:
            ValueError: the registers of those tokens were not kept.
        """
        num_removed = min(-max_length, self.num_columns) if max_length <= 0 else max(self.num_columns - max_length, 0)
        if num_removed == 0:
            return
        num_recorded = 0 if self.registers is None else self.registers.shape[1] - 1
        if num_removed > num_recorded:
            raise ValueError(
                f"{num_removed} tokens cannot be taken back: the cache has recorded {num_recorded}. Call "
                "cache.activate_past_recording() before the tokens that may be rejected, or continue from a "
                "copy.deepcopy(cache) of before them."
            )
        self._take_back(num_removed)

    def _take_back(self, num_columns: int) -> None:
        assert self.registers is not None and self.key_labels is not None and self.state is not None
        layers: list[Any] = self.layers
        for layer in layers:
            if isinstance(layer, StaticLayer):
                layer.cumulative_length = layer.cumulative_length - num_columns
            else:
                layer.crop(-num_columns)
        self.registers, self.key_labels = self.registers[:, :-num_columns], self.key_labels[:, :-num_columns]
        segment = _last_label(self.key_labels)
        in_document = (self.key_labels == segment[:, None]) & (segment[:, None] != PADDING)
        self.state = RecurrentState(self.registers[:, -1], in_document.sum(dim=1), segment)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecurrentCache":
        clone = copy.copy(self)
        memo[id(self)] = clone
        clone.__dict__ = {name: _independent(value, memo) for name, value in self.__dict__.items()}
        return clone


def _independent(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy in which tensors lose their gradient history (torch refuses to copy those that have one)."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_independent(item, memo) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _independent(getattr(value, field.name), memo) for field in fields(value)})
    if hasattr(value, "__dict__") and not isinstance(value, type):
        clone = copy.copy(value)
        clone.__dict__ = {name: _independent(item, memo) for name, item in value.__dict__.items()}
        return clone
    return copy.deepcopy(value, memo)


def _last_label(key_labels: Tensor) -> Tensor:
    """[B] the document of each row's last real token. Labels never decrease along a row."""
    none = key_labels.new_full((key_labels.shape[0], 1), PADDING)
    return torch.cat([none, key_labels], dim=1).amax(dim=1)


def _without_window(layer: Any) -> Any:
    """A layer that keeps all its entries; the attention mask alone limits what is seen."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return layer
    if layer.get_seq_length() >= layer.sliding_window:
        raise ValueError(
            f"the cache has passed its sliding window of {layer.sliding_window} tokens and has dropped entries: call "
            "cache.activate_past_recording() on the new cache, before the first token."
        )
    whole = GrowingLayer()
    if layer.keys is not None and layer.values is not None:
        whole.update(layer.keys, layer.values)
    return whole


def _empty_like(layer: Any) -> Any:
    if isinstance(layer, StaticLayer):
        return type(layer)(max_cache_len=layer.max_cache_len)
    window = getattr(layer, "sliding_window", None)
    return type(layer)() if window is None else type(layer)(sliding_window=window)


def as_recurrent_cache(cache: Any, cache_class: type[RecurrentCache]) -> RecurrentCache | None:
    """The cache, if it is one that the model can use.

    Raises:
        ValueError: it is of another kind.
    """
    if cache is None or isinstance(cache, cache_class):
        return cache
    raise ValueError(
        f"the cache is a {type(cache).__name__}: this model carries a recurrent state as well and needs a "
        f"{cache_class.__name__}. Make one with model.new_cache(), or give none."
    )


def shallow_copy(value: Any) -> Any:
    """`copy.copy` of a plain object, in a tenth of its time: a token's call copies every layer of the cache."""
    copied = object.__new__(type(value))
    copied.__dict__.update(value.__dict__)
    return copied


def branch_layer(layer: Any) -> Any:
    """A copy of a cache layer that can be written to. Tensors are shared: a layer writes behind what it counts as its
    own, and no two of a growing one to the same place."""
    branch = shallow_copy(layer)
    if isinstance(layer, StaticLayer):
        branch.cumulative_length = layer.cumulative_length.clone()
    return branch


def map_layer(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a cache layer with its keys and values changed."""
    changed = branch_layer(layer)
    for name in ("keys", "values"):
        entries = getattr(layer, name)
        if isinstance(entries, torch.Tensor):
            setattr(changed, name, change(entries))
    return changed
