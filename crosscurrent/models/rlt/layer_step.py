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
from crosscurrent.recurrence.entries import Entries, Part
from crosscurrent.recurrence.steps import SharedWeight, Steps, is_bare, is_plain_linear

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
    cos, sin = rotation
    return cos.transpose(1, 2)[:, :, None], sin.transpose(1, 2)[:, :, None]


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
        self.num_heads = attention.num_heads
        self.in_projection = steps.shared(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.out_projection = steps.shared(attention.o_proj.weight)
        self.memory_query = steps.shared(memory.q_proj.weight)
        self.memory_out = steps.shared(memory.o_proj.weight)
        self.gate_and_up = steps.shared(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down = steps.shared(mlp.down_proj.weight)
        self.norms = (layer.input_layernorm, layer.memory_layernorm, layer.post_attention_layernorm)
        self.head_norms = (attention.q_norm, attention.k_norm, memory.q_norm)
        attending = (self.in_projection, self.out_projection, self.memory_query, self.memory_out)
        gates = [weight.gate for weight in (*attending, self.gate_and_up, self.down)]
        self._parameters = (*gates, *(norm.weight for norm in (*self.norms, *self.head_norms)))
        self.of_queries_and_keys = torch.stack([norm.weight.detach() for norm in self.head_norms[:2]])[:, None]

    def __call__(self, stream: Tensor, keys: Entries, values: Entries, place: Place) -> tuple[Tensor, Entries, Entries]:
        """The stream [B, S, D] after the layer, and its entries with the step's own."""
        device = stream.device.type
        befores = keys.after, values.after, place.memory.keys.after, place.memory.values.after
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            stream, after = _Layer.apply(stream, self, place, *befores, *self._parameters)
        return stream, keys.extended(stream.shape[1], after), values.extended(stream.shape[1], after)


class _Layer(torch.autograd.Function):
    """The layer. Its second result, a tensor of no size, is what later steps depend on, so that the backward pass comes
    here after theirs and finds what they sent back to this step's keys and values."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, layer: LayerStep, place: Place, *others: Any) -> tuple[Tensor, Tensor]:
        normed = _normalize(stream, *_weight_and_eps(layer.norms[0]))
        heads_in = layer.in_projection.ready(normed.out)
        heads = layer.in_projection.forward(heads_in).unflatten(-1, (3, layer.num_heads, -1))  # [B, S, 3, H, E]
        eps = layer.head_norms[0].eps
        normed_heads = _normalize(heads[:, :, :2].to(layer.of_queries_and_keys.dtype), layer.of_queries_and_keys, eps)
        rotated = rotate(normed_heads.out, place.rotation)
        queries = rotated[:, :, 0].transpose(1, 2)
        _own(place.window.keys, queries).copy_(rotated[:, :, 1].transpose(1, 2))
        _own(place.window.values, queries).copy_(heads[:, :, 2].transpose(1, 2))
        attended = _attend(queries, place.window, layer.out_projection)
        after_window = stream + layer.out_projection.forward(attended.out)

        memory_normed = _normalize(after_window, *_weight_and_eps(layer.norms[1]))
        query_in = layer.memory_query.ready(memory_normed.out)
        query = layer.memory_query.forward(query_in).unflatten(-1, (1, layer.num_heads, -1))
        weight, eps = _weight_and_eps(layer.head_norms[2])
        normed_query = _normalize(query.to(weight.dtype), weight, eps)
        memory_queries = rotate(normed_query.out, place.rotation)[:, :, 0].transpose(1, 2)
        recalled = _attend(memory_queries, place.memory, layer.memory_out)
        after_memory = after_window + layer.memory_out.forward(recalled.out)

        mlp_normed = _normalize(after_memory, *_weight_and_eps(layer.norms[2]))
        mlp_in = layer.gate_and_up.ready(mlp_normed.out)
        gate_and_up = layer.gate_and_up.forward(mlp_in)
        gate, up = gate_and_up.chunk(2, dim=-1)
        opened = F.silu(gate)
        down_in = opened * up
        ctx.layer, ctx.place = layer, place
        ctx.save_for_backward(
            *(normed.hat, normed.scale, heads_in, normed_heads.hat, normed_heads.scale),
            *(queries, attended.weights, attended.out),
            *(memory_normed.hat, memory_normed.scale, query_in, normed_query.hat, normed_query.scale),
            *(memory_queries, recalled.weights, recalled.out),
            *(mlp_normed.hat, mlp_normed.scale, mlp_in, gate_and_up, opened, down_in),
            *others[-6:],  # the weights of the norms
        )
        return after_memory + layer.down.forward(down_in), stream.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivatives()
        layer, place, saved = ctx.layer, ctx.place, list(ctx.saved_tensors)
        attention, memory, mlp, norms = saved[:8], saved[8:16], saved[16:22], saved[22:]
        stream, _ = gradients
        stream, of_mlp_norm = _mlp_backward(layer, norms[2], stream, *mlp)
        stream, of_memory = _memory_backward(layer, place, (norms[1], norms[5]), stream, *memory)
        stream, of_window = _window_backward(layer, place, norms[0], stream, *attention)
        of_norms = (of_window[0], of_memory[0], of_mlp_norm, of_window[1][0], of_window[1][1], of_memory[1])
        return stream, *(None,) * 12, *of_norms


def _mlp_backward(
    layer: LayerStep,
    norm: Tensor,
    stream: Tensor,
    hat: Tensor,
    scale: Tensor,
    mlp_in: Tensor,
    gate_and_up: Tensor,
    opened: Tensor,
    down_in: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of the stream before the feed-forward, and of its norm's weight."""
    of_down = layer.down.backward(stream, down_in)
    gate, up = gate_and_up.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward.default(of_down * up, gate)
    of_mlp = layer.gate_and_up.backward(torch.cat([of_gate, of_down * opened], dim=-1), mlp_in)
    of_stream, of_norm = _normalize_backward(of_mlp, hat, scale, norm)
    return of_stream.add_(stream), of_norm


def _memory_backward(
    layer: LayerStep,
    place: Place,
    norms: tuple[Tensor, Tensor],
    stream: Tensor,
    hat: Tensor,
    scale: Tensor,
    query_in: Tensor,
    query_hat: Tensor,
    query_scale: Tensor,
    queries: Tensor,
    weights: Tensor,
    recalled: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Gradients of the stream before the attention to the memory, and of the weights of its norm and its queries'."""
    of_heads = layer.memory_out.backward(stream, recalled)
    of_queries = _attend_backward(of_heads, queries, weights, place.memory)
    of_rotated = _rotate_backward(of_queries.transpose(1, 2)[:, :, None], place.rotation)
    of_query, of_query_norm = _normalize_backward(of_rotated, query_hat, query_scale, norms[1])
    of_normed = layer.memory_query.backward(of_query.flatten(2), query_in)
    of_stream, of_norm = _normalize_backward(of_normed, hat, scale, norms[0])
    return of_stream.add_(stream), (of_norm, of_query_norm)


def _window_backward(
    layer: LayerStep,
    place: Place,
    norm: Tensor,
    stream: Tensor,
    hat: Tensor,
    scale: Tensor,
    heads_in: Tensor,
    heads_hat: Tensor,
    heads_scale: Tensor,
    queries: Tensor,
    weights: Tensor,
    attended: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Gradients of the stream before the window attention, and of the weights of its norm and its queries' and keys'."""
    of_heads = layer.out_projection.backward(stream, attended)
    of_queries = _attend_backward(of_heads, queries, weights, place.window)
    of_keys, of_values = (_own_gradient(part, queries) for part in (place.window.keys, place.window.values))
    of_both = torch.stack([of_queries.transpose(1, 2), of_keys.transpose(1, 2)], dim=2)
    of_rotated = _rotate_backward(of_both, place.rotation)
    of_projected, of_head_norms = _normalize_backward(of_rotated, heads_hat, heads_scale, layer.of_queries_and_keys)
    of_all = torch.cat([of_projected.flatten(2), of_values.transpose(1, 2).flatten(2)], dim=-1)
    of_normed = layer.in_projection.backward(of_all, heads_in)
    of_stream, of_norm = _normalize_backward(of_normed, hat, scale, norm)
    return of_stream.add_(stream), (of_norm, of_head_norms)


class _Normed(NamedTuple):
    """out = weight . hat, hat = x scale, scale = 1 / rms(x)."""

    out: Tensor
    hat: Tensor
    scale: Tensor


def _weight_and_eps(norm: nn.RMSNorm) -> tuple[Tensor, float | None]:
    return norm.weight, norm.eps


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


class _Attended(NamedTuple):
    """out [B, S, D], ready for the projection that follows; weights [B, H, S, K]."""

    out: Tensor
    weights: Tensor


def _attend(queries: Tensor, seen: Seen, projection: SharedWeight) -> _Attended:
    scores = torch.matmul(queries, seen.keys.view().transpose(-1, -2)).mul_(queries.shape[-1] ** -0.5)
    weights = (scores if seen.mask is None else scores.masked_fill_(~seen.mask, -torch.inf)).softmax(dim=-1)
    heads = torch.matmul(weights, seen.values.view())
    return _Attended(projection.ready(heads.transpose(1, 2).flatten(2)), weights)


def _attend_backward(gradient: Tensor, queries: Tensor, weights: Tensor, seen: Seen) -> Tensor:
    """Gradient of the queries. Those of keys and values are added to what others sent back, in place."""
    of_heads = gradient.unflatten(-1, (queries.shape[1], -1)).transpose(1, 2).to(queries.dtype)
    of_weights = torch.matmul(of_heads, seen.values.view().transpose(-1, -2))
    mean = torch.linalg.vecdot(of_weights, weights).unsqueeze(-1)
    of_scores = (of_weights - mean).mul_(weights).mul_(queries.shape[-1] ** -0.5)
    _add_product(seen.keys, of_scores, queries)
    _add_product(seen.values, weights, of_heads)
    return torch.matmul(of_scores, seen.keys.view())


def _add_product(part: Part, weights: Tensor, rows: Tensor) -> None:
    """Add weights^T rows to the gradient of a part; weights [B, H, S, K], rows [B, H, S, E]."""
    assert part.gradient is not None
    total = part.gradient.of(part.start, part.stop)
    if rows.shape[2] == 1:
        total.addcmul_(weights.transpose(-1, -2), rows)
    else:
        total.add_(torch.matmul(weights.transpose(-1, -2), rows))


def _own(seen: Part, queries: Tensor) -> Tensor:
    """The storage of the step's own entries, the last of those seen, to be written."""
    num_own = queries.shape[2]
    return seen.storage.data.narrow(2, seen.stop - num_own, num_own)


def _own_gradient(seen: Part, queries: Tensor) -> Tensor:
    assert seen.gradient is not None
    return seen.gradient.of(seen.stop - queries.shape[2], seen.stop)
