"""Assisted and prompt-lookup decoding: drafts are verified together, and those rejected are taken back exactly."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from crosscurrent.models.cache import RecurrentCache
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.inputs import positions_are_given
from crosscurrent.recurrence import Sequential


class AssistedDecoding(GenerationMixin):
    """The part of `generate` that verifies drafts, for models with a `RecurrentCache`."""

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As transformers, except that the prompt and the drafts are solved apart.

        How the prompt is solved is the caller's choice (`solver`); a draft is verified exactly, as single tokens are.
        """
        transformers_own: Any = super()
        config = kwargs["generation_config"]
        _refuse_unsupported_assistance(input_ids, config, kwargs)
        cache: RecurrentCache = kwargs[CACHE_NAME]
        was_recording = cache.records_past
        cache.activate_past_recording()
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones_like(input_ids)
        if input_ids.shape[1] - 1 > cache.num_columns:
            own = inspect.signature(GenerationMixin._assisted_decoding).parameters
            model_kwargs = {name: value for name, value in kwargs.items() if name not in own}
            for name in ("attention_mask", "position_ids"):
                if model_kwargs.get(name) is not None:
                    model_kwargs[name] = model_kwargs[name][..., :-1]
            transformers_own._prefill(input_ids[:, :-1], config, model_kwargs)
        kwargs["solver"] = Sequential()
        output = transformers_own._assisted_decoding(input_ids, *args, **kwargs)
        if not was_recording:
            cache.deactivate_past_recording()
        return output

    def _get_candidate_generator(  # type: ignore[override]
        self, *args: Any, input_ids: Tensor, assistant_model: Any = None, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """An assistant gets what is meant for its kind of model."""
        shared = {name: value for name, value in model_kwargs.items() if name not in ("solver", "recurrent_mask")}
        transformers_own: Any = super()
        if isinstance(assistant_model, AssistedDecoding):
            assistant: Any = assistant_model
            mask = model_kwargs.get("recurrent_mask")
            if mask is None and not getattr(assistant.config, "prompt_recurrence", True):
                mask = torch.zeros_like(input_ids, dtype=torch.bool)
            shared |= {} if mask is None else {"recurrent_mask": mask}
            own: Any = self
            if positions_are_given(own.config) and not positions_are_given(assistant.config):
                shared.pop("position_ids", None)  # it counts its own
        return transformers_own._get_candidate_generator(
            *args, input_ids=input_ids, assistant_model=assistant_model, model_kwargs=shared, **kwargs
        )


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
    if generation_config.guidance_scale not in (None, 1):
        raise ValueError(
            "guidance_scale is not supported in assisted decoding: its own cache would keep rejected drafts."
        )
    if kwargs[CACHE_NAME].num_places is not None:
        raise ValueError("assisted decoding needs a cache that grows: leave out cache_implementation.")
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(generation_config, name):
            raise ValueError(f"{name} is not supported in assisted decoding: score the finished sequence with forward.")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("assisted decoding compares token ids: give input_ids, not inputs_embeds.")
