"""Runs a range of a model's layers as the core of a recurrence, without touching the model's own code.

The model's own loop walks over its list of layers. While a `LayerLoop` is active the list hands out stand-ins: those of
the range record the arguments meant for their layer and pass the stream on, and the last one runs the whole range with
them. So layers before and after the range run once, each layer gets the mask and positions made for it, and the loop's
indices stay right.

Shapes: B rows, T tokens of this call, D hidden_size, K keys that a layer sees.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import StaticLayer

from crosscurrent.models.cache import branch_layer, map_layer, shallow_copy
from crosscurrent.models.t2mlr.range_columns import RangeColumns

WITHOUT_CHECKPOINTING = (
    "gradient_checkpointing=False in the Trainer's arguments (TRL's switch it on by default), or else "
    "model.gradient_checkpointing_disable()"
)
CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # what layers call their cache

_active: ContextVar["LayerLoop | None"] = ContextVar("active_layer_loop", default=None)


class LayerList(nn.ModuleList):
    """A model's list of layers. Outside an active `LayerLoop` it is a plain `ModuleList`."""

    def _handed_out(self) -> list[Any]:
        loop = _active.get()
        return loop.stand_ins if loop is not None and loop.layers is self else list(self._modules.values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._handed_out())

    def __getitem__(self, index: Any) -> Any:
        return self._handed_out()[index] if isinstance(index, slice) else super().__getitem__(index)


class LayerCall:
    """The arguments that the model's loop meant for one layer, and how to cut them to a range of columns."""

    def __init__(self, layer: nn.Module, index: int, arguments: dict[str, Any], num_tokens: int):
        self.layer, self.index, self.arguments, self.num_tokens = layer, index, arguments, num_tokens
        self.cache_name = next((name for name in CACHE_NAMES if name in arguments), None)

    @property
    def can_be_cut(self) -> bool:
        """Whether it is known how to cut each of the arguments to a range of columns."""
        return all(self._is_cuttable(name, value) for name, value in self.arguments.items())

    @staticmethod
    def _is_cuttable(name: str, value: Any) -> bool:
        if name == "attention_mask":
            return value is None or (isinstance(value, Tensor) and value.dim() == 4)
        is_known = name in ("position_ids", "cache_position", *CACHE_NAMES) or name.startswith("position_embeddings")
        return is_known or not (isinstance(value, Tensor) and value.dim() > 0)

    def run(self, hidden: Tensor, columns: slice, past: Any) -> Tensor:
        start, stop, _ = columns.indices(self.num_tokens)
        if (start, stop) == (0, self.num_tokens):
            return self._run(hidden, self.arguments, past)
        return self.run_cut(
            hidden, columns, past, lambda mask: self._cut_mask(mask, start, stop, past.layers[self.index])
        )

    def run_cut(self, hidden: Tensor, columns: slice | Tensor, past: Any, cut_mask: Callable[[Any], Any]) -> Tensor:
        """Run the layer on some columns, a range or [S] int64, with the arguments for them."""
        arguments = {
            name: cut_mask(value) if name == "attention_mask" else self._cut(name, value, columns)
            for name, value in self.arguments.items()
        }
        return self._run(hidden, arguments, past)

    def _run(self, hidden: Tensor, arguments: dict[str, Any], past: Any) -> Tensor:
        if self.cache_name is not None:
            arguments = arguments | {self.cache_name: past}
        return _checked_stream(self.layer, self.layer(hidden, **arguments))

    def _cut(self, name: str, value: Any, columns: slice | Tensor) -> Any:
        if name == "position_ids":
            return value if value is None else value[..., columns]
        if name.startswith("position_embeddings"):
            if isinstance(value, Tensor):
                return value[..., columns, :]
            return value if value is None else tuple(part[..., columns, :] for part in value)
        if name == "cache_position":
            return value if value is None else value[columns]
        if isinstance(value, Tensor) and value.dim() > 0 and name not in CACHE_NAMES:
            raise ValueError(
                f"{type(self.layer).__name__} is given a tensor {name!r} of shape {tuple(value.shape)}, which cannot be cut "
                "to single tokens here. Solve with cc.Jacobi, which runs whole sequences, or leave that argument out."
            )
        return value

    def _cut_mask(self, mask: Any, start: int, stop: int, cache_layer: Any) -> Any:
        num_queries = stop - start
        if isinstance(cache_layer, StaticLayer):  # its keys are all there from the start, most of them unwritten
            if isinstance(mask, Tensor) and mask.dim() == 4:
                return mask[..., start:stop, :]
            places = torch.arange(cache_layer.max_cache_len, device=next(self.layer.parameters()).device)
            return (places <= cache_layer.cumulative_length + places[:num_queries, None])[None, None]
        num_keys = _num_keys(cache_layer, num_queries)
        if mask is None:
            # No mask means causal attention over all keys, which a kernel takes for granted only for a lone query or
            # where there are as many keys as queries.
            if num_queries == 1 or num_keys == num_queries:
                return None
            ones = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool)
            return ones.tril(num_keys - num_queries).to(next(self.layer.parameters()).device)
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            raise ValueError(
                f"the attention mask is a {type(mask).__name__}, which cannot be cut to single tokens: load the model with "
                "attn_implementation='sdpa' or 'eager', or solve with cc.Jacobi."
            )
        last_key = mask.shape[-1] - (self.num_tokens - stop)
        return mask[..., start:stop, last_key - num_keys : last_key]


