"""Parts of a decoder layer in few operations, for the steps of a recurrence.

A step has a few rows only, so that what an operation costs is mostly that it is run at all, forward and backward. Elsewhere
PyTorch's own are used, which these equal up to rounding.

Shapes: B rows, H heads, S queries, K keys, E head width.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from crosscurrent.recurrence.entries import Part
from crosscurrent.recurrence.steps import is_step

_FEW_QUERIES = 16  # more are better served by a kernel that does not write their scores down


def normalize(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """`norm(x)`, in the wider dtype of the two."""
    x = x.to(torch.promote_types(x.dtype, norm.weight.dtype))  # under autocast they differ, for which norms are slow
    is_plain = type(norm) is nn.RMSNorm and not (norm._forward_hooks or norm._forward_pre_hooks)
    if not (is_step() and is_plain and x.dtype == norm.weight.dtype and norm.eps is not None):
        return norm(x)
    found: Tensor = _RMSNorm.apply(x, norm.weight, norm.eps)
    return found


def suits_few_queries(queries: Tensor, keys: Part) -> bool:
    """Whether `attend_few` is to be used. It writes scores down, and in 16 bits it would round them."""
    is_few = queries.shape[2] <= _FEW_QUERIES and is_step()
    return is_few and keys.after is not None and keys.storage.dtype.itemsize >= 4


def attend_few(queries: Tensor, keys: Part, values: Part, seen: Tensor | None) -> Tensor:
    """Attention of a few queries [B, H, S, E]; seen: [B or 1, 1, S, K] bool, None: they see all keys."""
    assert keys.after is not None and values.after is not None
    found: Tensor = _FewQueries.apply(queries.to(keys.storage.dtype), keys.after, values.after, keys, values, seen)
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


class _FewQueries(torch.autograd.Function):
    """softmax(q k / sqrt(E)) v, whose backward pass adds to the gradients of keys and values in place."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, _keys: Tensor, _values: Tensor, keys: Part, values: Part, seen: Tensor | None
    ) -> Tensor:
        device = queries.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            scores = torch.matmul(queries, keys.view().transpose(-1, -2)).mul_(queries.shape[-1] ** -0.5)
            weights = (scores if seen is None else scores.masked_fill_(~seen, -torch.inf)).softmax(dim=-1)
            ctx.save_for_backward(queries, weights)
            ctx.keys, ctx.values = keys, values
            return torch.matmul(weights, values.view())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        queries, weights = ctx.saved_tensors
        of_weights = torch.matmul(gradient, ctx.values.view().transpose(-1, -2))
        mean = torch.linalg.vecdot(of_weights, weights).unsqueeze(-1)
        of_scores = (of_weights - mean).mul_(weights).mul_(queries.shape[-1] ** -0.5)
        if ctx.needs_input_grad[1]:
            _add_product(ctx.keys.gradient.of(ctx.keys), of_scores, queries)
        if ctx.needs_input_grad[2]:
            _add_product(ctx.values.gradient.of(ctx.values), weights, gradient)
        of_queries = torch.matmul(of_scores, ctx.keys.view()) if ctx.needs_input_grad[0] else None
        return of_queries, None, None, None, None, None


def _add_product(total: Tensor, weights: Tensor, rows: Tensor) -> None:
    """Add weights^T rows to total [B, H, K, E]; weights [B, H, S, K], rows [B, H, S, E]."""
    if rows.shape[2] == 1:
        total.addcmul_(weights.transpose(-1, -2), rows)
    else:
        total.add_(torch.matmul(weights.transpose(-1, -2), rows))
