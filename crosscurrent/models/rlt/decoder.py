"""The recurrent decoder as the core of a recurrence.

Shapes: B rows, T tokens of this call, P tokens of earlier calls, S columns of one run, W sliding_window, D hidden_size,
H heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from crosscurrent.models.rlt.configuration_rlt import RLTConfig
from crosscurrent.models.rlt.layers import DecoderLayer, Extend, Rotation
from crosscurrent.recurrence import PADDING, Plan

Memory = list[tuple[Tensor, Tensor]]  # per group: keys and values, each [B, H, P + T, E]


@dataclass(frozen=True)
class Window:
    """What the decoder's self-attention still sees of earlier tokens: the last W - 1 real ones of each row.

    Attributes:
        keys, values: per decoder layer [B, H, N, E], oldest first, N <= W - 1.
        labels: [B, N] their documents; PADDING where a row has had fewer tokens.
        positions: [B, N] their positions.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    labels: Tensor
    positions: Tensor

    def extender(self, layer_index: int) -> Extend:
        """Puts this window's keys and values of one layer before new ones."""
        past_keys, past_values = self.keys[layer_index], self.values[layer_index]
        return lambda keys, values: (torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2))

    def without_last(self, num_tokens: int) -> "Window":
        """The window before the last tokens, if it was kept whole."""
        if not self.keys:
            return self
        return self.map(
            lambda tensor: tensor.narrow(_token_dim(tensor), 0, tensor.shape[_token_dim(tensor)] - num_tokens)
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "Window":
        return Window(
            tuple(change(keys) for keys in self.keys),
            tuple(change(values) for values in self.values),
            change(self.labels),
            change(self.positions),
        )


class Decoder(nn.Module):
    """The decoder's layers. How they are run over a sequence is a solver's affair; see `DecoderRun`."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))

    def memory_group(self, layer_index: int) -> int:
        return layer_index * self.config.num_memory_groups // self.config.num_decoder_layers

    def empty_window(self, batch_size: int, like: Tensor) -> Window:
        shape = (batch_size, self.config.num_attention_heads, 0, self.config.head_dim)
        none = tuple(like.new_zeros(shape) for _ in self.layers)
        no_tokens = torch.zeros(batch_size, 0, dtype=torch.int64, device=like.device)
        return Window(none, none, no_tokens, no_tokens)


class DecoderRun:
    """The core of an RLT for one call: `y = decoder(z)` over a range of columns, given the window before it.

    Args:
        decoder: the layers.
        rotation: of the positions of this call's tokens.
        memory: keys and values of all tokens so far, this call's included.
        window: of the earlier calls.
        plan: of this call; it tells documents and positions.
        memory_labels: [B, P + T].
        is_plain: no padding and one document per row, so that causality alone decides what is seen.
        keeps_all: keep in the window what no token sees any more, since tokens may be taken back.
    """

    can_be_split = True

    def __init__(
        self,
        decoder: Decoder,
        rotation: Rotation,
        memory: Memory,
        window: Window,
        plan: Plan,
        memory_labels: Tensor,
        is_plain: bool,
        keeps_all: bool,
    ):
        self.decoder, self.rotation, self.memory, self.window = decoder, rotation, memory, window
        self.plan, self.memory_labels, self.is_plain, self.keeps_all = plan, memory_labels, is_plain, keeps_all
        self.num_past = memory_labels.shape[1] - plan.num_tokens

    def start(self, keeps_entries: bool) -> Window:
        return self.window

    def by_columns(self, past: Window, first: int) -> "DecoderColumns":
        return DecoderColumns(self, past, first)

    def map(self, past: Window, change: Callable[[Tensor], Tensor]) -> Window:
        return replace(past, keys=tuple(map(change, past.keys)), values=tuple(map(change, past.values)))

    def detach(self, past: Window) -> Window:
        return past.map(Tensor.detach)

    def run(self, z: Tensor, columns: slice, past: Window) -> tuple[Tensor, Window]:
        if not self.decoder.layers:
            return z, past
        labels, positions = self.plan.labels[:, columns], self.plan.positions[:, columns]
        key_labels = torch.cat([past.labels, labels], dim=1)
        key_positions = torch.cat([past.positions, positions], dim=1)
        rotation = self.rotation[0][:, :, columns], self.rotation[1][:, :, columns]
        in_window = self._seen_in_window(labels, positions, key_labels, key_positions)
        _, stop, _ = columns.indices(self.plan.num_tokens)
        num_keys = self.num_past + stop
        in_memory = seen_causally(labels, self.memory_labels[:, :num_keys], self.is_plain)
        all_keys, all_values = [], []
        for index, layer in enumerate(self.decoder.layers):
            memory_keys, memory_values = self.memory[self.decoder.memory_group(index)]
            memory = memory_keys[:, :, :num_keys], memory_values[:, :, :num_keys]
            z, keys, values = layer(z, rotation, past.extender(index), in_window, memory, in_memory)
            all_keys.append(keys)
            all_values.append(values)
        return z, self._kept(Window(tuple(all_keys), tuple(all_values), key_labels, key_positions))

    def _seen_in_window(
        self, labels: Tensor, positions: Tensor, key_labels: Tensor, key_positions: Tensor
    ) -> Tensor | None:
        """[B or 1, 1, S, N + S]: tokens of the same document, at most W - 1 before the query, or the query itself."""
        num_queries, num_keys = labels.shape[1], key_labels.shape[1]
        if self.is_plain and num_queries == 1 and num_keys <= self.decoder.config.sliding_window:
            return None
        distance = positions[:, :, None] - key_positions[:, None, :]
        near = (distance >= 0) & (distance < self.decoder.config.sliding_window)
        same = (labels[:, :, None] == key_labels[:, None, :]) & (labels[:, :, None] != PADDING)
        return ((near & same) | _itself(num_queries, num_keys, labels.device))[:, None]

    def _kept(self, window: Window) -> Window:
        """The last W - 1 real tokens of each row."""
        num_kept = self.decoder.config.sliding_window - 1
        num_keys = window.labels.shape[1]
        if num_keys <= num_kept or self.keeps_all:
            return window
        if self.is_plain:
            return window.map(lambda tensor: _last_tokens(tensor, num_kept))
        # Real tokens in order, behind the padding, so that the last columns are the last real tokens.
        order = (window.labels != PADDING).long().sort(dim=1, stable=True).indices[:, num_keys - num_kept :]
        return window.map(lambda tensor: _pick_tokens(tensor, order))


class DecoderColumns:
    """The decoder's columns from `first` on in any order, against keys and values of all of them.

    Args:
        run: the core of the call.
        window: before column `first`.
    """

    def __init__(self, run: DecoderRun, window: Window, first: int):
        self.layers, self.memory_group, self.memory = run.decoder.layers, run.decoder.memory_group, run.memory
        self.rotation = run.rotation[0][:, :, first:], run.rotation[1][:, :, first:]
        self.num_before = window.labels.shape[1]
        labels, positions = run.plan.labels[:, first:], run.plan.positions[:, first:]
        key_labels = torch.cat([window.labels, labels], dim=1)
        key_positions = torch.cat([window.positions, positions], dim=1)
        self.in_window = run._seen_in_window(labels, positions, key_labels, key_positions)
        self.in_memory = seen_causally(labels, run.memory_labels, is_plain=False)
        self.keys, self.values = list(window.keys), list(window.values)

    def run(self, z: Tensor, columns: Tensor) -> Tensor:
        rotation = self.rotation[0][:, :, columns], self.rotation[1][:, :, columns]
        assert self.in_window is not None and self.in_memory is not None  # more than one column
        in_window, in_memory = self.in_window[:, :, columns], self.in_memory[:, :, columns]
        for index, layer in enumerate(self.layers):
            extend = partial(self._extended, index, columns)
            z, self.keys[index], self.values[index] = layer(
                z, rotation, extend, in_window, self.memory[self.memory_group(index)], in_memory
            )
        return z

    def _extended(self, index: int, columns: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old_keys, old_values = self.keys[index], self.values[index]
        if old_keys.shape[2] == self.num_before:  # the first run, for all columns
            return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        places = self.num_before + columns
        return old_keys.index_copy(2, places, keys), old_values.index_copy(2, places, values)


def seen_causally(labels: Tensor, key_labels: Tensor, is_plain: bool) -> Tensor | None:
    """[B or 1, 1, S, K] which keys each query sees: earlier ones of its document, and itself.

    The queries are the last S of the K keys. None if causality alone decides and `attend` can tell without a mask.
    Padding sees itself, so that no query is left without a key.
    """
    num_queries, num_keys = labels.shape[1], key_labels.shape[1]
    if is_plain and (num_queries == 1 or num_queries == num_keys):
        return None
    itself = _itself(num_queries, num_keys, labels.device)
    before = torch.ones_like(itself).tril(num_keys - num_queries)
    if is_plain:
        return before[:, None]
    same = (labels[:, :, None] == key_labels[:, None, :]) & (labels[:, :, None] != PADDING)
    return ((before & same) | itself)[:, None]


def seen_in_window(labels: Tensor, key_labels: Tensor, window: int) -> Tensor:
    """[B, 1, S, K] as `seen_causally`, but of the row's real tokens only the last `window`, the query included."""
    seen = seen_causally(labels, key_labels, is_plain=False)
    assert seen is not None
    place = (key_labels != PADDING).cumsum(dim=1)
    is_near = place[:, -labels.shape[1] :, None] - place[:, None, :] < window
    return seen & is_near[:, None]


def _itself(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    columns = torch.arange(num_keys, device=device)
    return (columns == columns[num_keys - num_queries :, None])[None]


def _token_dim(tensor: Tensor) -> int:
    """Where the tokens are in [B, N] or [B, H, N, E]."""
    return 1 if tensor.dim() == 2 else 2


def _last_tokens(tensor: Tensor, count: int) -> Tensor:
    """The last `count` tokens of [B, N] or [B, H, N, E]."""
    dim = _token_dim(tensor)
    return tensor.narrow(dim, tensor.shape[dim] - count, count).contiguous()  # a view would keep all tokens in memory


def _pick_tokens(tensor: Tensor, order: Tensor) -> Tensor:
    if tensor.dim() == 2:
        return tensor.gather(1, order)
    index = order[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)
