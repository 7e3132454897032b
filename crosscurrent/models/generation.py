"""How recurrent models take part in transformers' `generate`."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateBeamDecoderOnlyOutput
from transformers.generation.utils import GENERATION_MODES_MAPPING

from crosscurrent.models.assisted import AssistedDecoding
from crosscurrent.models.cache import RecurrentCache, as_recurrent_cache
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.guidance import guide, refuse_unguided_rows
from crosscurrent.models.inputs import positions_are_given
from crosscurrent.models.loading import CheckedLoading
from crosscurrent.models.prompts import (
    check_prompt,
    refuse_chunks,
    refuse_empty_prompts,
    refuse_settings_of_healed_prompts,
)
from crosscurrent.models.saving import CheckedSaving
from crosscurrent.models.sharding import weights_come_and_go
from crosscurrent.recurrence import Solver
from crosscurrent.recurrence.steps import fixed_weights


class RecurrentCausalLM(CheckedLoading, CheckedSaving, AssistedDecoding, GenerationMixin):
    """What all recurrent models share: checked loading and saving, and `generate` with the recurrent state in the cache."""

    cache_class: type[RecurrentCache]

    def new_cache(self, max_cache_len: int | None = None) -> RecurrentCache:
        """An empty cache for this model, to pass as `cache` to `forward` or `generate`.

        Args:
            max_cache_len: make room for so many tokens at once (a static cache, for `torch.compile`).

        Raises:
            ValueError: the model has no static cache.
        """
        raise NotImplementedError

    def generate(  # type: ignore[override]
        self,
        inputs: Tensor | None = None,
        *args: Any,
        prompt_recurrence: bool | None = None,
        recurrent_mask: Tensor | None = None,
        solver: Solver | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `generate`, with three more arguments.

        Args:
            inputs: [B, P] token ids of the prompts, padded on the left. With a cache: the whole sequence, of which the
                cache holds the beginning. A cache of one row serves several prompts, and several returned sequences or
                beams of each: then copies of it are extended, and it stays as it was.
            prompt_recurrence: whether prompt tokens are recurrent; None: as `config.prompt_recurrence` says. Generated
                tokens always are.
            recurrent_mask: [B, P] which prompt tokens are recurrent, in place of prompt_recurrence.
            solver: how the prompt is solved; None: as the model is configured. `Sequential()` is exact. Single tokens
                are exact with every solver.

        Returns:
            As in transformers, but without the cache after beam search: its rows are not those of the returned sequences.

        Raises:
            ValueError: a prompt is all padding, the cache is of the wrong kind, or a way of decoding was asked for
                that is not supported.
        """
        for name in ("cache", "past_key_values"):  # either name, whichever this version of transformers has
            if name in kwargs:
                kwargs[CACHE_NAME] = kwargs.pop(name)
        if kwargs.get("segment_ids") is not None:
            raise ValueError("segment_ids cannot be generated from: give each document as a row of its own.")
        if recurrent_mask is not None and prompt_recurrence is not None:
            raise ValueError(
                "give either recurrent_mask or prompt_recurrence: both say which prompt tokens are recurrent."
            )
        prompt = next(
            (p for p in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if p is not None), None
        )
        refuse_empty_prompts(prompt, kwargs.get("attention_mask"))
        is_assistant = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if prompt is not None and not is_assistant:
            check_prompt(prompt, recurrent_mask, kwargs.get(CACHE_NAME))
        if positions_are_given(self.config) and kwargs.get("position_ids") is None and not is_assistant:
            raise ValueError(
                "config.given_positions is set: generate needs position_ids [batch, tokens] of the prompt. Each new token "
                "stands one further."
            )
        if prompt_recurrence is None:
            prompt_recurrence = getattr(self.config, "prompt_recurrence", True)
        if recurrent_mask is None and not prompt_recurrence and prompt is not None and not is_assistant:
            recurrent_mask = torch.zeros(prompt.shape[:2], dtype=torch.bool, device=prompt.device)
        for name, value in (("recurrent_mask", recurrent_mask), ("solver", solver)):
            if value is not None:
                kwargs[name] = value
        with nullcontext() if weights_come_and_go(self) else fixed_weights():
            output = super().generate(inputs, *args, **kwargs)
        if isinstance(output, GenerateBeamDecoderOnlyOutput):  # its cache follows the running beams
            return type(output)(**{name: value for name, value in output.items() if name != CACHE_NAME})
        return output

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it is: `forward` makes those of the layers, and knows of documents and padding by it."""
        return attention_mask

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # inputs_embeds is named because transformers looks for it in the signature
        if next_sequence_length is None:
            next_sequence_length = _num_new_tokens(input_ids, kwargs.get("attention_mask"), kwargs.get(CACHE_NAME))
        model_inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, inputs_embeds=inputs_embeds, **kwargs
        )
        mask = model_inputs.get("recurrent_mask")
        if mask is not None:
            ids, embeds = model_inputs.get("input_ids"), model_inputs.get("inputs_embeds")
            num_new = (ids if ids is not None else embeds).shape[1]  # type: ignore[union-attr]
            cache = model_inputs.get(CACHE_NAME)
            start = 0 if cache is None else cache.num_columns
            model_inputs["recurrent_mask"] = _mask_of(mask, start, start + num_new)
        return model_inputs

    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inferred: Tensor = super()._prepare_attention_mask_for_generation(*args, **kwargs)
        refuse_empty_prompts(None, inferred)
        return inferred

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full", "static"):
            raise ValueError(
                f"cache_implementation={kind!r} is not supported: that cache holds no recurrent state. Leave it out, or "
                "give 'static'."
            )
        if generation_config.token_healing:
            refuse_settings_of_healed_prompts(model_kwargs)
        given = as_recurrent_cache(model_kwargs.get(CACHE_NAME), self.cache_class)
        if generation_config.prefill_chunk_size is not None:
            has_embeds = model_kwargs.get("inputs_embeds") is not None
            refuse_chunks(generation_config.prefill_chunk_size, has_embeds, given)
        if given is not None:
            copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            given = _for_rows(given, batch_size, copies)
        if generation_config.use_cache is not False:
            cache = model_kwargs[CACHE_NAME] = (
                given if given is not None else self.new_cache(max_cache_length if kind == "static" else None)
            )
            if generation_config.is_assistant:
                cache.activate_past_recording()  # rejected drafts are taken back

    def _get_deprecated_gen_repo(
        self, generation_mode: Any, trust_remote_code: bool, custom_generate: Any = None
    ) -> str | None:
        repository = GENERATION_MODES_MAPPING[generation_mode]
        if custom_generate is None and "/" in repository:
            raise ValueError(
                f"{generation_mode.value} is not supported: it is no longer part of transformers but code from the hub "
                f"({repository}), which knows nothing of the recurrent state. Use greedy decoding, sampling or beam search."
            )
        return None

    def _get_logits_processor(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if positions_are_given(self.config) and generation_config.guidance_scale not in (None, 1):
            raise ValueError(
                f"guidance_scale={generation_config.guidance_scale} is not supported with config.given_positions: the "
                "unconditional sequence has no positions."
            )
        refuse_unguided_rows(generation_config, kwargs["encoder_input_ids"], kwargs.get("negative_prompt_ids"))
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        guide(processors, self, kwargs["model_kwargs"])
        return processors

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: its paged cache holds keys and values only.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "continuous batching (generate_batch, cache_implementation='paged', use_transformers_continuous_batching) is "
            "not supported: its cache has no place for the recurrent state. Pad the prompts on the left and pass them to "
            "generate as one batch."
        )


def _mask_of(recurrent_mask: Tensor, start: int, stop: int) -> Tensor | None:
    """The part of a prompt's mask for columns `start` to `stop`. Tokens after the prompt are recurrent."""
    num_generated = stop - max(start, recurrent_mask.shape[1])
    if num_generated == stop - start:
        return None
    mask = recurrent_mask != 0
    if num_generated > 0:
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], num_generated)], dim=1)
    return mask[:, start:stop]


def _for_rows(cache: RecurrentCache, num_prompts: int, copies: int) -> RecurrentCache:
    """A cache with a row for each sequence that is to be generated: the given one, or a copy with its rows repeated."""
    num_rows = None if cache.key_labels is None else cache.key_labels.shape[0]
    repeats = {1: num_prompts * copies, num_prompts: copies}.get(num_rows or 0, 1)
    if repeats == 1:
        return cache
    wide = copy.deepcopy(cache)
    wide.batch_repeat_interleave(repeats)
    return wide


def _num_new_tokens(input_ids: Tensor, attention_mask: Tensor | None, cache: RecurrentCache | None) -> int | None:
    """How many of a whole sequence's tokens the cache does not hold yet; None if all, or if it is no whole sequence."""
    if cache is None or cache.num_columns == 0 or attention_mask is None or attention_mask.dim() != 2:
        return None
    is_whole = attention_mask.shape[1] == input_ids.shape[1] > cache.num_columns
    return input_ids.shape[1] - cache.num_columns if is_whole else None
