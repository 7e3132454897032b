"""RLT: a causal encoder over all tokens in parallel, and a decoder that carries its last output from token to token.

Shapes: B rows, T tokens of this call, P tokens of earlier calls, D hidden_size, V vocab_size.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import StaticLayer

from crosscurrent.models.cache import RecurrentCache
from crosscurrent.models.call import Call, begin_call
from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.growing import GrowingLayer
from crosscurrent.models.inputs import read_positions, refuse_misspelt_arguments
from crosscurrent.models.outputs import RecurrentCausalLMOutput, causal_lm_loss
from crosscurrent.models.rlt.configuration_rlt import RLTConfig
from crosscurrent.models.rlt.decoder import Decoder, DecoderRun, Memory, Window, seen_causally, seen_in_window
from crosscurrent.models.rlt.layers import EncoderLayer, MemoryProjection, Rotary, Rotation
from crosscurrent.models.sharding import weights_come_and_go
from crosscurrent.recurrence import (
    PADDING,
    LastOutput,
    Merge,
    Plan,
    Problem,
    RecurrentState,
    Sequential,
    Solver,
)
from crosscurrent.recurrence.steps import apply_linear


class RLTCache(RecurrentCache):
    """Keys and values of the encoder's layers, then those of the memory groups; the decoder's window; the state.

    Where a window limits what a layer sees, entries that no later token sees are dropped: the cache of a model all whose
    attentions are windowed is as large after any number of tokens. They are kept while tokens can be taken back, in a static
    cache, and from a row's first padding or second document on.

    Args:
        num_layers: of the encoder's layers and memory groups together. Needed for max_cache_len alone.
        max_cache_len: as in `RecurrentCache`.

    Attributes:
        window: the decoder's window; None before the first call.
    """

    def __init__(self, num_layers: int = 0, max_cache_len: int | None = None) -> None:
        super().__init__(max_cache_len=max_cache_len)
        if max_cache_len is not None:
            self.layer_class_to_replicate = None
            self.layers = [StaticLayer(max_cache_len=max_cache_len) for _ in range(num_layers)]
        self.window: Window | None = None

    def extended(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Put new keys and values behind those of a layer. Returns all that hold a token."""
        num_tokens = self.num_columns + keys.shape[2]
        keys, values = self.update(keys, values, layer_idx)
        return keys[:, :, :num_tokens], values[:, :, :num_tokens]  # a static layer gives its unused places as well

    def num_held(self, layer_idx: int) -> int:
        """How many tokens a layer still has keys and values of: the last ones of all."""
        if self.num_places is not None or layer_idx >= len(self.layers):
            return self.num_columns
        layer: Any = self.layers[layer_idx]
        return 0 if layer.keys is None else int(layer.keys.shape[2])  # None: all has been taken back

    def keep_seen(self, windows: Sequence[int | None]) -> None:
        """Drop what no later token sees, if every row is in the middle of its one document and no token is taken back.

        Args:
            windows: for each layer how many tokens it sees, the current one included; None: all.
        """
        if self.num_places is not None or self.records_past:
            return
        for index, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            # Seldom, so that a step of decoding does not copy all that is kept.
            if window is not None and self.num_held(index) > 2 * (window - 1):
                assert isinstance(layer, GrowingLayer)
                layer.keep_last(window - 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens of each row it has seen, padding included, whatever it still holds of them."""
        return self.num_columns

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_rows(change)
        if self.window is not None:
            self.window = self.window.map(change)

    def _take_back(self, num_columns: int) -> None:
        super()._take_back(num_columns)
        if self.window is not None:
            self.window = self.window.without_last(num_columns)

    def reset(self) -> None:
        super().reset()
        self.window = None


class RLTModel(nn.Module):
    """Everything of an RLT but the output matrix."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        num_groups = config.num_memory_groups if config.num_decoder_layers else 0
        self.memory = nn.ModuleList(MemoryProjection(config) for _ in range(num_groups))
        self.merge = (
            Merge(config.hidden_size, config.feedback_scale, config.rms_norm_eps, config.initializer_range)
            if config.feedback_interval is not None
            else None
        )
        self.carry = LastOutput()
        self.decoder = Decoder(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def start_state(self, batch_size: int) -> RecurrentState:
        if self.merge is None:
            return RecurrentState.start(self.norm.weight.new_zeros(batch_size, self.config.hidden_size))
        return RecurrentState.start(self.merge.initial_state(batch_size))

    def problem(self, stream: Tensor, call: Call, positions: Tensor) -> Problem:
        """The recurrence to solve for embedded tokens [B, T, D] at positions [B, T]: the encoder and the memory have run."""
        rotation = self.rotary(positions, stream.dtype)
        encoded = self._encode(stream, rotation, call)
        window = call.branch.window if isinstance(call.branch, RLTCache) else None
        memory = self._remember(encoded, rotation, call)
        core = DecoderRun(
            decoder=self.decoder,
            rotation=rotation,
            memory=memory,
            window=window if window is not None else self.decoder.empty_window(len(encoded), encoded),
            plan=call.plan,
            memory_labels=_last_columns(call.key_labels, memory[0][0].shape[2]) if memory else call.key_labels,
            is_plain=call.is_plain,
            keeps_all=call.keeps_registers,
        )
        return Problem(
            inputs=encoded,
            plan=call.plan,
            state=call.state,
            fuse=self.merge,
            core=core,
            carry=self.carry,
            keeps_registers=call.keeps_registers,
            state_noise=self._state_noise(call),
            shares_weights=call.plan.num_tokens > 1 and not weights_come_and_go(self),
        )

    def _state_noise(self, call: Call) -> float:
        noise = self.config.state_noise if self.training else 0.0
        if noise and not isinstance(call.solver, Sequential):
            raise ValueError(
                f"state_noise={noise} needs the solver Sequential in training, not {type(call.solver).__name__}, whose "
                "passes would each see other states."
            )
        return noise

    def _encode(self, stream: Tensor, rotation: Rotation, call: Call) -> Tensor:
        """e [B, T, D], and the encoder's keys and values into the cache."""
        window, labels = self.config.encoder_sliding_window, call.plan.labels
        if window is None:
            seen = seen_causally(labels, call.key_labels, call.is_plain)
        else:
            num_keys = (call.branch.num_held(0) if isinstance(call.branch, RLTCache) else 0) + labels.shape[1]
            seen = seen_in_window(labels, _last_columns(call.key_labels, num_keys), window, call.is_plain)
        for index, layer in enumerate(self.encoder):
            stream = layer(stream, rotation, seen, _extender(call.branch, index))
        return stream

    def _remember(self, encoded: Tensor, rotation: Rotation, call: Call) -> Memory:
        """Keys and values of the memory: of all tokens so far if there is a cache, else of this call's."""
        return [
            _extender(call.branch, len(self.encoder) + group)(*projection(encoded, rotation))
            for group, projection in enumerate(self.memory)
        ]

    @property
    def windows(self) -> list[int | None]:
        """What each layer of the cache sees."""
        of_encoder, of_memory = self.config.encoder_sliding_window, self.config.memory_sliding_window
        return [of_encoder for _ in self.encoder] + [of_memory for _ in self.memory]


class RLTForCausalLM(RecurrentCausalLM):
    """A recurrent looped Transformer for language modelling and state tracking (RLT report, September 2026).

    `feedback_interval` chooses the variant: 1 is RLT-1, B > 1 RLT-2, None RLT-0.

    Example:
        >>> import torch
        >>> config = RLTConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_encoder_layers=2,
        ...                    num_decoder_layers=2)
        >>> model = RLTForCausalLM(config)
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 61])
    """

    config: RLTConfig
    config_class = RLTConfig
    cache_class = RLTCache
    recurrent_modules = ("model.merge",)
    resident_modules = ("model.merge", "model.norm")
    base_model_prefix = "model"
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]

    def __init__(self, config: RLTConfig):
        super().__init__(config)
        self.model = RLTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tied_weights_keys = self._tied_names()
        if config.tie_encoder_decoder:
            self._no_split_modules = ["RLTModel"]  # layers that share weights stay on one device
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        return dict(self._tied_weights_keys)  # transformers' own would drop all unless tie_word_embeddings is set

    def _tied_names(self) -> dict[str, str]:
        """Which parameters (keys) are another one under a second name (values)."""
        tied = {}
        if self.config.tie_word_embeddings:
            tied["lm_head.weight"] = "model.embed_tokens.weight"
        if self.config.tie_encoder_decoder:
            for index in range(self.config.num_decoder_layers):
                for part in ("self_attn", "mlp"):
                    for name, _ in self.model.encoder[index].get_submodule(part).named_parameters():
                        if name.endswith("proj.weight"):
                            own = f"model.decoder.layers.{index}.{part}.{name}"
                            tied[own] = f"model.encoder.{index}.{part}.{name}"
        return tied

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        if isinstance(module, Merge):
            init.normal_(module.start_state, std=self.config.initializer_range)

    def set_feedback_scale(self, feedback_scale: float) -> None:
        """Change alpha of the merge (equation 2.11), in the configuration as well.

        Raises:
            ValueError: the model has no feedback, or the number is not finite.
        """
        if self.model.merge is None:
            raise ValueError("feedback_interval is None: an RLT-0 has no feedback whose scale could be set.")
        if not math.isfinite(feedback_scale):
            raise ValueError(f"feedback_scale={feedback_scale} is not allowed: give a finite number.")
        self.config.feedback_scale = self.model.merge.feedback_scale = feedback_scale

    def start_state(self, batch_size: int) -> RecurrentState:
        return self.model.start_state(batch_size)

    def new_cache(self, max_cache_len: int | None = None) -> RLTCache:
        return RLTCache(len(self.model.encoder) + len(self.model.memory), max_cache_len)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: RLTCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        recurrent_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        solver: Solver | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RLTCache | None = None,
        **kwargs: Any,
    ) -> RecurrentCausalLMOutput | tuple[Any, ...]:
        """Score a batch of sequences, or continue them.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T] or [B, P + T], nonzero for real tokens; padding may stand anywhere.
            cache: of the earlier calls. It is changed only if the call succeeds.
            inputs_embeds: [B, T, D] in place of input_ids.
            labels: [B, T] int64, not shifted, -100 to leave out. Padding and first tokens of documents never count.
            use_cache: return a cache. None: if one is given, or the model is not training and `config.use_cache`.
            logits_to_keep: logits of the last so many tokens only, or of the given columns; 0: of all.
            recurrent_mask: [B, T], nonzero for tokens that merge with the state. None: all do.
            segment_ids: [B, T] integers that number the documents of a row upwards. Nothing crosses from one document
                to the next. None: all tokens continue the row's document.
            solver: None: `config.solver`.
            position_ids: [B, T]; not needed: positions are counted from 0 over the real tokens of each document, and
                others are refused. If they restart within a row and there is neither a mask nor a cache, each restart
                opens a document. With `config.given_positions` they are needed, may be any, and open no documents.
            past_key_values: the older name of `cache`.
            kwargs: num_items_in_batch and return_dict; others are refused.

        Returns:
            logits [B, T, V] and loss; cache; solver_report.

        Raises:
            ValueError: an input does not fit; the message says what is allowed.
        """
        return_dict, num_items = kwargs.pop("return_dict", None), kwargs.pop("num_items_in_batch", None)
        _refuse_unused(kwargs)
        if (self.model.merge is None) != (self.config.feedback_interval is None):
            raise ValueError(
                f"feedback_interval was changed to {self.config.feedback_interval} after the model was made: with and "
                "without feedback it has different weights. Make a model from a new RLTConfig."
            )
        call = begin_call(
            self,
            input_ids,
            inputs_embeds,
            device=self.model.norm.weight.device,
            attention_mask=attention_mask,
            recurrent_mask=recurrent_mask,
            segment_ids=segment_ids,
            position_ids=None if self.config.given_positions else position_ids,
            cache=cache if cache is not None else past_key_values,
            use_cache=use_cache,
            solver=solver,
            return_dict=return_dict,
        )
        positions = _positions(position_ids, call.plan, self.config.given_positions)
        stream = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        with call.steps():
            problem = self.model.problem(stream, call, positions)
            solution = call.solve(problem)
            logits = apply_linear(self.lm_head, self.model.norm(solution.outputs[:, kept]))
        if isinstance(call.branch, RLTCache):
            assert isinstance(problem.core, DecoderRun)
            call.branch.window = problem.core.window_after(solution.past)
            if call.is_plain:
                call.branch.keep_seen(self.model.windows)
        loss = None if labels is None else causal_lm_loss(logits, labels, call.plan.labels, num_items)
        result = RecurrentCausalLMOutput(loss=loss, logits=logits)
        return call.finish(result, solution)


