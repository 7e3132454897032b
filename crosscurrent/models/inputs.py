"""Checks of what a user passes to `forward`, the same for every model.

Shapes: B rows, T tokens of this call, P tokens of earlier calls.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from crosscurrent.recurrence import PADDING
from crosscurrent.suggestions import did_you_mean


def check_token_ids(input_ids: Tensor | None, inputs_embeds: Tensor | None, vocab_size: int) -> tuple[int, int]:
    """(B, T) of the call.

    Raises:
        ValueError: not exactly one of the two was given, its shape is wrong, the sequence is empty, or an id lies
            outside the vocabulary.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            "give exactly one of input_ids [batch, tokens] and inputs_embeds [batch, tokens, hidden_size]."
        )
    given, name, dims = (input_ids, "input_ids", 2) if input_ids is not None else (inputs_embeds, "inputs_embeds", 3)
    assert given is not None
    if given.dim() != dims:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}: {dims} dimensions are needed, batch and tokens first."
        )
    if given.shape[0] == 0 or given.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(given.shape)}: give at least one row and one token.")
    if input_ids is not None and not torch.compiler.is_compiling():  # compiled code must not look into tensors
        if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids has dtype {input_ids.dtype}: an integer dtype is needed.")
        low, high = _least_and_largest(input_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"input_ids holds {low if low < 0 else high}: allowed are 0 to {vocab_size - 1} (vocab_size={vocab_size}). "
                "Is this the model's own tokenizer? For padding use any id inside the vocabulary and an attention_mask."
            )
    return given.shape[0], given.shape[1]


def _least_and_largest(ids: Tensor) -> tuple[int, int]:
    if ids.numel() <= 16:  # a step of decoding: not worth a kernel
        values = ids.flatten().tolist()
        return min(values), max(values)
    low, high = torch.stack(ids.aminmax()).tolist()
    return low, high


def real_tokens(
    mask: Tensor | None, shape: tuple[int, int], past_labels: Tensor | None, device: torch.device
) -> Tensor:
    """[B, T] bool from an attention mask [B, P + T] or [B, T], nonzero for real tokens; None: all new tokens are real.

    Raises:
        ValueError: the shape does not fit, or the mask's earlier part differs from what earlier calls were told.
    """
    batch_size, num_tokens = shape
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    num_past = 0 if past_labels is None else past_labels.shape[1]
    is_whole = mask.dim() == 2 and mask.shape[1] == num_past + num_tokens
    if mask.dim() != 2 or mask.shape[0] != batch_size or not (is_whole or mask.shape[1] == num_tokens):
        allowed = dict.fromkeys([(batch_size, num_tokens), (batch_size, num_past + num_tokens)])
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: allowed is {' or '.join(map(str, allowed))} "
            "(batch, tokens), nonzero for real tokens. Ready-made 4D masks are not supported; for packed documents "
            "give segment_ids."
        )
    is_real = mask.to(device) != 0
    if past_labels is not None and is_whole and not torch.compiler.is_compiling():
        differs = is_real[:, :num_past] != (past_labels != PADDING)
        if bool(differs.any()):
            row, column = differs.nonzero()[0].tolist()
            raise ValueError(
                f"attention_mask says something else of token {column} in row {row} than the earlier call did that put "
                "it into the cache: pass the same mask in every call, or only the part for the new tokens."
            )
    return is_real[:, -num_tokens:]


