"""Checks of what a user passes to `generate`, made before the first token."""

from typing import Any

from torch import Tensor

from crosscurrent.models.cache import RecurrentCache
from crosscurrent.models.compat import CACHE_NAME


def check_prompt(prompt: Tensor, recurrent_mask: Tensor | None, cache: Any) -> None:
    if recurrent_mask is not None and recurrent_mask.shape != prompt.shape[:2]:
        raise ValueError(
            f"recurrent_mask has shape {tuple(recurrent_mask.shape)}: it needs one value per token of the prompt, "
            f"{tuple(prompt.shape[:2])}."
        )
    num_held = cache.num_columns if isinstance(cache, RecurrentCache) else 0
    if prompt.dim() > 1 and prompt.shape[1] <= num_held:
        raise ValueError(
            f"the prompt has {prompt.shape[1]} tokens and the cache holds {num_held} already: give the whole sequence, what "
            "the cache holds and at least one token more. `generate` extends the cache it is given: to start several times "
            "from one, pass copy.deepcopy(cache)."
        )


def refuse_chunks(chunk_size: int, prompt_is_embeddings: bool, cache: RecurrentCache | None) -> None:
    if chunk_size < 1:
        raise ValueError(f"prefill_chunk_size={chunk_size} is not allowed: give at least 1.")
    if prompt_is_embeddings:
        raise ValueError("prefill_chunk_size with inputs_embeds is not supported: transformers cuts token ids only.")
    if CACHE_NAME != "cache" and cache is not None and cache.key_labels is not None:
        raise ValueError(
            "prefill_chunk_size with a cache that holds tokens already is not supported with this version of transformers, "
            "which would read those tokens twice: leave prefill_chunk_size out, or install transformers 5.24 or newer."
        )


def refuse_settings_of_healed_prompts(model_kwargs: dict[str, Any]) -> None:
    for name in ("solver", "recurrent_mask"):
        if model_kwargs.get(name) is not None:
            raise ValueError(
                f"token_healing with a {name} is not supported (prompt_recurrence=False means a recurrent_mask): "
                "transformers heals by a generation of its own that is told of neither, and may change the prompt's length. "
                "Set model.config.solver and prompt_recurrence, heal first (ids = model.heal_tokens(ids, tokenizer)), and "
                "generate from what comes out."
            )


def refuse_empty_prompts(prompt: Tensor | None, attention_mask: Tensor | None) -> None:
    if prompt is not None and prompt.dim() > 1 and prompt.shape[1] == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}: give at least one token to each row.")
    if attention_mask is not None and attention_mask.dim() == 2:
        empty = (attention_mask != 0).sum(dim=1) == 0
        if bool(empty.any()):
            raise ValueError(
                f"row {int(empty.nonzero()[0])} of the prompts is all padding: give it at least one real token, or leave "
                "the row out."
            )
