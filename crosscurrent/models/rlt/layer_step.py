"""A decoder layer in the steps of a recurrence: what `DecoderLayer` computes, as one function with a backward pass by hand.

A step has a few rows only. There an operation costs mostly that it is run at all, by PyTorch and by its autograd: written
this way a layer takes about a third of that. `layers.py` is the reference, which this equals up to rounding, gradients too.

Shapes: B rows, S columns of one step, D hidden_size, H heads, E = D / H, K keys.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscurrent.models.rlt.layers import DecoderLayer, FeedForward, MemoryAttention, Rotation, SelfAttention, rotate
from crosscurrent.recurrence.backward_pass import refuse_second_derivatives
from crosscurrent.recurrence.compiling import compiled, compiles_steps
from crosscurrent.recurrence.entries import Entries, Part
from crosscurrent.recurrence.steps import Steps, is_bare, is_plain_linear, multiply

MOST_COLUMNS = 16  # of a step: more are better served by attention that does not write its scores down
_KINDS: tuple[type[nn.Module], ...] = (nn.RMSNorm, DecoderLayer, SelfAttention, MemoryAttention, FeedForward)
_FORWARDS: dict[type[nn.Module], Any] = {kind: kind.forward for kind in _KINDS}  # as long as nobody replaces them


def suits_steps(layer: DecoderLayer) -> bool:
    """Whether a layer is nothing but its weights: no adapter, quantiser, offloader or hook."""
    same_eps = layer.self_attn.q_norm.eps == layer.self_attn.k_norm.eps
    return same_eps and all(_is_bare(module) for module in layer.modules())


def _is_bare(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return is_plain_linear(module) and module.bias is None
    has_weight = not isinstance(module, nn.RMSNorm) or module.weight is not None
    return type(module) in _FORWARDS and is_bare(module, _FORWARDS[type(module)]) and has_weight


def by_column(rotation: Rotation) -> Rotation:
    """From [B, 1, S, E] to [B, S, 1, 1, E], as heads lie in a step."""
    # Contiguous, as parts of a longer sequence are not, so that compiled code need not be another for each length.
    cos, sin = (part.transpose(1, 2)[:, :, None].contiguous() for part in rotation)
    return cos, sin


class Seen(NamedTuple):
    """Keys and values, and which of them each query sees: mask [B or 1, 1, S, K] bool; None: all."""

    keys: Part
    values: Part
    mask: Tensor | None


@dataclass(frozen=True)
class Place:
    """Where a step stands.

    Attributes:
        rotation: of its positions, `by_column`.
        window: the layer's own entries, the step's included, which are written here.
        memory: the memory's.
    """

    rotation: Rotation
    window: Seen
    memory: Seen


class LayerStep:
    """A decoder layer whose weights are ready for the steps of one call."""

    def __init__(self, layer: DecoderLayer, steps: Steps):
        attention, memory, mlp = layer.self_attn, layer.memory_attn, layer.mlp
        self.weights = (
            steps.shared(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            steps.shared(attention.o_proj.weight),
            steps.shared(memory.q_proj.weight),
            steps.shared(memory.o_proj.weight),
            steps.shared(mlp.gate_proj.weight, mlp.up_proj.weight),
            steps.shared(mlp.down_proj.weight),
        )
        stream_norms = (layer.input_layernorm, layer.memory_layernorm, layer.post_attention_layernorm)
        head_norms = (attention.q_norm, attention.k_norm, memory.q_norm)
        gates = [weight.gate for weight in self.weights]
        self._parameters = (*gates, *(norm.weight for norm in (*stream_norms, *head_norms)))
        of_queries_and_keys = torch.stack([norm.weight.detach() for norm in head_norms[:2]])[:, None]
        weights = [norm.weight for norm in stream_norms]
        self.norms = _Norms._make([*weights, of_queries_and_keys, memory.q_norm.weight])
        self.eps = _Norms._make([norm.eps for norm in (*stream_norms, attention.q_norm, memory.q_norm)])
        self.is_compiled = compiles_steps(attention.q_proj.weight.device.type)

    def __call__(self, stream: Tensor, keys: Entries, values: Entries, place: Place) -> tuple[Tensor, Entries, Entries]:
        """The stream [B, S, D] after the layer, and its entries with the step's own."""
        device = stream.device.type
        befores = keys.after, values.after, place.memory.keys.after, place.memory.values.after
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            stream, after = _Layer.apply(stream, self, place, *befores, *self._parameters)
        return stream, keys.extended(stream.shape[1], after), values.extended(stream.shape[1], after)


