"""Batches from examples of different lengths, with the columns that recurrent models read beside the usual ones.

Shapes: B examples, T tokens of the longest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscurrent.models.outputs import IGNORED

Side = Literal["right", "left"]

# What the columns hold where an example has no token.
_PADDING = {"labels": IGNORED, "attention_mask": 0, "recurrent_mask": 0, "segment_ids": 0}


@dataclass(frozen=True)
class PaddingCollator:
    """Pads examples (dictionaries of lists or tensors, one value per token) to the longest of a batch.

    Of an example the columns input_ids, labels, attention_mask, recurrent_mask and segment_ids are taken and others left
    out. All come out as [B, T] int64. labels default to the input_ids, attention_mask to ones; padding is marked in it.

    Args:
        pad_token_id: what input_ids hold where an example has no token.
        padding_side: "right" or "left".
        required: columns that each example must have. Name "recurrent_mask" or "segment_ids" here if the data has them:
            some trainers drop columns that they do not know, and this tells.

    Raises:
        ValueError: the padding side is unknown; a column is missing in some of the examples, or has another length than
            the input_ids.

    Example:
        >>> collator = PaddingCollator(pad_token_id=0)
        >>> batch = collator([{"input_ids": [5, 6, 7], "recurrent_mask": [0, 1, 1]},
        ...                   {"input_ids": [8, 9], "recurrent_mask": [0, 1]}])
        >>> batch["recurrent_mask"].tolist(), batch["labels"].tolist()
        ([[0, 1, 1], [0, 1, 0]], [[5, 6, 7], [8, 9, -100]])
    """

    pad_token_id: int
    padding_side: Side = "right"
    required: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.padding_side not in get_args(Side):
            raise ValueError(f"padding_side={self.padding_side!r} is not allowed: give 'right' or 'left'.")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not examples:
            raise ValueError("a batch needs at least one example.")
        rows = [_read(example) for example in examples]
        self._refuse_missing(rows)
        longest = max(len(row["input_ids"]) for row in rows)
        padding = {"input_ids": self.pad_token_id} | _PADDING
        return {name: torch.stack([self._pad(row[name], longest, padding[name]) for row in rows]) for name in rows[0]}

    def _pad(self, values: Tensor, length: int, padding: int) -> Tensor:
        short = length - len(values)
        return F.pad(values, (short, 0) if self.padding_side == "left" else (0, short), value=padding)

    def _refuse_missing(self, rows: list[dict[str, Tensor]]) -> None:
        needed = {*self.required, *(name for row in rows for name in row)}
        for index, row in enumerate(rows):
            missing = sorted(needed - set(row))
            if missing:
                raise ValueError(
                    f"example {index} of the batch has no {', '.join(missing)}. If the data has, the trainer dropped it: "
                    "set remove_unused_columns=False in its arguments."
                )


def _read(example: Mapping[str, Any]) -> dict[str, Tensor]:
    if "input_ids" not in example:
        raise ValueError(f"an example has no input_ids: it has {sorted(example)}.")
    given = {name: _integers(name, example[name]) for name in ("input_ids", *_PADDING) if name in example}
    for name, values in given.items():
        if values.shape != given["input_ids"].shape or values.dim() != 1:
            raise ValueError(
                f"{name} of an example has shape {tuple(values.shape)} and its input_ids {tuple(given['input_ids'].shape)}: "
                "give one value per token."
            )
    ids = given["input_ids"]
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} | given


def _integers(name: str, values: Any) -> Tensor:
    tensor = torch.as_tensor(values)
    if tensor.is_floating_point() and tensor.numel():
        raise ValueError(f"{name} of an example holds {tensor.dtype} numbers: give integers.")
    return tensor.long()


@dataclass(frozen=True)
class AnswerRecurrence:
    """Makes only the tokens with a label recurrent, which are the answers if the prompts are left out of the loss.

    This is how the T2MLR paper fine-tunes; `generate(prompt_recurrence=False)` is the same in generation. It adds a
    recurrent_mask to the batches of another collator: `PaddingCollator`, or the one that TRL's SFTTrainer made
    (`trainer.data_collator = AnswerRecurrence(trainer.data_collator)`), also packed and padding-free.

    Args:
        collator: makes batches with labels.

    Raises:
        ValueError: a batch has no labels, or has a recurrent_mask already.

    Example:
        >>> collator = AnswerRecurrence(PaddingCollator(pad_token_id=0))
        >>> collator([{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}])["recurrent_mask"].tolist()
        [[0, 0, 1]]
    """

    collator: Callable[[Any], dict[str, Any]]

    def __call__(self, examples: Any) -> dict[str, Any]:
        batch = self.collator(examples)
        if "labels" not in batch or "recurrent_mask" in batch:
            raise ValueError(
                f"the batch has {sorted(batch)}: to make labelled tokens recurrent it needs labels and no recurrent_mask."
            )
        return {**batch, "recurrent_mask": (batch["labels"] != IGNORED).long()}
