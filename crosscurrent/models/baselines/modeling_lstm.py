"""An LSTM language model, as a baseline for state tracking.

Shapes: B rows, T tokens, V vocab_size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast

from crosscurrent.models.baselines.configuration_lstm import LSTMConfig
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.inputs import check_token_ids, document_labels, real_tokens
from crosscurrent.models.loading import CheckedLoading
from crosscurrent.models.outputs import causal_lm_loss
from crosscurrent.models.saving import CheckedSaving


class LSTMState(NamedTuple):
    """What an LSTM carries from call to call: of each layer the hidden and the cell state, [num_hidden_layers, B, D]."""

    hidden: Tensor
    cell: Tensor


class LSTMForCausalLM(CheckedLoading, CheckedSaving, GenerationMixin):
    """torch's LSTM under the interface of a transformers model.

    Padding may stand on the right only. A call goes on from the state of another if it is asked to (`use_cache`), which
    `generate` does not: it reads the whole sequence again for every token.

    Example:
        >>> import torch
        >>> model = LSTMForCausalLM(LSTMConfig(vocab_size=11, hidden_size=16))
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 11])
    """

    config: LSTMConfig
    config_class = LSTMConfig
    base_model_prefix = "lstm"
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: LSTMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lstm = nn.LSTM(config.hidden_size, config.hidden_size, config.num_hidden_layers, batch_first=True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.LSTM):
            bound = module.hidden_size**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """As transformers, for all tokens at once: the caches that it makes are for attention."""
        without = {"next_sequence_length": None, CACHE_NAME: None, "use_cache": False}
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **(kwargs | without))
        return prepared

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: LSTMState | None = None,
        past_key_values: LSTMState | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Score a batch of sequences.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T], nonzero for real tokens; padding on the right.
            inputs_embeds: [B, T, D] in place of input_ids.
            labels: [B, T] int64, not shifted, -100 to leave out.
            use_cache: return the state after the last token, for a call that goes on from there. None: no.
            num_items_in_batch: divide the loss by this (gradient accumulation).
            cache: the state to go on from.
            past_key_values: the older name of `cache`.
            kwargs: position_ids and return_dict, which change nothing; others are refused.

        Returns:
            logits [B, T, V] and loss; cache (before transformers 5.24: past_key_values).

        Raises:
            ValueError: an input does not fit.
        """
        unused = sorted(set(kwargs) - {"position_ids", "return_dict", "logits_to_keep"})
        if unused:
            raise ValueError(f"LSTMForCausalLM.forward does not take {', '.join(unused)}.")
        shape = check_token_ids(input_ids, inputs_embeds, self.config.vocab_size)
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        is_real = real_tokens(attention_mask, shape, None, stream.device)
        if bool((is_real[:, 1:] & ~is_real[:, :-1]).any()):
            raise ValueError("attention_mask has padding before a real token: an LSTM takes padding on the right only.")
        if use_cache and not bool(is_real.all()):
            raise ValueError("use_cache=True: there is no going on from the state after padding. Leave it out.")
        outputs, state = self.lstm(stream, _state_of(cache if cache is not None else past_key_values, len(stream)))
        logits = self.lm_head(outputs)
        kept: dict[str, Any] = {CACHE_NAME: LSTMState(*state)} if use_cache else {}
        if labels is None:
            return CausalLMOutputWithPast(logits=logits, **kept)
        token_labels = document_labels(None, None, is_real, is_real.new_zeros(len(is_real), dtype=torch.int64))
        loss = causal_lm_loss(logits, labels, token_labels, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)


def _state_of(cache: Any, batch_size: int) -> LSTMState | None:
    if isinstance(cache, LSTMState) and cache.hidden.shape[1] != batch_size:
        raise ValueError(f"the state is of {cache.hidden.shape[1]} rows, the call of {batch_size}: give as many.")
    if cache is None or isinstance(cache, LSTMState):
        return cache
    raise ValueError(
        f"the cache is a {type(cache).__name__}: an LSTM goes on from the LSTMState that a call with use_cache=True "
        "returns. Give none, and leave use_cache out of generate."
    )
