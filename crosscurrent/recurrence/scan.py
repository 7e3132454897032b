"""Linear recursions along the tokens of a row, solved in log2(T) steps on whole tensors.

Shapes: B rows, T tokens, D hidden_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscurrent.recurrence.schedule import INITIAL, Plan


def linear_scan(decay: Tensor, drive: Tensor) -> Tensor:
    """h [B, T, D] with h_t = decay_t * h_{t-1} + drive_t and h_0 = 0, by doubling (Hillis and Steele, 1986).

    Only products and sums: nothing is divided, so nothing is lost where a decay is 0.

    Args:
        decay: [B, T, D] or [B, T, 1].
        drive: [B, T, D].

    Example:
        >>> linear_scan(torch.full((1, 4, 1), 0.5), torch.ones(1, 4, 1)).flatten().tolist()
        [1.0, 1.5, 1.75, 1.875]
    """
    shift = 1
    while shift < drive.shape[1]:
        drive = drive + decay * _later(drive, shift)
        decay = decay * _later(decay, shift)
        shift *= 2
    return drive


def _later(values: Tensor, shift: int) -> Tensor:
    """The values of the column `shift` columns before, 0 where there is none."""
    return F.pad(values[:, :-shift], (0, 0, shift, 0))


def change_of_reads(plan: Plan, change: Tensor, decay: Tensor) -> Tensor:
    """[B, T, D] how much what each token reads changes, if each state changes by its own share and by what it read.

    The recursion is d_t = change_t + decay_t * d_sigma(t); the result is d_sigma(t). States from outside the call do not
    change.

    Args:
        change: [B, T, D] each state's own change.
        decay: [B, T, D] or [B, T, 1] the share of a change of what it read that reaches it.
    """
    starts = (plan.source == INITIAL)[..., None]
    writes = plan.writes[..., None]
    none_after = (plan.source_after == INITIAL)[..., None]
    # The register after each column: a new state where one is written, else the one before it.
    kept = torch.where(none_after, 0.0, 1.0).to(decay.dtype)
    register = linear_scan(
        torch.where(writes, torch.where(starts, 0.0, decay), kept),
        torch.where(writes, change, torch.zeros_like(change)),
    )
    return torch.where(starts, 0.0, _later(register, 1))
