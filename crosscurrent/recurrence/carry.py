"""What the next token gets to read: r_t = carry(y_t, r), r being the state that token t itself read.

Shapes: B rows, T tokens, D hidden_size.  y, r and the result [B, T, D]; `fused` [B, T, 1] bool tells the tokens that read a
state at all: the carry of the others must owe nothing to r.
"""

from typing import Protocol

import torch
from torch import Tensor, nn


class Carry(Protocol):
    def __call__(self, y: Tensor, r: Tensor, fused: Tensor) -> Tensor: ...


class NormalizedSum(nn.Module):
    """T2MLR's cache update R_t = RMSNorm(h_t + R_{t-1}) (arXiv 2607.15178), the norm with a learned weight.

    Args:
        hidden_size: width D.
        eps: of the RMSNorm.
        detach_residual: let no gradient through the R_{t-1} term, as the authors do in fine-tuning.

    Example:
        >>> carry = NormalizedSum(hidden_size=4)
        >>> fused = torch.ones(1, 1, 1, dtype=torch.bool)
        >>> carry(torch.full((1, 1, 4), 3.0), torch.ones(1, 1, 4), fused).round(decimals=4).tolist()
        [[[1.0, 1.0, 1.0, 1.0]]]
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, detach_residual: bool = False):
        super().__init__()
        self.detach_residual = detach_residual
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def forward(self, y: Tensor, r: Tensor, fused: Tensor) -> Tensor:
        residual = torch.where(fused, r, 0)
        return self.norm(y + (residual.detach() if self.detach_residual else residual))


class LastOutput(nn.Module):
    """RLT's carry: the state is the core's last output itself, s_t = y_t."""

    def forward(self, y: Tensor, r: Tensor, fused: Tensor) -> Tensor:
        return y
