"""Labels that the loss can use, so that transformers' Trainer counts no others.

Shapes: B rows, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crosscurrent.models.inputs import documents_of_batch
from crosscurrent.models.outputs import IGNORED
from crosscurrent.recurrence import PADDING


@dataclass(frozen=True)
class PredictableLabels:
    """A data collator whose labels are -100 for padding and for the first token of each document.

    Nothing in a document predicts its first token, so its label never counts in the loss. Trainer, which divides by the
    number of labels, and its `label_smoothing_factor`, which takes any token to be predicted by the column before, do not
    know that. With this the loss is the mean over what is predicted, however rows are padded, packed or cut into
    microbatches. (Collators that flatten documents into one row mostly do it by themselves.)

    Args:
        collator: makes the batch: input_ids and labels [B, T] int64, and attention_mask, segment_ids or position_ids as
            the model is to be given them.

    Example:
        >>> from transformers import default_data_collator
        >>> row = {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "segment_ids": [0, 0, 1, 1]}
        >>> PredictableLabels(default_data_collator)([row])["labels"].tolist()
        [[-100, 6, -100, 8]]
    """

    collator: Callable[[Sequence[Any]], Any]

    def __call__(self, examples: Sequence[Any]) -> Any:
        batch = self.collator(examples)
        batch["labels"] = torch.where(_is_predicted(batch), batch["labels"], IGNORED)
        return batch


def _is_predicted(batch: Any) -> Tensor:
    """[B, T] bool, the tokens with an earlier one of their document in the row."""
    labels = batch["labels"]
    given = (batch.get(name) for name in ("attention_mask", "segment_ids", "position_ids"))
    documents = documents_of_batch(tuple(labels.shape), labels.device, *given)
    before = torch.cat([torch.full_like(documents[:, :1], PADDING), documents[:, :-1]], dim=1).cummax(dim=1).values
    return (documents != PADDING) & (before == documents)