def _extender(cache: RecurrentCache | None, index: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Puts what the cache's layer `index` holds before new keys and values, and remembers them."""
    if cache is None:
        return lambda keys, values: (keys, values)
    assert isinstance(cache, RLTCache)
    return partial(cache.extended, layer_idx=index)


def _last_columns(tensor: Tensor, num_columns: int) -> Tensor:
    return tensor[:, tensor.shape[1] - num_columns :]


def _refuse_unused(kwargs: dict[str, Any]) -> None:
    refuse_misspelt_arguments(kwargs, RLTForCausalLM.forward)
    unused = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    if unused:
        raise ValueError(f"RLTForCausalLM.forward does not take {', '.join(unused)}.")


def _positions(position_ids: Tensor | None, plan: Plan, are_given: bool) -> Tensor:
    """[B, T] where the rotary embedding sees the tokens of a call."""
    if position_ids is None and are_given:
        raise ValueError("config.given_positions is set: forward needs position_ids [batch, tokens].")
    if position_ids is None:
        return plan.positions
    is_real = plan.labels != PADDING
    given = read_positions(position_ids, is_real)
    if not are_given and bool((given != plan.positions)[is_real].any()):
        raise ValueError(
            "position_ids differ from the positions that an RLT counts itself, from 0 over the real tokens of each "
            "document: leave them out, and mark documents with segment_ids. A model whose config.given_positions is set "
            "takes any."
        )
    return given if are_given else plan.positions
