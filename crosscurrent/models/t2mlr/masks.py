"""Attention masks for rows with padding or several documents, on top of those that the base model makes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscurrent.recurrence import PADDING


class DocumentMask:
    """Limits attention to earlier tokens of the same document; a padding token sees itself, so that no row is empty.

    Args:
        key_labels: [B, P + T] document of every token so far.
        num_tokens: T, those of this call.
        attn_implementation: of the base model.
        num_places: how many keys a static cache has room for; None: the cache grows.

    Raises:
        ValueError: rows hold several documents and the attention takes no masks (flash attention).
    """

    def __init__(
        self, key_labels: Tensor, num_tokens: int, attn_implementation: str | None, num_places: int | None = None
    ):
        self.applies = attn_implementation in ("sdpa", "eager", None)
        if not self.applies and bool((key_labels.amax(dim=1) != _lowest_document(key_labels)).any()):
            raise ValueError(
                f"several documents in a row need attn_implementation 'sdpa' or 'eager', and the model has "
                f"{attn_implementation!r}: model.set_attn_implementation('sdpa')."
            )
        num_keys = key_labels.shape[1]
        query_labels = key_labels[:, -num_tokens:, None]
        columns = torch.arange(num_keys, device=key_labels.device)
        rows = columns[-num_tokens:, None]
        same = (query_labels == key_labels[:, None, :]) & (query_labels != PADDING) & (columns <= rows)
        width = num_keys if num_places is None else num_places
        itself = (columns == rows)[None, None]
        self.itself, self.allowed = _fitted(itself, width), _fitted(same[:, None] | itself, width)  # [B, 1, T, P + T]
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, mask: Any) -> Any:
        """The layer's mask, limited. It keeps its kind: boolean (True: seen) or additive."""
        if not self.applies:
            return mask
        if mask is None:
            return self.allowed
        if self._last is None or self._last[0] is not mask:  # layers of one kind are given the same mask
            self._last = mask, self._limited(mask)
        return self._last[1]

    def _limited(self, mask: Tensor) -> Tensor:
        allowed, itself = _fitted(self.allowed, mask.shape[-1]), _fitted(self.itself, mask.shape[-1])
        if mask.dtype == torch.bool:
            return (mask | itself) & allowed
        lowest = torch.finfo(mask.dtype).min
        return torch.where(allowed, torch.where(itself, 0.0, mask), lowest).to(mask.dtype)


def _fitted(allowed: Tensor, num_keys: int) -> Tensor:
    """For as many keys as a layer has: the last ones (a sliding window), or more than there are tokens (a static cache)."""
    missing = num_keys - allowed.shape[-1]
    return F.pad(allowed, (0, missing)) if missing > 0 else allowed[..., -num_keys:]


def _lowest_document(key_labels: Tensor) -> Tensor:
    highest = key_labels.amax(dim=1, keepdim=True)
    return torch.where(key_labels == PADDING, highest, key_labels).amin(dim=1)


def refuse_padding_inside_documents(key_labels: Tensor) -> None:
    """A sliding window counts columns: padding between two tokens of a document would shorten it unnoticed."""
    before = torch.cat([torch.full_like(key_labels[:, :1], PADDING), key_labels[:, :-1]], dim=1)
    last_label = before.cummax(dim=1).values
    hole = (key_labels != PADDING) & (before == PADDING) & (last_label == key_labels)
    if bool(hole.any()):
        row, column = hole.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} continues at token {column} after padding, and the base model has sliding-window layers, which "
            "would count that padding as part of their window. Pad on the left."
        )
