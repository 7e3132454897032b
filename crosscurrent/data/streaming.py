"""Packed rows straight from a source, for those who do not want to prepare it first."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from crosscurrent.data.packing import Row, check_sequence_length, packed_row
from crosscurrent.data.prepare import VALIDATION_SHARE
from crosscurrent.data.shards import check_split
from crosscurrent.data.sources import LeftOut, OnError, Source, read_batches
from crosscurrent.data.tokenization import check_share, document_ids, is_held_out, tokenizer_identity


class StreamedRows(IterableDataset[Row]):
    """The documents of a source, tokenised and packed as they come, in the source's order, once.

    The rows are those of `PackedRows(..., shuffle=False)` over the same source, prepared with the same validation share. To
    go on at some row, everything before is read and tokenised again. One process reads: with accelerate, let it dispatch the
    batches (`dispatch_batches=True`); for many GPUs, prepare the text.

    Args:
        source: of the documents.
        tokenizer: one with an EOS token, which ends each document.
        sequence_length: T, tokens per row, at least 2.
        split: "train", or "validation" for the documents held out, by the hash of their text.
        validation_share: of the documents, from 0 to below 1.
        start_row: the first row to give.
        on_error: "stop" at what cannot be read as a text, or "skip" and count it in `left_out`.

    Attributes:
        left_out: what the last pass over the source left out so far, empty documents too.

    Raises:
        ValueError: a setting is out of range, or the tokenizer has no EOS token; when iterated, a text cannot be read, the
            split has no document, or several workers of a DataLoader would each give all rows.

    Example::

        rows = StreamedRows(open_source(["notes.txt"]), tokenizer, sequence_length=1024)
        next(iter(rows))["input_ids"]
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        split: str = "train",
        validation_share: float = VALIDATION_SHARE,
        start_row: int = 0,
        on_error: OnError = "stop",
    ):
        check_sequence_length(sequence_length)
        check_split(split)
        check_share(validation_share)
        tokenizer_identity(tokenizer, tokenizer.name_or_path)  # refuses one without EOS
        if start_row < 0:
            raise ValueError(f"start_row={start_row} is not allowed: give one from 0.")
        self.source = source
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.split = split
        self.validation_share = validation_share
        self.start_row = start_row
        self.on_error = on_error
        self.left_out = LeftOut()

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"num_workers={worker.num_workers} of a DataLoader would each give every row: use 0 or 1, or prepare the "
                "text (`crosscurrent prepare`) and read it with as many as you like."
            )
        self.left_out = LeftOut()
        row, pieces, room = 0, [], self.sequence_length
        for document in self._documents():
            while len(document):
                piece, document = document[:room], document[room:]  # noqa: PLW2901 - what is left of it
                pieces.append(piece)
                room -= len(piece)
                if not room:
                    if row >= self.start_row:
                        yield packed_row(pieces, self.sequence_length)
                    row, pieces, room = row + 1, [], self.sequence_length
        if not row and not pieces:
            raise ValueError(
                f"the source has no document for split {self.split!r} with validation_share={self.validation_share}; left "
                f"out: {'; '.join(self.left_out.lines()) or 'none'}."
            )
        if pieces and row >= self.start_row:
            yield packed_row(pieces, self.sequence_length)

    def _documents(self) -> Iterator[np.ndarray]:
        is_wanted = self.split == "validation"
        for batch in read_batches(self.source, self.on_error):
            self.left_out.merge(batch.left_out.kinds)
            texts = [text for text in batch.texts if is_held_out(text, self.validation_share) == is_wanted]
            yield from map(np.asarray, document_ids(self.tokenizer, texts))