class _Norms(NamedTuple):
    """Of a layer's norms the weights, or the epsilons.

    Attributes:
        window, memory, mlp: before the attention to the window, that to the memory, and the feed-forward; weights [D].
        heads: of the queries and keys of the window; weights [2, 1, E].
        memory_queries: weight [E].
    """

    window: Any
    memory: Any
    mlp: Any
    heads: Any
    memory_queries: Any


class _Layer(torch.autograd.Function):
    """The layer. Its second result, a tensor of no size, is what later steps depend on, so that the backward pass comes
    here after theirs and finds what they sent back to this step's keys and values."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, layer: LayerStep, place: Place, *others: Any) -> tuple[Tensor, Tensor]:
        matrices = tuple(weight.matrix() for weight in layer.weights)
        window, memory = _entries(place.window), _entries(place.memory)
        masks = place.window.mask, place.memory.mask
        run = compiled(_forward, (*window, *memory), masks) if layer.is_compiled else _forward
        stream, *saved = run(stream, matrices, layer.norms, layer.eps, place.rotation, window, memory, masks)
        ctx.layer, ctx.place = layer, place
        ctx.save_for_backward(*saved, *others[-6:])  # with the weights of the norms, so that changes are noticed
        return stream, stream.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivatives()
        layer, place, saved = ctx.layer, ctx.place, ctx.saved_tensors[:-6]
        matrices = tuple(weight.transposed() for weight in layer.weights)
        stream = gradients[0].contiguous()
        window, of_window, memory = _entries(place.window), _gradients(place.window), _entries(place.memory)
        run = compiled(_backward, (*window, *of_window, *memory)) if layer.is_compiled else _backward
        of_stream, of_norms, of_products, of_memory = run(
            stream, saved, matrices, layer.norms, place.rotation, window, of_window, memory
        )
        for part, factors in zip((place.memory.keys, place.memory.values), of_memory, strict=True):
            assert part.gradient is not None
            part.gradient.keep(*factors, part.start)
        for weight, gradient, x in zip(layer.weights, of_products, _Saved(*saved).inputs, strict=True):
            weight.keep(gradient, x)
        return of_stream, *(None,) * 12, *of_norms


class _Entries(NamedTuple):
    """Keys and values [B, H, K, E], or their gradients."""

    keys: Tensor
    values: Tensor


def _entries(seen: Seen) -> _Entries:
    # .data: what was written before does not change, so no reader's backward pass need complain of what a step writes.
    return _Entries(seen.keys.view().data, seen.values.view().data)


def _gradients(seen: Seen) -> _Entries:
    """To be added to in place."""
    keys, values = seen.keys, seen.values
    assert keys.gradient is not None and values.gradient is not None
    return _Entries(keys.gradient.of(keys.start, keys.stop), values.gradient.of(values.start, values.stop))


class _Saved(NamedTuple):
    """What the forward pass of a layer keeps for its backward pass."""

    hat: Tensor
    scale: Tensor
    heads_in: Tensor
    heads_hat: Tensor
    heads_scale: Tensor
    queries: Tensor
    weights: Tensor
    attended: Tensor
    memory_hat: Tensor
    memory_scale: Tensor
    query_in: Tensor
    query_hat: Tensor
    query_scale: Tensor
    memory_queries: Tensor
    memory_weights: Tensor
    recalled: Tensor
    mlp_hat: Tensor
    mlp_scale: Tensor
    mlp_in: Tensor
    gate_and_up: Tensor
    opened: Tensor
    down_in: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Of the six products."""
        return self.heads_in, self.attended, self.query_in, self.recalled, self.mlp_in, self.down_in