def read_mask(name: str, mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """[B, T] bool from a mask with one value per token of the call; None: all True.

    Raises:
        ValueError: the shape does not fit.
    """
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: it needs one value per token of this call, {shape}.")
    return mask.to(device) != 0


def document_labels(
    segment_ids: Tensor | None, position_ids: Tensor | None, is_real: Tensor, current: Tensor
) -> Tensor:
    """[B, T] the document of each token, PADDING where `is_real` says so.

    Args:
        segment_ids: [B, T] integers from 0, never decreasing along a row. None: see position_ids.
        position_ids: [B or 1, T]. Each restart opens a document, as elsewhere in transformers. None, or no restart: all
            tokens belong to the row's current document.
        is_real: [B, T] bool.
        current: [B] the document that each row is in, PADDING if it has not begun.

    Raises:
        ValueError: the ids' shape or dtype does not fit, one is negative, or they go backwards.
    """
    if segment_ids is None and position_ids is not None:
        segment_ids = _segments_from_positions(read_positions(position_ids, is_real))
    if segment_ids is None:
        return torch.where(is_real, current.clamp(min=0)[:, None], PADDING)
    if segment_ids.shape != is_real.shape or segment_ids.is_floating_point():
        raise ValueError(
            f"segment_ids has shape {tuple(segment_ids.shape)} and dtype {segment_ids.dtype}: it needs one integer per "
            f"token of this call, {tuple(is_real.shape)}."
        )
    labels = torch.where(is_real, segment_ids.to(is_real.device, torch.int64), PADDING)
    if bool((is_real & (labels < 0)).any()):
        raise ValueError(
            "segment_ids holds a negative number: number documents from 0; mark padding in attention_mask."
        )
    _refuse_backward_segments(labels, current)
    return labels


def documents_of_batch(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None,
    segment_ids: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor:
    """[B, T] the document of each token of a batch that continues nothing, PADDING where there is no real token.

    As in `forward`, position_ids tell documents only if there is no attention mask.

    Raises:
        ValueError: as `real_tokens` and `document_labels`.
    """
    is_real = real_tokens(attention_mask, shape, None, device)
    positions = position_ids if attention_mask is None else None
    return document_labels(segment_ids, positions, is_real, torch.full(shape[:1], PADDING, device=device))


def positions_are_given(config: Any) -> bool:
    """Whether a model of this configuration is told where its tokens stand (`RLTConfig.given_positions`)."""
    return bool(getattr(config, "given_positions", False))


def read_positions(position_ids: Tensor, is_real: Tensor) -> Tensor:
    """[B, T] from position_ids [B or 1, T].

    Raises:
        ValueError: their shape or dtype does not fit.
    """
    fits = position_ids.dim() == 2 and position_ids.shape[1] == is_real.shape[1]
    if not fits or position_ids.shape[0] not in (1, is_real.shape[0]):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}: it needs one value per token of this call, "
            f"{tuple(is_real.shape)}."
        )
    if position_ids.dtype == torch.bool or position_ids.is_complex() or position_ids.is_floating_point():
        raise ValueError(f"position_ids has dtype {position_ids.dtype}: integers are needed.")
    return position_ids.to(is_real.device).expand(is_real.shape)


def _segments_from_positions(position_ids: Tensor) -> Tensor | None:
    opens = torch.diff(position_ids, dim=-1, prepend=position_ids[..., :1] - 1) != 1
    return opens.cumsum(dim=-1) if bool(opens[..., 1:].any()) else None


def _refuse_backward_segments(labels: Tensor, current: Tensor) -> None:
    highest = torch.cat([current[:, None], labels], dim=1).cummax(dim=1).values[:, :-1]
    backward = (labels != PADDING) & (labels < highest)
    if bool(backward.any()):
        row, column = backward.nonzero()[0].tolist()
        raise ValueError(
            f"segment_ids goes backwards in row {row}: {int(labels[row, column])} at token {column} after "
            f"{int(highest[row, column])}. Give each document of a row a higher number than the one before it."
        )


# What collators give beside the positions, for kernels that take several documents without a mask.
_KERNEL_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def drop_kernel_lengths(kwargs: dict[str, Any], *, documents_are_known: bool) -> None:
    """Take the lengths of documents meant for flash attention out of `kwargs`: here masks are made from the labels.

    Raises:
        ValueError: they are the only thing that tells the documents apart.
    """
    dropped = [name for name in _KERNEL_LENGTHS if kwargs.pop(name, None) is not None]
    if dropped and not documents_are_known:
        raise ValueError(
            f"{', '.join(dropped)} alone do not tell documents apart here: give segment_ids, or position_ids that restart "
            "with each document and no attention_mask."
        )


def refuse_misspelt_arguments(unknown: dict[str, Any], forward: Callable[..., Any]) -> None:
    """Raise for an argument that is spelt almost like one of `forward`: it would be passed on and have no effect."""
    for name in unknown:
        hint = did_you_mean(name, _argument_names(forward), cutoff=0.85)
        if hint:
            raise ValueError(f"forward has no argument {name!r}.{hint}")


@lru_cache(maxsize=16)
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)
