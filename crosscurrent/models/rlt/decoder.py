"""The recurrent decoder as the core of a recurrence.

Shapes: B rows, T tokens of this call, P tokens of earlier calls, S columns of one run, W sliding_window, D hidden_size,
H heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosscurrent.models.rlt.configuration_rlt import RLTConfig
from crosscurrent.models.rlt.layer_step import MOST_COLUMNS, LayerStep, Place, Seen, by_column, suits_steps
from crosscurrent.models.rlt.layers import DecoderLayer, Rotation
from crosscurrent.recurrence import PADDING, Plan
from crosscurrent.recurrence.entries import Entries, Part, with_columns
from crosscurrent.recurrence.steps import Steps, current_steps

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


@dataclass(frozen=True)
class Past:
    """Keys and values of the decoder's self-attention: of the window, and of the columns of this call that have been run.

    Attributes:
        in_place: whether entries grow in place.
        memory: keys and values of each memory group, which do not grow.
        keys, values: per decoder layer; none before the first run.
    """

    in_place: bool
    memory: tuple[tuple[Entries, Entries], ...]
    keys: tuple[Entries, ...] = ()
    values: tuple[Entries, ...] = ()

    def map(self, change: Callable[[Entries], Entries]) -> "Past":
        """The keys and values of layers changed."""
        return replace(self, keys=tuple(map(change, self.keys)), values=tuple(map(change, self.values)))


class DecoderRun:
    """The core of an RLT for one call: `y = decoder(z)` over a range of columns, given the entries before it.

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
        self.decoder, self.rotation, self.window = decoder, rotation, window
        self.plan, self.memory_labels, self.is_plain, self.keeps_all = plan, memory_labels, is_plain, keeps_all
        self.memory = [(self.stored(keys), self.stored(values)) for keys, values in memory]
        self.num_past = memory_labels.shape[1] - plan.num_tokens
        self.labels = torch.cat([window.labels, plan.labels], dim=1)  # of the window's entries and this call's
        self.positions = torch.cat([window.positions, plan.positions], dim=1)
        self._first_seen = self._find_first_seen()

    def stored(self, entries: Tensor) -> Tensor:
        """Under autocast on a CPU steps attend in float32: converting costs more there than computing."""
        device = entries.device.type
        is_widened = device == "cpu" and torch.is_autocast_enabled(device) and len(self.plan.stages) > 1
        return entries.float() if is_widened else entries

    @property
    def learns(self) -> bool:
        entries = (*self.window.keys, *self.window.values, *(part for group in self.memory for part in group))
        return any(tensor.requires_grad for tensor in (*self.decoder.parameters(), *entries))

    def start(self, keeps_entries: bool) -> Past:
        # What runs once needs no room to grow in, and stays free for second derivatives.
        in_place = keeps_entries or current_steps() is not None
        rooms = [[Entries(part, part.shape[2], in_place) for part in group] for group in self.memory]
        return Past(in_place, tuple((keys, values) for keys, values in rooms))

    def by_columns(self, past: Past, first: int) -> "DecoderColumns":
        return DecoderColumns(self, past, first)

    def map(self, past: Past, change: Callable[[Tensor], Tensor]) -> Past:
        return past.map(lambda entries: Entries(change(entries.whole()), entries.room, past.in_place))

    def detach(self, past: Past) -> Past:
        return past.map(Entries.detach)

    def run(self, z: Tensor, columns: slice, past: Past) -> tuple[Tensor, Past]:
        if not self.decoder.layers:
            return z, past
        start, stop, _ = columns.indices(self.plan.num_tokens)
        rotation = _of_columns(self.rotation, columns)
        seen = slice(self._first_seen[start], self.window.labels.shape[1] + stop)
        in_window = self.window_mask(columns, seen)
        in_memory, first, last = self.memory_mask(columns)
        growing = _Growing(self, past, seen)
        memory = [(keys.part(first, last), values.part(first, last)) for keys, values in past.memory]
        group = self.decoder.memory_group
        in_steps = self._in_steps(past, stop - start)
        if in_steps:
            turned = by_column(rotation)
            if in_memory is None and stop - start > 1:
                in_memory = _causal(stop - start, z.device)
            for index, step in enumerate(in_steps):
                before = growing.before(index, z.dtype)
                window, recalled = Seen(*growing.parts(*before), in_window), Seen(*memory[group(index)], in_memory)
                z = growing.keep(*step(z, *before, Place(turned, window, recalled)))
            return z, growing.after()
        for index, layer in enumerate(self.decoder.layers):
            z = layer(z, rotation, partial(growing.extend, index), in_window, memory[group(index)], in_memory)
        return z, growing.after()

    def _in_steps(self, past: Past, num_columns: int) -> list[LayerStep]:
        """The layers, ready for the steps of a recurrence; none if this is no such step, or if they do not suit one."""
        steps = current_steps()
        if steps is None or not past.in_place or num_columns > MOST_COLUMNS or not self._attends_in_32_bits:
            return []
        return steps.prepared(self.decoder, _layer_steps)

    @property
    def _attends_in_32_bits(self) -> bool:
        """Scores that are written down would lose too much in 16 bits."""
        dtype, device = self.memory[0][0].dtype, self.memory[0][0].device.type
        is_wide = dtype.itemsize >= 4 and dtype == next(self.decoder.layers.parameters()).dtype
        return is_wide and (device == "cpu" or not torch.is_autocast_enabled(device))

    def _find_first_seen(self) -> list[int]:
        """For each column of this call the first of the window's and this call's entries that it, or a later one, sees."""
        num_before, most = self.window.labels.shape[1], self.decoder.config.sliding_window - 1
        if self.is_plain:
            return [max(num_before + column - most, 0) for column in range(self.plan.num_tokens)]
        is_real = self.labels != PADDING
        column_of_rank = (~is_real).long().sort(dim=1, stable=True).indices
        rank = is_real.cumsum(dim=1) - 1
        first = column_of_rank.gather(1, (rank - self.positions.clamp(max=most)).clamp(min=0))
        itself = torch.arange(self.labels.shape[1], device=first.device)
        first = torch.where(is_real, first, itself).amin(dim=0)[num_before:]
        return first.flip(0).cummin(dim=0).values.flip(0).tolist()

    def window_mask(self, columns: slice, seen: slice) -> Tensor | None:
        """[B or 1, 1, S, K]: tokens of the same document, at most W - 1 before the query, or the query itself."""
        rows = slice(0, 1) if self.is_plain else slice(None)  # which of them see alike
        labels, positions = self.plan.labels[rows, columns], self.plan.positions[rows, columns]
        num_queries, num_keys = labels.shape[1], seen.stop - seen.start
        if self.is_plain and num_queries == 1:
            return None
        distance = positions[:, :, None] - self.positions[rows, None, seen]
        near = (distance >= 0) & (distance < self.decoder.config.sliding_window)
        same = (labels[:, :, None] == self.labels[rows, None, seen]) & (labels[:, :, None] != PADDING)
        return ((near & same) | _itself(num_queries, num_keys, labels.device))[:, None]

    def memory_mask(self, columns: slice) -> tuple[Tensor | None, int, int]:
        """Which of the memory's entries the columns see, as `seen_causally`, and between which two all of them lie."""
        start, stop, _ = columns.indices(self.plan.num_tokens)
        labels, last, window = (
            self.plan.labels[:, columns],
            self.num_past + stop,
            self.decoder.config.memory_sliding_window,
        )
        if window is None:
            return seen_causally(labels, self.memory_labels[:, :last], self.is_plain), 0, last
        first = max(self.num_past + start - window + 1, 0) if self.is_plain else 0
        is_lone = self.is_plain and stop - start == 1
        return (
            None if is_lone else seen_in_window(labels, self.memory_labels[:, first:last], window, self.is_plain),
            first,
            last,
        )

    def window_after(self, past: Past) -> Window:
        """What later calls still see: the last W - 1 real tokens of each row."""
        if not past.keys:
            return self.window
        num_kept, num_keys = self.decoder.config.sliding_window - 1, self.labels.shape[1]
        first = 0 if self.keeps_all or not self.is_plain else max(num_keys - num_kept, 0)
        keys, values = (
            tuple(e.part(first, num_keys).tensor() for e in entries) for entries in (past.keys, past.values)
        )
        whole = Window(keys, values, self.labels[:, first:], self.positions[:, first:])
        if self.keeps_all:
            return whole
        if self.is_plain or num_keys <= num_kept:
            return whole.map(Tensor.clone)  # a view would keep all tokens in memory
        # Real tokens in order, behind the padding, so that the last columns are the last real tokens.
        order = (self.labels != PADDING).long().sort(dim=1, stable=True).indices[:, num_keys - num_kept :]
        return whole.map(lambda tensor: _pick_tokens(tensor, order))