def _num_keys(cache_layer: Any, num_queries: int) -> int:
    """How many keys a layer's attention sees: a sliding layer keeps one entry less than its window."""
    if not hasattr(cache_layer, "get_seq_length"):
        raise ValueError(
            f"a layer keeps its keys and values in a {type(cache_layer).__name__}, so it shares those of another layer: "
            "such models cannot be solved token by token here. Use cc.Jacobi."
        )
    seen = int(cache_layer.get_seq_length())
    window = getattr(cache_layer, "sliding_window", None)
    return num_queries + (seen if window is None else min(seen, window - 1))


def drops_entries(layer: nn.Module) -> bool:
    """Whether the layer is under gradient checkpointing, where it is not given its cache."""
    return bool(getattr(layer, "gradient_checkpointing", False)) and layer.training and torch.is_grad_enabled()


def refuse_reentrant_checkpointing(layers: Iterable[Any]) -> None:
    """Raise if several processes train layers under the re-entrant kind of gradient checkpointing."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    settings = [getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {}) for layer in layers]
    if torch.distributed.get_world_size() > 1 and any(keywords.get("use_reentrant") for keywords in settings):
        raise ValueError(
            "gradient checkpointing with use_reentrant=True does not go with several processes: layers of the recurrent "
            "range run several times per step, and their gradients would be sent too early. Set "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, the default.'
        )


class LayerRange:
    """The core of T2MLR: layers [layer_start, layer_end) with the arguments that the model's loop gave them."""

    def __init__(self, calls: list[LayerCall], cache: DynamicCache | None, config: PreTrainedConfig):
        self.calls, self.cache, self.config = calls, cache, config
        self.random_states: dict[int, tuple[Tensor, Tensor | None]] = {}  # before the first pass from each column on
        self.runs: list[range] = []  # columns of each run, to sort recorded hidden states by

    @property
    def can_be_split(self) -> bool:
        """Not under gradient checkpointing, which drops entries, nor if the arguments of a layer cannot be cut."""
        if self.config._attn_implementation not in ("sdpa", "eager", None):
            return False
        return not any(drops_entries(call.layer) for call in self.calls) and all(call.can_be_cut for call in self.calls)

    @property
    def learns(self) -> bool:
        layers = [self.cache.layers[call.index] for call in self.calls] if self.cache is not None else []
        entries = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        weights = [parameter for call in self.calls for parameter in call.layer.parameters()]
        return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in (*weights, *entries))

    def start(self, keeps_entries: bool) -> DynamicCache | None:
        if keeps_entries and any(drops_entries(call.layer) for call in self.calls):
            raise ValueError(
                "gradient checkpointing drops the keys and values that token-by-token solving needs. Use "
                "cc.Jacobi(iterations=T, backward_iterations=T), which is exact for T tokens, or switch checkpointing off: "
                f"{WITHOUT_CHECKPOINTING}."
            )
        if not keeps_entries:
            return self.cache
        if self.cache is None:
            return DynamicCache(config=self.config.get_text_config(decoder=True))
        return self._map_layers(
            self.cache, lambda layer: layer
        )  # the cache itself goes on, and steps may run once more

    def run(self, z: Tensor, columns: slice, past: DynamicCache | None) -> tuple[Tensor, DynamicCache | None]:
        past = self._map_layers(past, branch_layer)
        start, stop, _ = columns.indices(self.calls[0].num_tokens)
        self._repeat_randomness(start, z.device)
        if not torch.compiler.is_compiling():  # a list that grows would have every pass compiled anew
            self.runs.append(range(start, stop))
        for call in self.calls:
            z = call.run(z, columns, past)
        return z, past

    def _repeat_randomness(self, start: int, device: torch.device) -> None:
        """Each pass over the same columns drops out the same features: without that the iteration has no fixed point."""
        if not self.calls[0].layer.training:
            return
        if start not in self.random_states:
            self.random_states[start] = (
                torch.get_rng_state(),
                torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            )
            return
        on_host, on_device = self.random_states[start]
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    def by_columns(self, past: DynamicCache | None, first: int) -> RangeColumns:
        if not self.can_be_split or past is None:
            raise ValueError(
                "the arguments of the layers cannot be cut to single columns here, as cc.Sweeps needs: load the model with "
                "attn_implementation='sdpa' or 'eager', or solve with cc.Jacobi, which runs whole sequences."
            )
        return RangeColumns(self, past, first)

    def map(self, past: DynamicCache | None, change: Callable[[Tensor], Tensor]) -> DynamicCache | None:
        return self._map_layers(past, lambda layer: map_layer(layer, change))

    def detach(self, past: DynamicCache | None) -> DynamicCache | None:
        return self.map(past, Tensor.detach)

    def _map_layers(self, past: DynamicCache | None, change: Callable[[Any], Any]) -> DynamicCache | None:
        """A cache whose layers of the range are changed copies. The given one stays as it is."""
        if past is None:
            return None
        changed = shallow_copy(past)
        changed.layers = list(past.layers)
        for call in self.calls:
            changed.layers[call.index] = change(past.layers[call.index])
        return changed


