"""What measurements of recurrent models share: their inputs, and that models stay as they were.

Shapes: B rows, T tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.inputs import check_token_ids, documents_of_batch, positions_are_given, read_mask

Batch = Tensor | Mapping[str, Any]


@contextmanager
def undisturbed(model: RecurrentCausalLM) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module's mode and the random state are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def read_inputs(model: RecurrentCausalLM, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments of `forward` in a batch, on the model's device, and the document of each token [B, T].

    Args:
        model: whose vocabulary the ids are of.
        batch: token ids [B, T], or a mapping with `input_ids` and, if needed, `attention_mask`, `recurrent_mask`,
            `segment_ids` or `position_ids` (which count if they restart, each restart opening a document). Anything
            else in it is passed over. A single row may be given without its first dimension, and lists for tensors.

    Raises:
        ValueError: there are no input_ids, or something does not fit.
    """
    given: Any = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    if not isinstance(given, Mapping):
        raise ValueError(
            f"a batch is a {type(batch).__name__}: give token ids [batch, tokens] or a mapping with input_ids, such as "
            "tokenizer(texts, return_tensors='pt')."
        )
    if given.get("input_ids") is None:
        raise ValueError(f"a batch needs input_ids [batch, tokens]; this one has {sorted(given)}.")
    names = ("input_ids", "attention_mask", "recurrent_mask", "segment_ids", "position_ids")
    inputs = {name: as_rows(given[name]).to(model.device) for name in names if given.get(name) is not None}
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    shape = check_token_ids(ids, None, model.config.get_text_config().vocab_size)
    tells_documents = not positions_are_given(model.config)  # else they say where tokens stand
    positions = inputs.pop("position_ids", None) if tells_documents else None
    read_mask("recurrent_mask", inputs.get("recurrent_mask"), shape, ids.device)
    labels = documents_of_batch(shape, ids.device, mask, inputs.get("segment_ids"), positions)
    if positions is not None and bool((labels > 0).any()):
        inputs["segment_ids"] = labels  # says the same, also where a call continues from a cache
    return inputs, labels


def in_order(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    """The batches, be it one or several."""
    return [batches] if isinstance(batches, Tensor | Mapping) else batches


def as_rows(values: Any) -> Tensor:
    """Values as a tensor [B, T]; those of a single row [T] as [1, T]."""
    tensor = torch.as_tensor(values)
    return tensor[None] if tensor.dim() == 1 else tensor


def refuse_too_long(model: RecurrentCausalLM, num_tokens: int) -> None:
    """Raise ValueError if a text has more tokens than the model has positions."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and num_tokens > positions:
        raise ValueError(f"a text of {num_tokens} tokens is longer than this model's {positions} positions: cut it.")


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32, or wider if they are."""
    return values if values.dtype == torch.float64 else values.float()
