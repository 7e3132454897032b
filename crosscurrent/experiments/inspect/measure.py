"""What is to be shown of a text.

Shapes: T tokens, D hidden_size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from crosscurrent.evaluation.probing import refuse_too_long
from crosscurrent.evaluation.telemetry import (
    Memory,
    Trace,
    effective_memory,
    gate_openings,
    lens_logits,
    residuals,
    t2mlr_model,
    trace,
)
from crosscurrent.recurrence import Jacobi

NUM_READINGS = 5  # likeliest tokens shown of each state
NUM_DIRECTIONS = 16
HORIZON = 32  # tokens for which a perturbation is watched


@dataclass(frozen=True)
class Reading:
    """A token, as visible text, and its probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class Inspection:
    """One text, measured.

    Attributes:
        tokens: the T tokens, as visible text.
        was_cut: whether the text went on.
        trace: of one row, solved token by token.
        openings: tanh of the scalars on the stream and on the state.
        residuals: relative change of the states in each Jacobi iteration.
        memory: how a perturbation of the state dies away, and `memory_position`, after how many tokens it was made.
        readings: per token the likeliest tokens of the state that it leaves, read as the last layer's output.
        predictions: per token the likeliest next token.
    """

    tokens: tuple[str, ...]
    was_cut: bool
    trace: Trace
    openings: tuple[float, float]
    residuals: tuple[float, ...]
    memory: Memory
    memory_position: int
    readings: tuple[tuple[Reading, ...], ...]
    predictions: tuple[Reading, ...]


def inspect_text(
    model: Any, tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int = 128, iterations: int | None = None
) -> Inspection:
    """Measure what a T2MLR model's recurrence does with a text.

    Args:
        model: a T2MLR model; it is left as it was.
        tokenizer: its tokenizer.
        text: of at least two tokens.
        max_tokens: look at the first so many.
        iterations: Jacobi iterations of the residual curve; None, or more than there are tokens: as many as tokens.

    Raises:
        ValueError: the model is not a T2MLR model with feedback, or the text is too short.
    """
    inner = t2mlr_model(model)
    all_ids: list[int] = tokenizer(text)["input_ids"]
    ids = all_ids[:max_tokens]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens: give one of at least two.")
    refuse_too_long(inner, len(ids))
    row = torch.tensor([ids], device=inner.device)
    found = trace(inner, row)
    position = max(len(ids) // 3, 1)
    likeliest = _likeliest(tokenizer, found.logits[0], 1)
    return Inspection(
        tokens=tuple(visible(tokenizer, token) for token in ids),
        was_cut=len(ids) < len(all_ids),
        trace=found,
        openings=gate_openings(inner),
        residuals=residuals(inner, row, Jacobi(len(ids) if iterations is None else iterations, 1)),
        memory=effective_memory(inner, row, position, HORIZON, num_directions=NUM_DIRECTIONS),
        memory_position=position,
        readings=_likeliest(tokenizer, lens_logits(inner, found.states[0]), NUM_READINGS),
        predictions=tuple(first for (first,) in likeliest),
    )


def _likeliest(tokenizer: PreTrainedTokenizerBase, logits: Tensor, count: int) -> tuple[tuple[Reading, ...], ...]:
    """The likeliest tokens of each row of logits [T, V]."""
    best = logits.double().softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    return tuple(
        tuple(Reading(visible(tokenizer, token), share) for token, share in zip(tokens, shares, strict=True))
        for tokens, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )


def visible(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as text in which nothing is invisible: a space is ·, a line break ↵, a tab →, others are escaped."""
    raw: Any = tokenizer.convert_ids_to_tokens(token)
    if raw is None:  # the vocabulary of the model is larger than the tokenizer's
        return f"[{token}]"
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if raw.startswith("▁") and not text.startswith(" "):
        text = f" {text}"  # SentencePiece drops the space before a first word
    if not text or "\ufffd" in text:  # a part of a character
        text = raw
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    shown = {" ": "·", "\n": "↵", "\t": "→"}.get(character)
    if shown is not None:
        return shown
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