def _layer_steps(decoder: Any, steps: Steps) -> list[LayerStep]:
    return [LayerStep(layer, steps) for layer in decoder.layers] if all(map(suits_steps, decoder.layers)) else []


class _Growing:
    """The entries of all layers during one run, which each layer adds its own to."""

    def __init__(self, run: DecoderRun, past: Past, seen: slice):
        self.run, self.past, self.seen = run, past, seen
        self.keys: list[Entries] = []
        self.values: list[Entries] = []

    def before(self, index: int, dtype: torch.dtype) -> tuple[Entries, Entries]:
        """Keys and values of layer `index` before this run, with room for those of the whole call."""
        if self.past.keys:
            return self.past.keys[index].with_room(), self.past.values[index].with_room()
        keys, values = (
            self._begin(entries[index], dtype) for entries in (self.run.window.keys, self.run.window.values)
        )
        return keys, values

    def _begin(self, of_window: Tensor, dtype: torch.dtype) -> Entries:
        dtype = torch.promote_types(of_window.dtype, dtype) if of_window.shape[2] else dtype
        return Entries(of_window.to(dtype), self.run.labels.shape[1], self.past.in_place)

    def parts(self, keys: Entries, values: Entries) -> tuple[Part, Part]:
        """What of the entries the run's columns see."""
        return keys.part(self.seen.start, self.seen.stop), values.part(self.seen.start, self.seen.stop)

    def keep(self, stream: Tensor, keys: Entries, values: Entries) -> Tensor:
        """Take over the next layer's entries after this run."""
        self.keys.append(keys)
        self.values.append(values)
        return stream

    def extend(self, index: int, keys: Tensor, values: Tensor) -> tuple[Part, Part]:
        """What layer `index` sees, its new keys and values included."""
        keys, values = self.run.stored(keys), self.run.stored(values)
        before = self.before(index, keys.dtype)
        self.keep(keys, before[0].append(keys), before[1].append(values))
        return self.parts(self.keys[-1], self.values[-1])

    def after(self) -> Past:
        return replace(self.past, keys=tuple(self.keys), values=tuple(self.values))


