"""The layers of an RLT. They are given positions and masks ready-made, and keep nothing.

Shapes: B rows, S queries, K keys, D hidden_size, H heads, E = D / H.  Queries, keys and values are [B, H, S or K, E].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscurrent.models.rlt.configuration_rlt import RLTConfig
from crosscurrent.recurrence.entries import Part
from crosscurrent.recurrence.steps import apply_linear

Keys = Tensor | Part  # keys or values to attend to: all of them, or a part of what grows step by step
Extend = Callable[[Tensor, Tensor], tuple[Keys, Keys]]  # from a token's keys and values to all that it may see
Rotation = tuple[Tensor, Tensor]  # cosines, and sines with the sign they are added with, each [B, 1, S, E]


class Rotary(nn.Module):
    """Rotary position embedding, from positions [B, S] to cosines and sines. It holds no buffer: nothing to load."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=precise) / self.head_dim
        angles = positions[:, None, :, None].to(precise) * self.theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair of features by the angle of its position."""
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def normalize(norm: nn.Module, heads: Tensor) -> Tensor:
    """`norm(heads)`. Under autocast what a projection gives is narrower than the norm's weight, and a mixed norm is slow."""
    weight = getattr(norm, "weight", heads)
    normed: Tensor = norm(heads.to(torch.promote_types(heads.dtype, weight.dtype)))
    return normed


def split_heads(stream: Tensor, num_heads: int) -> Tensor:
    """[B, S, D] to [B, H, S, E]."""
    return stream.unflatten(-1, (num_heads, -1)).transpose(1, 2)


class SelfAttention(nn.Module):
    """Attention over the layer's own stream, with an RMSNorm on queries and keys."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, stream: Tensor, rotation: Rotation, seen: Tensor | None, extend: Extend) -> Tensor:
        """The output for a stream [B, S, D]."""
        queries = rotate(
            normalize(self.q_norm, split_heads(apply_linear(self.q_proj, stream), self.num_heads)), rotation
        )
        keys = rotate(normalize(self.k_norm, split_heads(apply_linear(self.k_proj, stream), self.num_heads)), rotation)
        values = split_heads(apply_linear(self.v_proj, stream), self.num_heads)
        # Under autocast norms widen what attention narrows again.
        return apply_linear(self.o_proj, attend(queries, *extend(keys.to(values.dtype), values), seen))


class MemoryAttention(nn.Module):
    """Attention to the encoder's output, whose keys and values come from a `MemoryProjection`."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, stream: Tensor, keys: Keys, values: Keys, rotation: Rotation, seen: Tensor | None) -> Tensor:
        queries = rotate(
            normalize(self.q_norm, split_heads(apply_linear(self.q_proj, stream), self.num_heads)), rotation
        )
        return apply_linear(self.o_proj, attend(queries, keys, values, seen))


class MemoryProjection(nn.Module):
    """Keys and values of one memory group: k = P_K(e), v = W_V RMSNorm_E(e), P_K being W_K RMSNorm_E(e), normed per head."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, encoded: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        normed = self.norm(encoded)
        keys = rotate(normalize(self.k_norm, split_heads(apply_linear(self.k_proj, normed), self.num_heads)), rotation)
        values = split_heads(apply_linear(self.v_proj, normed), self.num_heads)
        return keys.to(values.dtype), values


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        opened = F.silu(apply_linear(self.gate_proj, stream))
        return apply_linear(self.down_proj, opened * apply_linear(self.up_proj, stream))


class EncoderLayer(nn.Module):
    """Causal self-attention and feed-forward, each with a norm before it and its residual."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, stream: Tensor, rotation: Rotation, seen: Tensor | None, extend: Extend) -> Tensor:
        stream = stream + self.self_attn(self.input_layernorm(stream), rotation, seen, extend)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class DecoderLayer(nn.Module):
    """Window attention over its own stream, attention to the memory, feed-forward, in this order."""

    def __init__(self, config: RLTConfig):
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.memory_attn = MemoryAttention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.memory_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        stream: Tensor,
        rotation: Rotation,
        extend: Extend,
        in_window: Tensor | None,
        memory: tuple[Keys, Keys],
        in_memory: Tensor | None,
    ) -> Tensor:
        """The stream after the layer."""
        stream = stream + self.self_attn(self.input_layernorm(stream), rotation, in_window, extend)
        stream = stream + self.memory_attn(self.memory_layernorm(stream), *memory, rotation, in_memory)
        return stream + self.mlp(self.post_attention_layernorm(stream))


def attend(queries: Tensor, keys: Keys, values: Keys, seen: Tensor | None) -> Tensor:
    """[B, S, D] attention output before the output projection.

    seen: [B or 1, 1, S, K] bool; None: causal, with as many keys as queries, or a lone query that sees all keys.
    """
    keys, values = (part.tensor() if isinstance(part, Part) else part for part in (keys, values))
    is_causal = seen is None and queries.shape[2] > 1
    heads = F.scaled_dot_product_attention(queries.to(keys.dtype), keys, values, attn_mask=seen, is_causal=is_causal)
    return heads.transpose(1, 2).flatten(2)
