"""The carried state as an explicit value: passed in, returned, and never kept on a module."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RecurrentState:
    """What a row carries from one call to the next, beside its attention entries.

    Every operation returns a new value; none changes this one.

    Attributes:
        register: [B, D] the state that the next token of the same document reads.
        num_tokens: [B] int64, real tokens consumed so far in the row's current document. Chunks of a feedback
            interval are counted from it, per row.
        segment: [B] int64, id of the row's current document; -1 before the first real token.

    Example:
        >>> state = RecurrentState.start(torch.zeros(2, 4))
        >>> state.map(lambda tensor: tensor.repeat_interleave(3, dim=0)).batch_size
        6
    """

    register: Tensor
    num_tokens: Tensor
    segment: Tensor

    @classmethod
    def start(cls, register: Tensor) -> "RecurrentState":
        """The state before the first token, given the architecture's initial register [B, D]."""
        counts = torch.zeros(register.shape[0], dtype=torch.int64, device=register.device)
        return cls(register=register, num_tokens=counts, segment=counts - 1)

    @property
    def batch_size(self) -> int:
        return self.register.shape[0]

    def map(self, change: Callable[[Tensor], Tensor]) -> "RecurrentState":
        """The state with each of its tensors changed: rows reordered, repeated or selected, moved to a device, detached."""
        return RecurrentState(change(self.register), change(self.num_tokens), change(self.segment))
