"""The cache that `generate` carries: attention entries and the recurrent state, always changed together."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from crosscurrent.recurrence import RecurrentState


class RecurrentCache(DynamicCache):
    """A transformers `DynamicCache` that also holds what the recurrence carries from call to call.

    Args:
        config: the configuration of the layers whose keys and values are kept. None: layers are added as they are used.

    Attributes:
        state: what the next token reads; None before the first call.
        key_labels: [B, P] int64, the document of every token seen so far, -1 for padding; None before the first call.
        is_plain: no padding and one document per row so far.

    `copy.deepcopy` gives an independent cache without gradient history. Rows can be reordered, repeated and selected.
    Single tokens cannot be taken back (`crop`): keep a deep copy from before them instead.
    """

    is_croppable = False  # type: ignore[assignment]  # tells assisted decoding that it cannot roll this cache back

    def __init__(self, config: PreTrainedConfig | None = None):
        super().__init__(config=config)
        self.state: RecurrentState | None = None
        self.key_labels: Tensor | None = None
        self.is_plain = True

    def branch(self) -> "RecurrentCache":
        """A cache that can be written to without changing this one. Tensors are shared: no layer writes in place."""
        branch = copy.copy(self)
        branch.layers = [copy.copy(layer) for layer in self.layers]
        return branch

    def commit_to(self, given: "RecurrentCache | None") -> "RecurrentCache":
        """Give the cache that this is a branch of all that it holds, once a call has succeeded as a whole."""
        if given is None:
            return self
        given.__dict__.update(self.__dict__)
        return given

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of all that this class holds beside the layers."""
        if self.state is not None and self.key_labels is not None:
            self.state = self.state.map(change)
            self.key_labels = change(self.key_labels)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows into the order of beam_idx ([B] integer)."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._map_rows(lambda tensor: tensor[beam_idx.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies of a row side by side."""
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows ([N] integer or [B] boolean)."""
        super().batch_select_indices(indices)
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def reset(self) -> None:
        """Back to the cache before the first call."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = _empty_like(layer)
        self.state, self.key_labels, self.is_plain = None, None, True

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the states of earlier tokens are not kept.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a recurrent cache cannot take back tokens: their attention entries could be cut off, but the state before "
            "them is gone. Keep copy.deepcopy(cache) from before the tokens that may be rejected, and continue from it."
        )

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


def _empty_like(layer: Any) -> Any:
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


def detach_layer(layer: Any) -> Any:
    """A copy of a cache layer whose keys and values carry no gradient history."""
    detached = copy.copy(layer)
    for name in ("keys", "values"):
        entries = getattr(layer, name)
        if isinstance(entries, torch.Tensor):
            setattr(detached, name, entries.detach())
    return detached