def _forward(
    stream: Tensor,
    matrices: tuple[Tensor, ...],
    norms: _Norms,
    eps: _Norms,
    rotation: Rotation,
    window: _Entries,
    memory: _Entries,
    masks: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, ...]:
    """The stream after the layer, and what is `_Saved`. The step's own keys and values, the window's last, are written."""
    in_projection, out_projection, query_projection, memory_out, gate_and_up_projection, down = matrices
    num_heads, num_own = window.keys.shape[1], stream.shape[1]
    dtype = out_projection.dtype  # of products

    normed = _normalize(stream, norms.window, eps.window)
    heads_in = normed.out.to(dtype)
    heads = multiply(heads_in, in_projection).unflatten(-1, (3, num_heads, -1))  # [B, S, 3, H, E]
    normed_heads = _normalize(heads[:, :, :2].to(norms.heads.dtype), norms.heads, eps.heads)
    rotated = rotate(normed_heads.out, rotation)
    queries = rotated[:, :, 0].transpose(1, 2)
    _own(window.keys, num_own).copy_(rotated[:, :, 1].transpose(1, 2))
    _own(window.values, num_own).copy_(heads[:, :, 2].transpose(1, 2))
    attended, weights = _attend(queries, window, masks[0])
    attended = attended.to(dtype)
    after_window = stream + multiply(attended, out_projection)

    memory_normed = _normalize(after_window, norms.memory, eps.memory)
    query_in = memory_normed.out.to(dtype)
    query = multiply(query_in, query_projection).unflatten(-1, (1, num_heads, -1))
    normed_query = _normalize(query.to(norms.memory_queries.dtype), norms.memory_queries, eps.memory_queries)
    memory_queries = rotate(normed_query.out, rotation)[:, :, 0].transpose(1, 2)
    recalled, memory_weights = _attend(memory_queries, memory, masks[1])
    recalled = recalled.to(dtype)
    after_memory = after_window + multiply(recalled, memory_out)

    mlp_normed = _normalize(after_memory, norms.mlp, eps.mlp)
    mlp_in = mlp_normed.out.to(dtype)
    gate_and_up = multiply(mlp_in, gate_and_up_projection)
    gate, up = gate_and_up.chunk(2, dim=-1)
    opened = F.silu(gate)
    down_in = opened * up
    saved = _Saved(
        *(normed.hat, normed.scale, heads_in, normed_heads.hat, normed_heads.scale),
        *(queries, weights, attended),
        *(memory_normed.hat, memory_normed.scale, query_in, normed_query.hat, normed_query.scale),
        *(memory_queries, memory_weights, recalled),
        *(mlp_normed.hat, mlp_normed.scale, mlp_in, gate_and_up, opened, down_in),
    )
    return after_memory + multiply(down_in, down), *saved


def _backward(
    stream: Tensor,
    saved: tuple[Tensor, ...],
    matrices: tuple[Tensor, ...],
    norms: _Norms,
    rotation: Rotation,
    window: _Entries,
    of_window: _Entries,
    memory: _Entries,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], tuple[tuple[Tensor, Tensor], ...]]:
    """Gradients of the stream before the layer, of the weights of its norms, and of what its products gave; and of the
    memory's keys and values the two factors each.

    Those of the window's keys and values are added to what others sent back, in place.

    Args:
        stream: the gradient of the stream after the layer.
        matrices: transposed.
    """
    in_projection, out_projection, query_projection, memory_out, gate_and_up_projection, down = matrices
    dtype, kept = out_projection.dtype, _Saved(*saved)

    of_down = stream.to(dtype)
    of_down_in = multiply(of_down, down)
    gate, up = kept.gate_and_up.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward.default(of_down_in * up, gate)
    of_gate_and_up = torch.cat([of_gate, of_down_in * kept.opened], dim=-1)
    of_normed = multiply(of_gate_and_up, gate_and_up_projection)
    of_after, of_mlp_norm = _normalize_backward(of_normed, kept.mlp_hat, kept.mlp_scale, norms.mlp)
    stream = of_after.add_(stream)

    of_memory_out = stream.to(dtype)
    of_heads = multiply(of_memory_out, memory_out)
    of_queries, of_scores, of_heads = _attend_backward(of_heads, kept.memory_queries, kept.memory_weights, memory)
    of_memory = ((of_scores, kept.memory_queries), (kept.memory_weights, of_heads))
    of_rotated = _rotate_backward(of_queries.transpose(1, 2)[:, :, None], rotation)
    of_query, of_query_norm = _normalize_backward(of_rotated, kept.query_hat, kept.query_scale, norms.memory_queries)
    of_query = of_query.flatten(2).to(dtype)
    of_normed = multiply(of_query, query_projection)
    of_after, of_memory_norm = _normalize_backward(of_normed, kept.memory_hat, kept.memory_scale, norms.memory)
    stream = of_after.add_(stream)

    of_out = stream.to(dtype)
    of_heads = multiply(of_out, out_projection)
    of_queries, of_scores, of_heads = _attend_backward(of_heads, kept.queries, kept.weights, window)
    _add_product(of_window.keys, of_scores, kept.queries)
    _add_product(of_window.values, kept.weights, of_heads)
    of_keys, of_values = (_own(gradient, stream.shape[1]) for gradient in of_window)
    of_both = torch.stack([of_queries.transpose(1, 2), of_keys.transpose(1, 2)], dim=2)
    of_rotated = _rotate_backward(of_both, rotation)
    of_projected, of_head_norms = _normalize_backward(of_rotated, kept.heads_hat, kept.heads_scale, norms.heads)
    of_all = torch.cat([of_projected.flatten(2), of_values.transpose(1, 2).flatten(2)], dim=-1).to(dtype)
    of_normed = multiply(of_all, in_projection)
    of_before, of_window_norm = _normalize_backward(of_normed, kept.hat, kept.scale, norms.window)
    of_norms = (of_window_norm, of_memory_norm, of_mlp_norm, of_head_norms[0], of_head_norms[1], of_query_norm)
    of_products = (of_all, of_out, of_query, of_memory_out, of_gate_and_up, of_down)
    return of_before.add_(stream), of_norms, of_products, of_memory


