"""Rows of one length from documents of any: what pretraining on text reads.

Shapes: T tokens of a row, D documents of a split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index as as_integer

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from crosscurrent.data.shards import PreparedText
from crosscurrent.models.outputs import IGNORED

Row = dict[str, Tensor]


def check_sequence_length(sequence_length: int) -> None:
    """Raise ValueError if rows cannot be so long."""
    if sequence_length < 2:
        raise ValueError(
            f"sequence_length={sequence_length} is not allowed: in less than 2 tokens nothing is predicted."
        )


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers from 0 to `count` - 1 in the order of an epoch, drawn anew for each.

    Example:
        >>> sorted(epoch_order(3, seed=1, epoch=0).tolist())
        [0, 1, 2]
    """
    # Raw numbers and a stable sort: numpy promises these, but not its permutations, for ever.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable")


def packed_row(pieces: Sequence[np.ndarray], sequence_length: int) -> Row:
    """A row of pieces of documents, each of them a segment: no state, attention or loss is to cross into the next.

    Args:
        pieces: token ids, of no more than `sequence_length` tokens together.
        sequence_length: T. What the pieces leave over at the end is padding.

    Returns:
        All [T] int64: input_ids; segment_ids, counted from 0; attention_mask, 0 for padding; labels, not shifted, -100 for
        padding and for the first token of each segment, which nothing predicts.

    Example:
        >>> row = packed_row([np.array([5, 6, 7]), np.array([8, 9])], sequence_length=6)
        >>> row["segment_ids"].tolist(), row["labels"].tolist()
        ([0, 0, 0, 1, 1, 0], [-100, 6, 7, -100, 9, -100])
    """
    lengths = [len(piece) for piece in pieces]
    num_tokens = sum(lengths)
    ids, segments, mask = (np.zeros(sequence_length, np.int64) for _ in range(3))
    ids[:num_tokens] = np.concatenate(pieces)
    segments[:num_tokens] = np.repeat(np.arange(len(pieces)), lengths)
    mask[:num_tokens] = 1
    labels = np.where(mask == 1, ids, IGNORED)
    labels[np.cumsum([0, *lengths[:-1]])] = IGNORED
    row = {"input_ids": ids, "labels": labels, "segment_ids": segments, "attention_mask": mask}
    return {name: torch.from_numpy(values) for name, values in row.items()}


@dataclass(frozen=True)
class _Epoch:
    """The documents of an epoch one after another: `order` [D] says which, `ends` [D] after how many tokens each ends."""

    number: int
    order: np.ndarray
    ends: np.ndarray


class PackedRows(Dataset[Row]):
    """Prepared text as rows of one length: row i of an endless sequence of epochs.

    In each epoch every document comes once, in an order drawn anew, and the documents one after another are cut into rows.
    What is left of a document at the end of a row goes on in the next row, as a segment of its own. The last row of an epoch
    is padded, so that nothing is dropped. A row follows from the seed and its number alone: training that goes on from some
    row needs no state of its data, and any number of workers and ranks sees the same rows.

    Args:
        prepared: the text.
        split: "train" or "validation".
        sequence_length: T, tokens per row, at least 2.
        seed: of the orders, from 0.
        shuffle: False: documents in the order of the shards, and one epoch only, as for evaluation.

    Raises:
        ValueError: the split is unknown or holds no tokens, the length is below 2, or the seed is negative.

    Example::

        rows = PackedRows(PreparedText("fineweb-edu-10b"), "train", sequence_length=2048, seed=1)
        rows[rows.rows_per_epoch]  # the first row of the second epoch, as `packed_row` makes it
    """

    def __init__(
        self, prepared: PreparedText, split: str, sequence_length: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        check_sequence_length(sequence_length)
        if seed < 0:
            raise ValueError(f"seed={seed} is not allowed: give one from 0.")
        if not prepared.num_tokens(split):
            raise ValueError(
                f"{prepared.folder} holds no tokens in split {split!r}: prepare more documents"
                + (
                    ", or a larger --validation-share."
                    if split == "validation"
                    else ", or a smaller --validation-share."
                )
            )
        self.prepared = prepared
        self.split = split
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self._starts: np.ndarray | None = None
        self._epoch: _Epoch | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_starts": None, "_epoch": None}  # large, and quickly made again

    @property
    def rows_per_epoch(self) -> int:
        """Rows in which every document has come once."""
        return -(-self.prepared.num_tokens(self.split) // self.sequence_length)

    def __len__(self) -> int:
        return self.rows_per_epoch

    @property
    def num_documents_cut(self) -> int:
        """How many documents of the first epoch lie in more than one row, each with its state lost between them."""
        epoch = self._epoch_number(0)
        begins = epoch.ends - np.diff(self._document_starts())[epoch.order]
        return int(np.count_nonzero(begins // self.sequence_length != (epoch.ends - 1) // self.sequence_length))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Row:
        index = as_integer(index)
        if index < 0 or (not self.shuffle and index >= self.rows_per_epoch):
            allowed = "at least 0" if self.shuffle else f"0 to {self.rows_per_epoch - 1}, of one epoch"
            raise IndexError(f"there is no row {index}: allowed is {allowed}.")
        number, row = divmod(index, self.rows_per_epoch)
        epoch, starts = self._epoch_number(number), self._document_starts()
        first = row * self.sequence_length
        last = min(first + self.sequence_length, int(starts[-1]))
        inside = slice(np.searchsorted(epoch.ends, first, side="right"), np.searchsorted(epoch.ends, last) + 1)
        documents, ends = epoch.order[inside], epoch.ends[inside]
        stored = starts[documents + 1] - ends  # what brings a place in the epoch to its place in the shards
        stops = np.minimum(ends, last)
        begins = np.concatenate([[first], stops[:-1]])
        spans = zip((begins + stored).tolist(), (stops + stored).tolist(), strict=True)
        return packed_row([self.prepared.read(self.split, *span) for span in spans], self.sequence_length)

    def _document_starts(self) -> np.ndarray:
        """[D + 1] where each document starts in the shards, and where the last one ends."""
        if self._starts is None:
            self._starts = np.concatenate([[0], np.cumsum(self.prepared.lengths(self.split))])
        return self._starts

    def _epoch_number(self, number: int) -> _Epoch:
        if self._epoch is None or self._epoch.number != number:
            lengths = np.diff(self._document_starts())
            order = np.arange(len(lengths))
            if self.shuffle:
                order = epoch_order(len(lengths), self.seed, number)
            self._epoch = _Epoch(number, order, np.cumsum(lengths[order]))
        return self._epoch
