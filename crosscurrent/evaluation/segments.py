"""Logits of long sequences, a segment at a time, each behind the cache of those before it.

Shapes: B rows, T tokens, S tokens of a segment, V vocab_size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.generation import RecurrentCausalLM

_CACHE_NAMES = (CACHE_NAME, "cache_params")  # the second one of Mamba, before transformers 5.24


def segment_logits(
    model: PreTrainedModel, inputs: dict[str, Tensor], segment_length: int | None, **options: Any
) -> Iterator[tuple[slice, Tensor]]:
    """Which columns, and their logits [B, S, V], over all of a batch.

    No logits, and no masks of attention, are ever made for more than `segment_length` tokens at once. What grows with T is
    the cache alone: keys and values in attention that sees all, nothing where all of it is windowed.

    Every segment continues exactly where the one before it ended, so logits are those of one call, but for rounding, for
    every model without feedback and with an exact solver (`Sequential()`). Iterations fewer than tokens are an
    approximation of each segment by itself: its start is exact, so that segments are nearer to the definition.

    Args:
        model: in evaluation mode.
        inputs: input_ids [B, T], and the masks [B, T] that the model takes. Padding stands on the right only: no real token
            sees it, so that segments go without the attention mask.
        segment_length: S; None, or not below T: all at once, without a cache.
        options: more arguments of each call.

    Example:
        >>> import crosscurrent as cc
        >>> model = cc.RLTForCausalLM(cc.RLTConfig(vocab_size=11, hidden_size=16, intermediate_size=24)).eval()
        >>> with torch.no_grad():
        ...     parts = list(segment_logits(model, {"input_ids": torch.arange(10)[None]}, 4))
        >>> [(columns.start, columns.stop, logits.shape[1]) for columns, logits in parts]
        [(0, 4, 4), (4, 8, 4), (8, 10, 2)]
    """
    num_tokens = inputs["input_ids"].shape[1]
    if segment_length is None or segment_length >= num_tokens:
        yield slice(0, num_tokens), model(**inputs, use_cache=False, **options).logits
        return
    cache: dict[str, Any] = {}
    for start in range(0, num_tokens, segment_length):
        columns = slice(start, min(start + segment_length, num_tokens))
        part = {name: values[:, columns] for name, values in inputs.items() if name != "attention_mask"}
        output = model(**part, **cache, use_cache=True, **options)
        name = next((name for name in _CACHE_NAMES if output.get(name) is not None), None)
        cache = {} if name is None else {name: output[name]}
        yield columns, output.logits


@torch.no_grad()
def refuse_unusable_cache(model: PreTrainedModel) -> None:
    """Raise ValueError if a model that continues from its cache says something else than in one call.

    It is tried on six tokens. Recurrent models of this library need no trial.
    """
    if isinstance(model, RecurrentCausalLM) or model.device.type == "meta":
        return
    ids = torch.arange(6, device=model.device)[None] % model.config.get_text_config().vocab_size
    is_training = model.training
    model.eval()
    try:
        whole, alone = (model(input_ids=part, use_cache=False).logits[:, -3:] for part in (ids, ids[:, 3:]))
        *_, (_, continued) = segment_logits(model, {"input_ids": ids}, 3)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{_not_in_segments(model)} It says: {' '.join(str(error).split())}") from error
    finally:
        model.train(is_training)
    without_past = (whole - alone).abs().max().item()
    rounding = 1e-5 * max(whole.abs().max().item(), 1.0)
    if not (whole - continued).abs().max().item() <= rounding + 0.01 * without_past:
        raise ValueError(_not_in_segments(model))


def _not_in_segments(model: PreTrainedModel) -> str:
    return (
        f"a {type(model).__name__} does not continue from a cache as it reads in one call: leave "
        "evaluation.segment_length null, and lower evaluation.batch_size if memory is short."
    )