class _Normed(NamedTuple):
    """out = weight . hat, hat = x scale, scale = 1 / rms(x)."""

    out: Tensor
    hat: Tensor
    scale: Tensor


def _normalize(x: Tensor, weight: Tensor, eps: float | None) -> _Normed:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    hat = x * scale
    return _Normed(hat * weight, hat, scale)


def _normalize_backward(gradient: Tensor, hat: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the weight ([N, D] if it is one of N)."""
    through = gradient * weight
    mean = torch.linalg.vecdot(through, hat).unsqueeze(-1)
    of_x = torch.addcmul(through, hat, mean, value=-1 / hat.shape[-1]).mul_(scale)
    of_weight = (gradient * hat).flatten(0, 1).sum(dim=0)  # [D], or [N, H, E] of heads
    return of_x, of_weight if of_weight.dim() == 1 else of_weight.sum(dim=-2).squeeze(0)


def _rotate_backward(gradient: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    return torch.addcmul((gradient * sin).roll(gradient.shape[-1] // 2, dims=-1), gradient, cos)


def _attend(queries: Tensor, seen: _Entries, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output [B, S, D], and the weights [B, H, S, K]."""
    scores = _products(queries, seen.keys).mul_(queries.shape[-1] ** -0.5)
    weights = (scores if mask is None else scores.masked_fill_(~mask, -torch.inf)).softmax(dim=-1)
    return _sums(weights, seen.values).transpose(1, 2).flatten(2), weights


def _attend_backward(
    gradient: Tensor, queries: Tensor, weights: Tensor, seen: _Entries
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, of the scores [B, H, S, K], and of the heads' outputs [B, H, S, E]."""
    of_heads = gradient.unflatten(-1, (queries.shape[1], -1)).transpose(1, 2).to(queries.dtype)
    of_weights = _products(of_heads, seen.values)
    mean = torch.linalg.vecdot(of_weights, weights).unsqueeze(-1)
    of_scores = (of_weights - mean).mul_(weights).mul_(queries.shape[-1] ** -0.5)
    return _sums(of_scores, seen.keys), of_scores, of_heads


def _add_product(total: Tensor, weights: Tensor, rows: Tensor) -> None:
    """Add weights^T rows to the gradient of a part; weights [B, H, S, K], rows [B, H, S, E]."""
    if rows.shape[2] == 1:
        total.addcmul_(weights.transpose(-1, -2), rows)
    else:
        total.add_(_sums(weights.transpose(-1, -2), rows))


def _products(rows: Tensor, others: Tensor) -> Tensor:
    """rows others^T: [B, H, S, E] and [B, H, K, E] to [B, H, S, K]."""
    if torch.compiler.is_compiling():
        return (rows[:, :, :, None] * others[:, :, None]).sum(dim=-1)
    return torch.matmul(rows, others.transpose(-1, -2))


def _sums(weights: Tensor, rows: Tensor) -> Tensor:
    """weights rows: [B, H, S, K] and [B, H, K, E] to [B, H, S, E]."""
    if torch.compiler.is_compiling():
        return (weights[..., None] * rows[:, :, None]).sum(dim=-2)
    return torch.matmul(weights, rows)


def _own(entries: Tensor, num_own: int) -> Tensor:
    """The step's own entries, the last of those seen."""
    return entries.narrow(2, entries.shape[2] - num_own, num_own)
