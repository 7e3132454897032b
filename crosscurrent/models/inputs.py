"""Checks and completes what a user passes to `forward`, the same for every model.

Shapes: B rows, T tokens of this call, P tokens of earlier calls.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.models.cache import RecurrentCache
from crosscurrent.recurrence import PADDING, Tokens


@dataclass(frozen=True)
class CallInputs:
    """A call's tokens, checked.

    Attributes:
        tokens: their documents and whether they are recurrent, for the schedule.
        key_labels: [B, P + T] the documents of all tokens seen so far, earlier calls included.
    """

    tokens: Tokens
    key_labels: Tensor

    @property
    def needs_mask(self) -> bool:
        """Whether attention needs more than causality: there is padding, or more than one document in a row."""
        return bool((self.key_labels != self.key_labels[:, :1]).any() or (self.key_labels[:, 0] == PADDING).any())


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
    if input_ids is not None:
        if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids has dtype {input_ids.dtype}: an integer dtype is needed.")
        low, high = (int(value) for value in input_ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"input_ids holds {low if low < 0 else high}: allowed are 0 to {vocab_size - 1} (vocab_size={vocab_size}). "
                "Is this the model's own tokenizer? For padding use any id inside the vocabulary and an attention_mask."
            )
    return given.shape[0], given.shape[1]


def resolve_call(
    shape: tuple[int, int],
    device: torch.device,
    cache: RecurrentCache | None,
    attention_mask: Tensor | None = None,
    recurrent_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> CallInputs:
    """Complete the masks of a call.

    Args:
        shape: (B, T).
        device: where the masks are needed.
        cache: of the earlier calls, if there are any.
        attention_mask: [B, P + T] or [B, T], nonzero for real tokens. None: all new tokens are real. What earlier
            calls said about their tokens is kept; the mask's part about them is not read.
        recurrent_mask: [B, T], nonzero for recurrent tokens. None: all are.
        segment_ids: [B, T] integers from 0, never decreasing along a row. None: the new tokens belong to the row's
            current document.
        position_ids: [B or 1, T]. Where they restart and there is neither a mask nor segment ids nor a cache, each
            restart opens a document, as elsewhere in transformers.

    Raises:
        ValueError: a mask's shape or content does not fit.
    """
    batch_size, _ = shape
    state, past_labels = (cache.state, cache.key_labels) if cache is not None else (None, None)
    if past_labels is not None and past_labels.shape[0] != batch_size:
        raise ValueError(
            f"the cache holds {past_labels.shape[0]} rows and the call has {batch_size}: give as many rows, or repeat or "
            "select the cache's rows first (batch_repeat_interleave, batch_select_indices)."
        )
    num_past = 0 if past_labels is None else past_labels.shape[1]
    is_real = _real_tokens(attention_mask, shape, num_past, device)
    recurrent = _recurrent_tokens(recurrent_mask, shape, device)
    current = state.segment if state is not None else torch.full((batch_size,), PADDING, device=device)
    if position_ids is not None and segment_ids is None and attention_mask is None and cache is None:
        segment_ids = segments_from_positions(position_ids.expand(shape))
    labels = _labels(segment_ids, is_real, current.clamp(min=0), shape)
    _refuse_backward_segments(labels, current)
    key_labels = labels if past_labels is None else torch.cat([past_labels, labels], dim=1)
    return CallInputs(Tokens(labels=labels, recurrent=recurrent), key_labels)


def segments_from_positions(position_ids: Tensor) -> Tensor | None:
    """Documents of a padding-free batch that only its position ids tell apart: each restart opens one.

    None if no row restarts. `position_ids` is [B, T].
    """
    opens = torch.diff(position_ids, dim=-1, prepend=position_ids[..., :1] - 1) != 1
    return opens.cumsum(dim=-1) if bool(opens[..., 1:].any()) else None


def _real_tokens(mask: Tensor | None, shape: tuple[int, int], num_past: int, device: torch.device) -> Tensor:
    batch_size, num_tokens = shape
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    allowed = {(batch_size, num_tokens), (batch_size, num_past + num_tokens)}
    if mask.dim() != 2 or tuple(mask.shape) not in allowed:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: allowed is {' or '.join(map(str, sorted(allowed)))} "
            "(batch, tokens), nonzero for real tokens. Ready-made 4D masks are not supported; for packed documents "
            "give segment_ids."
        )
    return mask[:, -num_tokens:].to(device) != 0


def _recurrent_tokens(mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"recurrent_mask has shape {tuple(mask.shape)}: it needs one value per token of this call, {shape}, nonzero "
            "for recurrent tokens."
        )
    return mask.to(device) != 0


def _labels(segment_ids: Tensor | None, is_real: Tensor, current: Tensor, shape: tuple[int, int]) -> Tensor:
    if segment_ids is None:
        return torch.where(is_real, current[:, None], PADDING)
    if tuple(segment_ids.shape) != shape or segment_ids.is_floating_point():
        raise ValueError(
            f"segment_ids has shape {tuple(segment_ids.shape)} and dtype {segment_ids.dtype}: it needs one integer per "
            f"token of this call, {shape}."
        )
    segment_ids = segment_ids.to(is_real.device, torch.int64)
    if bool((segment_ids[is_real] < 0).any()):
        raise ValueError(
            "segment_ids holds a negative number: number documents from 0; mark padding in attention_mask."
        )
    return torch.where(is_real, segment_ids, PADDING)


def _refuse_backward_segments(labels: Tensor, current: Tensor) -> None:
    highest = torch.cat([current[:, None], labels], dim=1).cummax(dim=1).values[:, :-1]
    backward = (labels != PADDING) & (labels < highest)
    if bool(backward.any()):
        row, column = backward.nonzero()[0].tolist()
        raise ValueError(
            f"segment_ids goes backwards in row {row}: {int(labels[row, column])} at token {column} after "
            f"{int(highest[row, column])}. Give each document of a row a higher number than the one before it."
        )
