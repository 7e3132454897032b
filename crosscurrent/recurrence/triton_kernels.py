"""The elementwise ends of fusions and carries as Triton kernels, forward and backward. Imported only where they are used.

All compute in float32 and add in a fixed order, so that a run repeats in every bit. Gradients with respect to a state
that several tokens read are made token by token and then summed.

Shapes: B rows, T tokens, D hidden_size.  Tokens are [B, T, D]; states [B, T, D] or [B, 1, D], which broadcasts over tokens.
In a kernel a row is one token's, and `*_batch`, `*_token` are the strides of a tensor along B and T: 0 where it broadcasts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_COLUMNS = 1024  # of a row, in one program of an elementwise kernel
_MOST_PROGRAMS = 256  # among which the rows are dealt out where a weight's gradient is summed over them


@triton.jit
def _tanh(x):
    """Near 0 by its series: there the other form would lose all digits."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _at(tensor, of_batch, of_token, row, num_tokens):
    """Where the token of a row begins."""
    return tensor + (row // num_tokens) * of_batch + (row % num_tokens) * of_token


@triton.jit
def _read(token, columns, inside):
    return tl.load(token + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gate(of_stream, of_state, columns, inside):
    return tl.sigmoid(_read(of_stream, columns, inside) + _read(of_state, columns, inside))


@triton.jit
def _fusion_forward(
    z,
    x,
    x_batch,
    x_token,
    of_stream,
    of_stream_batch,
    of_stream_token,
    of_current,
    of_current_batch,
    of_current_token,
    of_recurrent,
    of_recurrent_batch,
    of_recurrent_token,
    projected,
    projected_batch,
    projected_token,
    current_scale,
    recurrent_scale,
    num_tokens,
    width,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    stream = _at(of_stream, of_stream_batch, of_stream_token, row, num_tokens)
    to_current = _at(of_current, of_current_batch, of_current_token, row, num_tokens)
    to_recurrent = _at(of_recurrent, of_recurrent_batch, of_recurrent_token, row, num_tokens)
    current = _gate(stream, to_current, columns, inside)
    recurrent = _gate(stream + width, to_recurrent, columns, inside)
    h = _read(_at(x, x_batch, x_token, row, num_tokens), columns, inside)
    state = _read(_at(projected, projected_batch, projected_token, row, num_tokens), columns, inside)
    kept = _tanh(tl.load(current_scale).to(tl.float32)) * current * h
    added = _tanh(tl.load(recurrent_scale).to(tl.float32)) * recurrent * state
    tl.store(z + row * width + columns, h + kept + added, mask=inside)


@triton.jit
def _fusion_backward(
    grad_x,
    grad_gates,
    grad_projected,
    grad_scales,
    grad_z,
    grad_z_batch,
    grad_z_token,
    x,
    x_batch,
    x_token,
    of_stream,
    of_stream_batch,
    of_stream_token,
    of_current,
    of_current_batch,
    of_current_token,
    of_recurrent,
    of_recurrent_batch,
    of_recurrent_token,
    projected,
    projected_batch,
    projected_token,
    current_scale,
    recurrent_scale,
    num_tokens,
    width,
    block: tl.constexpr,
):
    """grad_gates [B, T, 2 D] is what both the stream's and the state's part of the gates get; grad_scales [2, programs]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    stream = _at(of_stream, of_stream_batch, of_stream_token, row, num_tokens)
    to_current = _at(of_current, of_current_batch, of_current_token, row, num_tokens)
    to_recurrent = _at(of_recurrent, of_recurrent_batch, of_recurrent_token, row, num_tokens)
    current = _gate(stream, to_current, columns, inside)
    recurrent = _gate(stream + width, to_recurrent, columns, inside)
    h = _read(_at(x, x_batch, x_token, row, num_tokens), columns, inside)
    state = _read(_at(projected, projected_batch, projected_token, row, num_tokens), columns, inside)
    g = _read(_at(grad_z, grad_z_batch, grad_z_token, row, num_tokens), columns, inside)
    of_kept = _tanh(tl.load(current_scale).to(tl.float32))
    of_added = _tanh(tl.load(recurrent_scale).to(tl.float32))
    tl.store(grad_x + row * width + columns, g * (1 + of_kept * current), mask=inside)
    gates = grad_gates + row * 2 * width
    tl.store(gates + columns, g * of_kept * h * current * (1 - current), mask=inside)
    tl.store(gates + width + columns, g * of_added * state * recurrent * (1 - recurrent), mask=inside)
    tl.store(grad_projected + row * width + columns, g * of_added * recurrent, mask=inside)
    program = row * tl.num_programs(1) + tl.program_id(1)
    num_programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(grad_scales + program, (1 - of_kept * of_kept) * tl.sum(g * current * h))
    tl.store(grad_scales + num_programs + program, (1 - of_added * of_added) * tl.sum(g * recurrent * state))


@triton.jit
def _merge_forward(
    u,
    x,
    x_batch,
    x_token,
    of_stream,
    of_stream_batch,
    of_stream_token,
    of_state,
    of_state_batch,
    of_state_token,
    projected,
    projected_batch,
    projected_token,
    scale,
    num_tokens,
    width,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    stream = _at(of_stream, of_stream_batch, of_stream_token, row, num_tokens)
    gate = _gate(stream, _at(of_state, of_state_batch, of_state_token, row, num_tokens), columns, inside)
    e = _read(_at(x, x_batch, x_token, row, num_tokens), columns, inside)
    state = _read(_at(projected, projected_batch, projected_token, row, num_tokens), columns, inside)
    tl.store(u + row * width + columns, e + scale * gate * state, mask=inside)


@triton.jit
def _merge_backward(
    grad_gate,
    grad_projected,
    grad_u,
    grad_u_batch,
    grad_u_token,
    of_stream,
    of_stream_batch,
    of_stream_token,
    of_state,
    of_state_batch,
    of_state_token,
    projected,
    projected_batch,
    projected_token,
    scale,
    num_tokens,
    width,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    stream = _at(of_stream, of_stream_batch, of_stream_token, row, num_tokens)
    gate = _gate(stream, _at(of_state, of_state_batch, of_state_token, row, num_tokens), columns, inside)
    state = _read(_at(projected, projected_batch, projected_token, row, num_tokens), columns, inside)
    g = _read(_at(grad_u, grad_u_batch, grad_u_token, row, num_tokens), columns, inside)
    of_projected = scale * g * gate
    tl.store(grad_projected + row * width + columns, of_projected, mask=inside)
    tl.store(grad_gate + row * width + columns, of_projected * state * (1 - gate), mask=inside)


@triton.jit
def _sum_forward(
    out,
    y,
    y_batch,
    y_token,
    r,
    r_batch,
    r_token,
    fused,
    fused_batch,
    fused_token,
    weight,
    eps,
    num_tokens,
    width,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    is_fused = tl.load(_at(fused, fused_batch, fused_token, row, num_tokens)) != 0
    total = _read(_at(y, y_batch, y_token, row, num_tokens), columns, inside)
    # Of a token that is not fused r is not even read.
    total += _read(_at(r, r_batch, r_token, row, num_tokens), columns, inside & is_fused)
    scale = tl.rsqrt(tl.sum(total * total) / width + eps)
    tl.store(out + row * width + columns, total * scale * _read(weight, columns, inside), mask=inside)


@triton.jit
def _sum_backward(
    grad_y,
    grad_r,
    grad_weight,
    grad_out,
    grad_out_batch,
    grad_out_token,
    y,
    y_batch,
    y_token,
    r,
    r_batch,
    r_token,
    fused,
    fused_batch,
    fused_token,
    weight,
    eps,
    num_rows,
    num_tokens,
    width,
    block: tl.constexpr,
):
    """grad_weight [programs, D]. The rows are dealt out to the programs in turn."""
    program = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < width
    w = _read(weight, columns, inside)
    of_weight = tl.zeros([block], dtype=tl.float32)
    for row in range(program.to(tl.int64), num_rows, tl.num_programs(0)):
        is_fused = tl.load(_at(fused, fused_batch, fused_token, row, num_tokens)) != 0
        total = _read(_at(y, y_batch, y_token, row, num_tokens), columns, inside)
        total += _read(_at(r, r_batch, r_token, row, num_tokens), columns, inside & is_fused)
        scale = tl.rsqrt(tl.sum(total * total) / width + eps)
        normalized = total * scale
        g = _read(_at(grad_out, grad_out_batch, grad_out_token, row, num_tokens), columns, inside)
        of_weight += g * normalized
        of_total = scale * (g * w - normalized * (tl.sum(g * w * normalized) / width))
        tl.store(grad_y + row * width + columns, of_total, mask=inside)
        tl.store(grad_r + row * width + columns, tl.where(is_fused, of_total, 0.0), mask=inside)
    tl.store(grad_weight + program * width + columns, of_weight, mask=inside)


def gated_fusion(
    x: Tensor,
    of_stream: Tensor,
    of_current: Tensor,
    of_recurrent: Tensor,
    projected: Tensor,
    current_scale: Tensor,
    recurrent_scale: Tensor,
) -> Tensor:
    """z [B, T, D] of `GatedFusion`, from the products that it consists of.

    Args:
        x: [B, T, D] the stream.
        of_stream: [B, T, 2 D] what the stream adds to both gates.
        of_current, of_recurrent: what the state adds to each, with the bias.
        projected: the state times W_rec. These three [B, T, D] or [B, 1, D].
        current_scale, recurrent_scale: [1] before the tanh.
    """
    z: Tensor = _GatedFusion.apply(x, of_stream, of_current, of_recurrent, projected, current_scale, recurrent_scale)
    return z


def merge(x: Tensor, of_stream: Tensor, of_state: Tensor, projected: Tensor, scale: float) -> Tensor:
    """u [B, T, D] of `Merge`, from the products that it consists of.

    Args:
        x: [B, T, D] the encoder's output.
        of_stream: [B, T, D] what it adds to the gate.
        of_state: what the state adds to it, with the bias.
        projected: the state times W_s. Both [B, T, D] or [B, 1, D].
        scale: alpha.
    """
    u: Tensor = _Merge.apply(x, of_stream, of_state, projected, scale)
    return u


def normalized_sum(y: Tensor, r: Tensor, fused: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm(y + r) [B, T, D] of `NormalizedSum` in the given dtype.

    Args:
        y: [B, T, D].
        r: [B, T, D] or [B, 1, D]; of tokens that are not fused it is not read.
        fused: [B, T, 1] bool.
        weight: [D].
        eps: of the norm.
        dtype: of the result.
    """
    total: Tensor = _NormalizedSum.apply(y, r, fused, weight, eps, dtype)
    return total


class _GatedFusion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x, *others)
        z = torch.empty(x.shape, dtype=_promoted(x, *others), device=x.device)
        *products, current_scale, recurrent_scale = others
        _over_elements(_fusion_forward, x, (z,), (x, *products), (current_scale, recurrent_scale))
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: Tensor) -> Any:
        x, of_stream, of_current, of_recurrent, projected, current_scale, recurrent_scale = ctx.saved_tensors
        grad_x = _empty_like(x)
        grad_gates = _empty_like(of_stream)
        grad_projected = torch.empty(x.shape, dtype=projected.dtype, device=x.device)
        grad_scales = torch.empty(2, _num_programs(x), dtype=torch.float32, device=x.device)
        _over_elements(
            _fusion_backward,
            x,
            (grad_x, grad_gates, grad_projected, grad_scales),
            (grad_z, x, of_stream, of_current, of_recurrent, projected),
            (current_scale, recurrent_scale),
        )
        of_gates = _summed(grad_gates, of_current.shape[1]).chunk(2, dim=-1)
        of_scales = grad_scales.sum(dim=1).split(1)
        return grad_x, grad_gates, *of_gates, _summed(grad_projected, projected.shape[1]), *of_scales


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of_stream: Tensor, of_state: Tensor, projected: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(of_stream, of_state, projected)
        ctx.scale = scale
        u = torch.empty(x.shape, dtype=_promoted(x, of_stream, of_state, projected), device=x.device)
        _over_elements(_merge_forward, x, (u,), (x, of_stream, of_state, projected), (scale,))
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_u: Tensor) -> Any:
        of_stream, of_state, projected = ctx.saved_tensors
        grad_gate = _empty_like(of_stream)
        grad_projected = torch.empty(of_stream.shape, dtype=projected.dtype, device=grad_u.device)
        _over_elements(
            _merge_backward,
            of_stream,
            (grad_gate, grad_projected),
            (grad_u, of_stream, of_state, projected),
            (ctx.scale,),
        )
        of_state, of_projected = _summed(grad_gate, of_state.shape[1]), _summed(grad_projected, projected.shape[1])
        return grad_u, grad_gate, of_state, of_projected, None


