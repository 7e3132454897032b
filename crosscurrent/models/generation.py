"""How recurrent models take part in transformers' `generate`."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from crosscurrent.models.cache import RecurrentCache, as_recurrent_cache
from crosscurrent.models.checkpoints import CheckedLoading
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.recurrence import Sequential, Solver


class RecurrentCausalLM(CheckedLoading, GenerationMixin):
    """What all recurrent models share: checked loading, and `generate` with the recurrent state inside the cache."""

    cache_class: type[RecurrentCache]

    def new_cache(self) -> RecurrentCache:
        """An empty cache for this model, to pass as `cache` to `forward` or `generate`."""
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
                cache holds the beginning.
            prompt_recurrence: whether prompt tokens are recurrent; None: as `config.prompt_recurrence` says. Generated
                tokens always are.
            recurrent_mask: [B, P] which prompt tokens are recurrent, in place of prompt_recurrence.
            solver: how the prompt is solved; None: as the model is configured. `Sequential()` is exact. Single tokens
                are exact with every solver.

        Raises:
            ValueError: a prompt is all padding, the cache is of the wrong kind, or a way of decoding was asked for
                that is not supported.
        """
        if kwargs.get("segment_ids") is not None:
            raise ValueError("segment_ids cannot be generated from: give each document as a row of its own.")
        if recurrent_mask is not None and prompt_recurrence is not None:
            raise ValueError(
                "give either recurrent_mask or prompt_recurrence: both say which prompt tokens are recurrent."
            )
        prompt = next(
            (p for p in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if p is not None), None
        )
        _refuse_empty_prompts(prompt, kwargs.get("attention_mask"))
        is_assistant = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if prompt is not None and not is_assistant:
            _check_prompt(prompt, recurrent_mask, kwargs.get("cache", kwargs.get("past_key_values")))
        if prompt_recurrence is None:
            prompt_recurrence = getattr(self.config, "prompt_recurrence", True)
        if recurrent_mask is None and not prompt_recurrence and prompt is not None and not is_assistant:
            recurrent_mask = torch.zeros(prompt.shape[:2], dtype=torch.bool, device=prompt.device)
        for name, value in (("recurrent_mask", recurrent_mask), ("solver", solver)):
            if value is not None:
                kwargs[name] = value
        return super().generate(inputs, *args, **kwargs)

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
        if kwargs.get("is_first_iteration"):
            _refuse_empty_prompts(None, model_inputs.get("attention_mask"))  # also if transformers inferred it
        mask = model_inputs.get("recurrent_mask")
        if mask is not None:
            ids, embeds = model_inputs.get("input_ids"), model_inputs.get("inputs_embeds")
            num_new = (ids if ids is not None else embeds).shape[1]  # type: ignore[union-attr]
            cache = model_inputs.get(CACHE_NAME)
            start = 0 if cache is None or cache.key_labels is None else cache.key_labels.shape[1]
            num_generated = max(start + num_new - mask.shape[1], 0)  # tokens after the prompt are recurrent
            mask = torch.cat([mask != 0, mask.new_ones(mask.shape[0], num_generated, dtype=torch.bool)], dim=1)
            model_inputs["recurrent_mask"] = mask[:, start : start + num_new]
        return model_inputs

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported: leave it out, or give "
                "'dynamic'."
            )
        given = as_recurrent_cache(model_kwargs.get(CACHE_NAME), self.cache_class)
        if generation_config.use_cache is not False:
            cache = model_kwargs[CACHE_NAME] = given if given is not None else self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()  # rejected drafts are taken back

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As transformers, except that the prompt and the drafts are solved apart.

        How the prompt is solved is the caller's choice (`solver`); a draft is verified exactly, as single tokens are.
        """
        config = kwargs["generation_config"]
        _refuse_unsupported_assistance(input_ids, config, kwargs)
        cache: RecurrentCache = kwargs[CACHE_NAME]
        cache.activate_past_recording()
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones_like(input_ids)
        num_held = 0 if cache.key_labels is None else cache.key_labels.shape[1]
        if input_ids.shape[1] - 1 > num_held:
            own = inspect.signature(GenerationMixin._assisted_decoding).parameters
            model_kwargs = {name: value for name, value in kwargs.items() if name not in own}
            for name in ("attention_mask", "position_ids"):
                if model_kwargs.get(name) is not None:
                    model_kwargs[name] = model_kwargs[name][..., :-1]
            self._prefill(input_ids[:, :-1], config, model_kwargs)
        kwargs["solver"] = Sequential()
        return super()._assisted_decoding(input_ids, *args, **kwargs)

    def _get_candidate_generator(  # type: ignore[override]
        self, *args: Any, input_ids: Tensor, assistant_model: Any = None, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """An assistant gets what is meant for its kind of model."""
        shared = {name: value for name, value in model_kwargs.items() if name not in ("solver", "recurrent_mask")}
        if isinstance(assistant_model, RecurrentCausalLM):
            mask = model_kwargs.get("recurrent_mask")
            if mask is None and not getattr(assistant_model.config, "prompt_recurrence", True):
                mask = torch.zeros_like(input_ids, dtype=torch.bool)
            shared |= {} if mask is None else {"recurrent_mask": mask}
        return super()._get_candidate_generator(
            *args, input_ids=input_ids, assistant_model=assistant_model, model_kwargs=shared, **kwargs
        )


def _num_new_tokens(input_ids: Tensor, attention_mask: Tensor | None, cache: RecurrentCache | None) -> int | None:
    """How many of a whole sequence's tokens the cache does not hold yet; None if all, or if it is no whole sequence."""
    if cache is None or cache.key_labels is None or attention_mask is None or attention_mask.dim() != 2:
        return None
    is_whole = attention_mask.shape[1] == input_ids.shape[1] > cache.key_labels.shape[1]
    return input_ids.shape[1] - cache.key_labels.shape[1] if is_whole else None