class LayerLoop:
    """One pass of the model's own loop, with a range of its layers handed over to `solve`.

    Args:
        layers: the model's list.
        layer_start, layer_end: the range.
        solve: given the stream entering the range and the recorded calls, the stream leaving it.
        edit_mask: changes the attention mask of every layer; None leaves them as they are.
    """

    def __init__(
        self,
        layers: LayerList,
        layer_start: int,
        layer_end: int,
        solve: Callable[[Tensor, list[LayerCall]], Tensor],
        edit_mask: Callable[[Any], Any] | None = None,
    ):
        self.layers, self.layer_end, self.solve, self.edit_mask = layers, layer_end, solve, edit_mask
        self.calls: list[LayerCall] = []
        self.stand_ins = [
            _StandIn(self, layer, index, in_range=layer_start <= index < layer_end)
            for index, layer in enumerate(layers._modules.values())
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        try:
            with _activated(self):
                yield
        finally:
            self.stand_ins.clear()  # they and the loop hold each other, and with them all that the call has computed


@contextmanager
def _activated(loop: LayerLoop | None) -> Iterator[None]:
    token = _active.set(loop)
    try:
        yield
    finally:
        _active.reset(token)


class _StandIn:
    """What the list hands out in place of a layer; it answers for the layer's attributes."""

    def __init__(self, loop: LayerLoop, layer: Any, index: int, in_range: bool):
        self._loop, self._layer, self._index, self._in_range = loop, layer, index, in_range

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        loop = self._loop
        if self._in_range or loop.edit_mask is not None:
            kwargs = _by_name(layer_argument_names(self._layer), args) | kwargs
            args = ()
        if loop.edit_mask is not None:
            kwargs["attention_mask"] = loop.edit_mask(kwargs.get("attention_mask"))
        if self._in_range:
            return self._record(_checked_stream(self._layer, hidden), kwargs)
        token = _active.set(None)  # whatever a hook on the layer calls sees the model's own list again
        try:
            return _checked_stream(self._layer, self._layer(hidden, *args, **kwargs))
        finally:
            _active.reset(token)

    def _record(self, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        loop = self._loop
        loop.calls.append(LayerCall(self._layer, self._index, arguments, hidden.shape[1]))
        if self._index != loop.layer_end - 1:
            return hidden
        with _activated(None):
            return loop.solve(hidden, loop.calls)


def _checked_stream(layer: Any, stream: Any) -> Tensor:
    if not isinstance(stream, Tensor) or stream.dim() != 3:
        what = f"a tensor of {stream.dim()} dimensions" if isinstance(stream, Tensor) else f"a {type(stream).__name__}"
        raise ValueError(
            f"{type(layer).__name__} hands on {what}: only models whose layers take and return the stream itself, a tensor "
            "[batch, tokens, hidden_size], can be retrofitted."
        )
    return stream


def _by_name(names: tuple[str, ...], args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(names[: len(args)], args, strict=True))


_argument_names: dict[type, tuple[str, ...]] = {}  # a dictionary, which compiled code can look into


def layer_argument_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of the arguments that a layer takes after the stream."""
    if type(layer) not in _argument_names:
        _argument_names[type(layer)] = tuple(inspect.signature(type(layer).forward).parameters)[2:]
    return _argument_names[type(layer)]