class _NormalizedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, r: Tensor, fused: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(y, r, fused, weight)
        ctx.eps = eps
        num_tokens, width = y.shape[1:]
        out = torch.empty(y.shape, dtype=dtype, device=y.device)
        tokens = _with_strides(y.shape, y, r, fused)
        with torch.cuda.device_of(y):
            _sum_forward[(y.shape[0] * num_tokens,)](out, *tokens, weight, eps, num_tokens, width, **_whole(width))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        y, r, fused, weight = ctx.saved_tensors
        num_tokens, width = y.shape[1:]
        num_rows = y.shape[0] * num_tokens
        num_programs = min(num_rows, _MOST_PROGRAMS)
        grad_y = _empty_like(y)
        grad_r = torch.empty(y.shape, dtype=r.dtype, device=y.device)
        grad_weight = torch.empty(num_programs, width, dtype=torch.float32, device=y.device)
        tokens = _with_strides(y.shape, grad_out, y, r, fused)
        written = (grad_y, grad_r, grad_weight)
        with torch.cuda.device_of(y):
            _sum_backward[(num_programs,)](
                *written, *tokens, weight, ctx.eps, num_rows, num_tokens, width, **_whole(width)
            )
        return grad_y, _summed(grad_r, r.shape[1]), None, grad_weight.sum(dim=0), None, None