def _refuse_unsupported_assistance(input_ids: Tensor, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """Raise for what assisted decoding does not do, before the first token."""
    if CACHE_NAME not in kwargs:
        raise ValueError("assisted decoding needs a cache to take drafts back from: leave out use_cache=False.")
    if input_ids.shape[0] != 1:
        raise ValueError(f"assisted decoding takes one prompt at a time, and there are {input_ids.shape[0]} rows.")
    if generation_config.assistant_early_exit is not None:
        raise ValueError(
            "assistant_early_exit is not supported: a model cut off after a few layers has no recurrent range. Give an "
            "assistant_model, or prompt_lookup_num_tokens."
        )
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(generation_config, name):
            raise ValueError(f"{name} is not supported in assisted decoding: score the finished sequence with forward.")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("assisted decoding compares token ids: give input_ids, not inputs_embeds.")


def _check_prompt(prompt: Tensor, recurrent_mask: Tensor | None, cache: Any) -> None:
    if recurrent_mask is not None and recurrent_mask.shape != prompt.shape[:2]:
        raise ValueError(
            f"recurrent_mask has shape {tuple(recurrent_mask.shape)}: it needs one value per token of the prompt, "
            f"{tuple(prompt.shape[:2])}."
        )
    if isinstance(cache, RecurrentCache) and cache.key_labels is not None:
        num_held = cache.key_labels.shape[1]
        if prompt.dim() > 1 and prompt.shape[1] <= num_held:
            raise ValueError(
                f"the prompt has {prompt.shape[1]} tokens and the cache holds {num_held} already: give the whole sequence, "
                "what the cache holds and at least one token more. `generate` extends the cache it is given: to start "
                "several times from one, pass copy.deepcopy(cache)."
            )


def _refuse_empty_prompts(prompt: Tensor | None, attention_mask: Tensor | None) -> None:
    if prompt is not None and prompt.dim() > 1 and prompt.shape[1] == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}: give at least one token to each row.")
    if attention_mask is not None and attention_mask.dim() == 2:
        empty = (attention_mask != 0).sum(dim=1) == 0
        if bool(empty.any()):
            raise ValueError(
                f"row {int(empty.nonzero()[0])} of the prompts is all padding: give it at least one real token, or leave "
                "the row out."
            )
