"""Parts of a decoder layer in few operations, for the steps of a recurrence.

A step has a few rows only, so that what an operation costs is mostly that it is run at all, forward and backward. Elsewhere
PyTorch's own are used, which these equal up to rounding.

Shapes: B rows, H heads, K keys, E head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from crosscurrent.recurrence.steps import is_step


def normalize(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """`norm(x)`."""
    is_plain = type(norm) is nn.RMSNorm and not (norm._forward_hooks or norm._forward_pre_hooks)
    if not (is_step() and is_plain and x.dtype == norm.weight.dtype and norm.eps is not None):
        return norm(x)
    found: Tensor = _RMSNorm.apply(x, norm.weight, norm.eps)
    return found


def attend_alone(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What one query [B, H, 1, E] makes of keys and values [B, H, K, E] that it sees all of."""
    found: Tensor = _LoneAttention.apply(query, keys, values)
    return found


class _RMSNorm(torch.autograd.Function):
    """w x / rms(x), rms(x)^2 = mean(x^2) + eps, over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        normed, scale, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_weight = gradient * normed
        shared = torch.matmul(of_weight, weight).unsqueeze(-1)  # sum over the features of what goes through the scale
        of_x = torch.addcmul(gradient * weight, normed, shared, value=-1 / normed.shape[-1]).mul_(scale)
        return of_x, of_weight.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None, None


class _LoneAttention(torch.autograd.Function):
    """softmax(q k / sqrt(E)) v."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.scale = query.shape[-1] ** -0.5
        weights = torch.matmul(query, keys.transpose(-1, -2)).mul_(ctx.scale).softmax(dim=-1)
        ctx.save_for_backward(query, keys, values, weights)
        return torch.matmul(weights, values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, keys, values, weights = ctx.saved_tensors
        (gradient,) = gradients
        of_weights = torch.matmul(gradient, values.transpose(-1, -2))
        mean = torch.linalg.vecdot(of_weights, weights).unsqueeze(-1)
        of_scores = (of_weights - mean).mul_(weights).mul_(ctx.scale)
        return torch.matmul(of_scores, keys), of_scores.transpose(-1, -2) * query, weights.transpose(-1, -2) * gradient