def _over_elements(
    kernel: Any, x: Tensor, written: tuple[Tensor, ...], tokens: tuple[Tensor, ...], others: tuple[Any, ...]
) -> None:
    """Run a kernel that has one program for each row of x [B, T, D] and each block of columns."""
    batch_size, num_tokens, width = x.shape
    block = _block(width)
    grid = (batch_size * num_tokens, triton.cdiv(width, block))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernel[grid](*written, *_with_strides(x.shape, *tokens), *others, num_tokens, width, block=block)


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), _MOST_COLUMNS)


def _whole(width: int) -> dict[str, int]:
    """Options of a kernel whose programs hold whole rows."""
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": min(max(block // 512, 4), 16)}


def _num_programs(x: Tensor) -> int:
    batch_size, num_tokens, width = x.shape
    return batch_size * num_tokens * triton.cdiv(width, _block(width))


def _with_strides(shape: torch.Size, *tensors: Tensor) -> list[Any]:
    """Each tensor, followed by its strides along rows and tokens of a shape that it broadcasts to."""
    found: list[Any] = []
    for tensor in tensors:
        dense = tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
        spread = dense.expand(*shape[:2], -1)
        found += [spread, spread.stride(0), spread.stride(1)]
    return found


def _promoted(first: Tensor, *others: Tensor) -> torch.dtype:
    dtype = first.dtype
    for one in others:
        dtype = torch.promote_types(dtype, one.dtype)
    return dtype


def _empty_like(tensor: Tensor) -> Tensor:
    """Dense, whatever the strides of the tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _summed(gradient: Tensor, num_tokens: int) -> Tensor:
    """What [B, T, N] is to a tensor with so many tokens that was spread over T."""
    return gradient if gradient.shape[1] == num_tokens else gradient.sum(dim=1, keepdim=True)
