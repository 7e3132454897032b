"""Both systems written out token by token, straight from the equations, for one row of one document. Slow and plain."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.t2mlr.bases import base_class_of


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()


def rotate(heads: Tensor, position: int, theta: float) -> Tensor:
    """heads [H, E]: pair i with i + E/2 and turn by position * theta^(-2i/E)."""
    half = heads.shape[-1] // 2
    angle = position * theta ** -(torch.arange(half, dtype=heads.dtype) / half)
    first, second = heads[:, :half], heads[:, half:]
    turned = (first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos())
    return torch.cat(turned, dim=-1)


def linear_of_pair(linear: Any, x: Tensor, r: Tensor) -> Tensor:
    weight = torch.cat([linear.from_stream.weight, linear.from_state.weight], dim=1)
    return weight @ torch.cat([x, r]) + linear.from_state.bias


class NaiveRLT:
    """logits [T, V] of an RLT, one token and one head vector at a time."""

    def __init__(self, model: cc.RLTForCausalLM):
        self.model: Any = model.model
        self.config = model.config
        self.heads, self.theta = model.config.num_attention_heads, model.config.rope_theta
        self.lm_head = model.lm_head

    def split(self, x: Tensor) -> Tensor:
        return x.view(self.heads, -1)

    def project(self, attention: Any, x: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        query = rotate(rms_norm(self.split(attention.q_proj(x)), attention.q_norm), position, self.theta)
        key = rotate(rms_norm(self.split(attention.k_proj(x)), attention.k_norm), position, self.theta)
        return query, key, self.split(attention.v_proj(x))

    def attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        stacked = torch.stack(keys)  # [K, H, E]
        weights = torch.softmax((stacked * query).sum(-1) / query.shape[-1] ** 0.5, dim=0)  # [K, H]
        return (weights[..., None] * torch.stack(values)).sum(0).flatten()

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        gate = mlp.gate_proj(x)
        return mlp.down_proj(gate * torch.sigmoid(gate) * mlp.up_proj(x))

    def encode(self, ids: list[int]) -> list[Tensor]:
        stream = [self.model.embed_tokens.weight[token] for token in ids]
        window = self.config.encoder_sliding_window
        seen = slice(None) if window is None else slice(-window, None)
        for layer in self.model.encoder:
            keys, values, out = [], [], []
            for position, x in enumerate(stream):
                query, key, value = self.project(layer.self_attn, rms_norm(x, layer.input_layernorm), position)
                keys.append(key)
                values.append(value)
                attended = x + layer.self_attn.o_proj(self.attend(query, keys[seen], values[seen]))
                normed = rms_norm(attended, layer.post_attention_layernorm)
                out.append(attended + self.feed_forward(layer.mlp, normed))
            stream = out
        return stream

    def __call__(self, ids: list[int], recurrent: list[bool]) -> Tensor:
        encoded, merge, interval = self.encode(ids), self.model.merge, self.config.feedback_interval
        memory_keys: list[list[Tensor]] = [[] for _ in self.model.memory]
        memory_values: list[list[Tensor]] = [[] for _ in self.model.memory]
        windows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.model.decoder.layers]
        state: Any = None if merge is None else merge.start_state
        logits = []
        in_memory = slice(-(self.config.memory_sliding_window or 0), None)
        for position, e in enumerate(encoded):
            for group, projection in enumerate(self.model.memory):
                normed = rms_norm(e, projection.norm)
                key = rms_norm(self.split(projection.k_proj(normed)), projection.k_norm)
                memory_keys[group].append(rotate(key, position, self.theta))
                memory_values[group].append(self.split(projection.v_proj(normed)))
            u = e
            if merge is not None and recurrent[position]:
                r = rms_norm(state, merge.norm)  # (2.9)
                gate = torch.sigmoid(linear_of_pair(merge.gate, e, r))  # (2.10)
                u = e + self.config.feedback_scale * gate * merge.state_projection(r)  # (2.11)
            s = u
            for index, layer in enumerate(self.model.decoder.layers):
                query, key, value = self.project(layer.self_attn, rms_norm(s, layer.input_layernorm), position)
                windows[index] = [*windows[index], (key, value)][-self.config.sliding_window :]
                keys, values = zip(*windows[index], strict=True)
                s = s + layer.self_attn.o_proj(self.attend(query, list(keys), list(values)))
                attention = layer.memory_attn
                query = rms_norm(self.split(attention.q_proj(rms_norm(s, layer.memory_layernorm))), attention.q_norm)
                group = index * self.config.num_memory_groups // self.config.num_decoder_layers
                query = rotate(query, position, self.theta)
                s = s + attention.o_proj(
                    self.attend(query, memory_keys[group][in_memory], memory_values[group][in_memory])
                )
                s = s + self.feed_forward(layer.mlp, rms_norm(s, layer.post_attention_layernorm))
            if interval is not None and (position + 1) % interval == 0:
                state = s
            logits.append(self.lm_head(rms_norm(s, self.model.norm)))
        return torch.stack(logits)


def naive_t2mlr(model: cc.T2MLRForCausalLM, ids: Tensor, recurrent: list[bool]) -> Tensor:
    """logits [T, V] for ids [1, T]: the whole base model run on one token after the other, with hooks for the rest."""
    start, end = model.config.layer_start, model.config.layer_end
    fusion: Any = model.fusion
    norm = model.carry.norm
    layers = list(model.layers._modules.values())
    start_state = torch.zeros(model.carry.norm.weight.shape, dtype=torch.float64)
    memory: dict[str, Any] = {"R": start_state, "is_recurrent": True}

    def fuse(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not memory["is_recurrent"]:
            return args
        h, r = args[0][0, 0], memory["R"]
        h = (
            h
            + torch.tanh(fusion.current_scale) * torch.sigmoid(linear_of_pair(fusion.current_gate, h, r)) * h
            + torch.tanh(fusion.recurrent_scale)
            * torch.sigmoid(linear_of_pair(fusion.recurrent_gate, h, r))
            * fusion.recurrent_projection(r)
        )
        return (h[None, None], *args[1:])

    def carry(layer: Any, args: tuple[Any, ...], output: Tensor) -> None:
        residual = memory["R"] if memory["is_recurrent"] else 0
        memory["R"] = rms_norm(output[0, 0] + residual, norm)

    handles = [layers[start].register_forward_pre_hook(fuse), layers[end - 1].register_forward_hook(carry)]
    cache, logits = DynamicCache(config=model.config.get_text_config()), []
    base_class: Any = base_class_of(model.config.base_config)
    try:
        for column, is_recurrent in enumerate(recurrent):
            memory["is_recurrent"] = is_recurrent
            output = base_class.forward(
                model, input_ids=ids[:, column : column + 1], use_cache=True, **{CACHE_NAME: cache}
            )
            logits.append(output.logits[0, 0])
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(logits)
