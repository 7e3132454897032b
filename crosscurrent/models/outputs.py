"""What `forward` returns, and the loss in it."""

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from crosscurrent.recurrence import PADDING, SolverReport

IGNORED = -100  # label of a token that the loss leaves out, as everywhere in transformers


@dataclass
class RecurrentCausalLMOutput(CausalLMOutputWithPast):
    """transformers' `CausalLMOutputWithPast` with the solver's report.

    Attributes:
        solver_report: how the recurrence was solved in this call.
    """

    solver_report: SolverReport | None = None


def causal_lm_loss(
    logits: Tensor, labels: Tensor, token_labels: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Mean cross-entropy of each token given those before it in its document, in float32 or wider.

    Padding, and the first token of a document (nothing before it predicts it), count for nothing, whatever their
    label. If no token counts the loss is 0, with zero gradients.

    Args:
        logits: [B, T, V].
        labels: [B, T] int64, IGNORED for tokens to leave out; not shifted.
        token_labels: [B, T] the document of each token (`Tokens.labels`).
        num_items_in_batch: divide by this instead of the number of counted tokens (gradient accumulation).

    Raises:
        ValueError: the shape of labels does not fit.
    """
    if labels.shape != logits.shape[:2]:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and the logits cover {tuple(logits.shape[:2])}: they must agree (with "
            "labels, leave logits_to_keep at 0)."
        )
    if not logits.is_floating_point() or logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    labels = labels.to(logits.device)
    targets = next_labels(labels, token_labels)
    _check_labels(labels, targets, token_labels, logits.shape[-1], num_items_in_batch is not None)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    count = num_items_in_batch if num_items_in_batch is not None else (targets != IGNORED).sum()
    count = torch.as_tensor(count, device=total.device)
    return total / count.clamp(min=1)


def _check_labels(labels: Tensor, targets: Tensor, token_labels: Tensor, vocab_size: int, were_counted: bool) -> None:
    """Refuse labels outside the vocabulary; tell of rows that teach nothing and of labels that are counted in vain."""
    outside = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))
    num_counted, num_used = (labels[:, 1:] != IGNORED).sum(dim=1), (targets != IGNORED).sum(dim=1)
    teaches_nothing = (token_labels != PADDING).any(dim=1) & (num_used == 0)
    facts = torch.stack([outside.any(), teaches_nothing.any(), (num_counted > num_used).any()])
    is_outside, is_idle, is_in_vain = facts.tolist()  # the device is waited for once
    if is_outside:
        raise ValueError(
            f"labels holds {int(labels[outside][0])}: allowed are 0 to {vocab_size - 1}, and {IGNORED} to leave out."
        )
    if is_idle:
        warnings.warn(
            f"a row has no label that counts (all are {IGNORED}, or it is one token long): it adds nothing to the loss. Was "
            "an answer cut off by a maximum length? Drop such rows, or allow longer ones.",
            stacklevel=3,
        )
    if were_counted and is_in_vain:
        warnings.warn(
            "first tokens of documents, or padding, have labels. Nothing predicts them, yet Trainer counts them in the "
            "number that it divides the loss by, so that the loss comes out too small by their share. Give them the label "
            f"{IGNORED}: crosscurrent.data.labels.PredictableLabels(collator) does.",
            stacklevel=3,
        )


def next_labels(labels: Tensor, token_labels: Tensor) -> Tensor:
    """[B, T] for each real token the label of the next real one of its document, IGNORED where there is none."""
    num_tokens = labels.shape[1]
    columns = torch.arange(num_tokens, device=labels.device)
    real = torch.where(token_labels != PADDING, columns, num_tokens)
    following = real.flip(1).cummin(dim=1).values.flip(1)  # first real column from here on
    following = torch.cat([following[:, 1:], torch.full_like(following[:, :1], num_tokens)], dim=1)
    index = following.clamp(max=num_tokens - 1)
    same = (following < num_tokens) & (token_labels.gather(1, index) == token_labels) & (token_labels != PADDING)
    return torch.where(same, labels.gather(1, index), IGNORED)
