"""Batches of packed rows, as the models read them.

Shapes: B rows, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import default_collate

from crosscurrent.data.packing import Row


def collate_rows(rows: Sequence[Row]) -> dict[str, Tensor]:
    """For recurrent models: all columns [B, T] as they are."""
    batch: dict[str, Tensor] = default_collate(list(rows))
    return batch


def collate_rows_for_attention(rows: Sequence[Row]) -> dict[str, Tensor]:
    """For models of transformers: input_ids, labels and position_ids [B, T] int64.

    Positions that begin anew are how transformers tells the documents of a row, so that attention does not cross from one
    into the next. Padding is a last document without labels.

    Example:
        >>> row = {"input_ids": torch.tensor([5, 6, 7, 8, 0]), "labels": torch.tensor([-100, 6, -100, 8, -100]),
        ...        "segment_ids": torch.tensor([0, 0, 1, 1, 0]), "attention_mask": torch.tensor([1, 1, 1, 1, 0])}
        >>> collate_rows_for_attention([row])["position_ids"].tolist()
        [[0, 1, 0, 1, 0]]
    """
    batch = collate_rows(rows)
    documents = torch.where(batch["attention_mask"] == 1, batch["segment_ids"], -1)
    columns = torch.arange(documents.shape[1]).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    start = torch.where(begins, columns, 0).cummax(dim=1).values
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": columns - start}
