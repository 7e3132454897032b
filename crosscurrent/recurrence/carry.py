"""What the next token gets to read: r_t = carry(y_t, r), r being the state that token t itself read.

Shapes: B rows, T tokens, D hidden_size.  y, r and the result [B, T, D]; `fused` [B, T, 1] bool tells the tokens that read a
state at all: the carry of the others must owe nothing to r.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscurrent.recurrence.kernels import triton_for


class Carry(Protocol):
    def __call__(self, y: Tensor, r: Tensor, fused: Tensor) -> Tensor: ...


@runtime_checkable
class ResidualCarry(Protocol):
    """A carry whose state holds what was read beside y: with y frozen, a recursion along the tokens that can be scanned."""

    detach_residual: bool

    def decay(self, y: Tensor, r: Tensor, fused: Tensor, state: Tensor) -> Tensor:
        """[B, T, 1] in [0, 1]: the share of a small change of r that reaches the state, the norm's scale held.

        state: what the carry made of y and r. A method that reads no weights: they may be sharded.
        """
        ...


class NormalizedSum(nn.Module):
    """T2MLR's cache update R_t = RMSNorm(h_t + R_{t-1}) (arXiv 2607.15178), the norm with a learned weight.

    Args:
        hidden_size: width D.
        eps: of the RMSNorm.
        detach_residual: let no gradient through the R_{t-1} term, as the authors do in fine-tuning.
        state_dtype: of the states, and of this computation. None: that of y, but at least float32, so that a state which is
            read and added to again and again is not rounded to the width of a bfloat16 stream each time.

    Example:
        >>> carry = NormalizedSum(hidden_size=4)
        >>> fused = torch.ones(1, 1, 1, dtype=torch.bool)
        >>> carry(torch.full((1, 1, 4), 3.0), torch.ones(1, 1, 4), fused).round(decimals=4).tolist()
        [[[1.0, 1.0, 1.0, 1.0]]]
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        detach_residual: bool = False,
        state_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.detach_residual, self.state_dtype = detach_residual, state_dtype
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def dtype_for(self, stream: torch.dtype) -> torch.dtype:
        """The states' dtype, given the stream's."""
        return state_dtype_for(stream, self.state_dtype)

    def forward(self, y: Tensor, r: Tensor, fused: Tensor) -> Tensor:
        dtype, weight = self.dtype_for(y.dtype), self.norm.weight
        r = r.detach() if self.detach_residual else r
        kernels = triton_for(y, r, weight, of_dtype=dtype)
        if kernels is not None:
            return kernels.normalized_sum(y, r, fused, weight, self.norm.eps, dtype)
        total = y.to(dtype) + torch.where(fused, r, 0).to(dtype)
        return F.rms_norm(total, self.norm.normalized_shape, weight.to(dtype), self.norm.eps)

    def decay(self, y: Tensor, r: Tensor, fused: Tensor, state: Tensor) -> Tensor:
        return _growth(y.to(state.dtype) + r.to(state.dtype), state) * fused


class BoundedSum(nn.Module):
    """The cache update of the authors' released code, for the checkpoints that were trained with it.

    With v = y + weight * R: the state is v * clamp(1 / sqrt(mean(v^2) + eps), 1 / bound, bound), the scale a constant to the
    gradient. A token that reads nothing leaves y itself behind. There are no parameters.

    Args:
        eps, bound: as above.
        residual_weight: of R.
        detach_residual: let no gradient through the R term.
        state_dtype: as in `NormalizedSum`.

    Example:
        >>> carry = BoundedSum()
        >>> y, r = torch.full((1, 2, 4), 3.0), torch.ones(1, 2, 4)
        >>> carry(y, r, torch.tensor([[[True], [False]]]))[..., 0].round(decimals=4).tolist()
        [[1.0, 3.0]]
    """

    def __init__(
        self,
        eps: float = 1e-6,
        bound: float = 5.0,
        residual_weight: float = 1.0,
        detach_residual: bool = False,
        state_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.bound, self.residual_weight = eps, bound, residual_weight
        self.detach_residual, self.state_dtype = detach_residual, state_dtype

    def dtype_for(self, stream: torch.dtype) -> torch.dtype:
        """The states' dtype, given the stream's."""
        return state_dtype_for(stream, self.state_dtype)

    def forward(self, y: Tensor, r: Tensor, fused: Tensor) -> Tensor:
        y = y.to(self.dtype_for(y.dtype))
        total = y + self.residual_weight * (r.detach() if self.detach_residual else r).to(y.dtype)
        mean_square = total.detach().square().mean(dim=-1, keepdim=True)
        scale = (mean_square + self.eps).rsqrt().clamp(1 / self.bound, self.bound)
        return torch.where(fused, total * scale, y)

    def decay(self, y: Tensor, r: Tensor, fused: Tensor, state: Tensor) -> Tensor:
        total = y.to(state.dtype) + self.residual_weight * r.to(state.dtype)
        return (self.residual_weight * _growth(total, state)).clamp(0, 1) * fused


def _growth(total: Tensor, state: Tensor) -> Tensor:
    """[B, T, 1] how much larger the state is than the sum that was normalised, at most 1: a recursion must not blow up."""
    size = total.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)
    return (state.norm(dim=-1, keepdim=True) / size).clamp(max=1)


def state_dtype_for(stream: torch.dtype, asked_for: torch.dtype | None) -> torch.dtype:
    """The dtype of the states beside a stream of a given dtype: what was asked for, else at least float32."""
    return torch.promote_types(stream, torch.float32) if asked_for is None else asked_for


class LastOutput(nn.Module):
    """RLT's carry: the state is the core's last output itself, s_t = y_t."""

    def forward(self, y: Tensor, r: Tensor, fused: Tensor) -> Tensor:
        return y