class DecoderColumns:
    """The decoder's columns from `first` on in any order, against keys and values of all of them.

    Args:
        run: the core of the call.
        past: before column `first`.
    """

    def __init__(self, run: DecoderRun, past: Past, first: int):
        self.layers, self.memory_group, window = run.decoder.layers, run.decoder.memory_group, run.window
        self.rotation = _of_columns(run.rotation, slice(first, None))
        self.num_before, num_keys = window.labels.shape[1] + first, run.labels.shape[1]
        self.in_window = run.window_mask(slice(first, None), slice(0, num_keys))
        self.in_memory = seen_in_window(
            run.plan.labels[:, first:], run.memory_labels, run.decoder.config.memory_sliding_window, run.is_plain
        )
        self.memory = [tuple(entries.part(0, entries.length) for entries in group) for group in past.memory]
        self.keys = [keys.whole() for keys in past.keys] if past.keys else list(window.keys)
        self.values = [values.whole() for values in past.values] if past.values else list(window.values)

    def run(self, z: Tensor, columns: Tensor) -> Tensor:
        rotation = _of_columns(self.rotation, columns)
        assert self.in_window is not None and self.in_memory is not None  # more than one column
        in_window, in_memory = self.in_window[:, :, columns], self.in_memory[:, :, columns]
        for index, layer in enumerate(self.layers):
            extend = partial(self._extended, index, columns)
            z = layer(z, rotation, extend, in_window, self.memory[self.memory_group(index)], in_memory)
        return z

    def _extended(self, index: int, columns: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for entries, new in ((self.keys, keys), (self.values, values)):
            entries[index] = with_columns(entries[index], new, self.num_before, columns)
        return self.keys[index], self.values[index]


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


def seen_in_window(labels: Tensor, key_labels: Tensor, window: int | None, is_plain: bool) -> Tensor:
    """[B or 1, 1, S, K] as `seen_causally`, but of the row's real tokens only the last `window`, the query included.

    A window of None: all of them.
    """
    if is_plain:
        labels, key_labels = labels[:1], key_labels[:1]  # all rows see alike
    seen = seen_causally(labels, key_labels, is_plain=False)
    assert seen is not None
    if window is None:
        return seen
    place = (key_labels != PADDING).cumsum(dim=1)
    is_near = place[:, -labels.shape[1] :, None] - place[:, None, :] < window
    return seen & is_near[:, None]


def _of_columns(rotation: Rotation, columns: slice | Tensor) -> Rotation:
    return rotation[0][:, :, columns], rotation[1][:, :, columns]


def _causal(num_tokens: int, device: torch.device) -> Tensor:
    """[1, 1, S, S] for as many keys as queries."""
    return torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def _itself(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    columns = torch.arange(num_keys, device=device)
    return (columns == columns[num_keys - num_queries :, None])[None]


def _token_dim(tensor: Tensor) -> int:
    """Where the tokens are in [B, N] or [B, H, N, E]."""
    return 1 if tensor.dim() == 2 else 2


def _pick_tokens(tensor: Tensor, order: Tensor) -> Tensor:
    if tensor.dim() == 2:
        return tensor.gather(1, order)
    index = order[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)
