"""Benchmarks against the public implementation of RLT on PyPI, `rlt-pytorch`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crosscurrent.experiments.bench.case import Case, Conditions, Dtype, Ratio, Subject, UnavailableError, Workload
from crosscurrent.experiments.bench.rlt import LLAMA, SHAPES, make_llama, make_rlt
from crosscurrent.experiments.bench.workloads import (
    TokenClock,
    decode,
    generate,
    loss_of,
    random_tokens,
    training_step,
)
from crosscurrent.models.rlt import RLTConfig

PEER = "rlt-pytorch"
OURS = "RLT-1"
JUDGED_FROM = 512  # tokens of context
DTYPES: Mapping[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16-autocast"}


def make_peer(shape: str, device: str) -> Any:
    """The peer at the size of an RLTConfig, as near to it as its settings allow.

    At the published size it has 28,750,800 parameters, ours 28,726,912. Version 0.1.9 differs in: GEGLU with biases instead
    of SwiGLU without; norms before the memory's projection and after the merge, but none of queries and keys; no
    positions in the attention to the memory; attention written out instead of PyTorch's fused one; logits of the tied
    embedding scaled by 1 / sqrt(D).

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        from RLT import RLT
    except ModuleNotFoundError as error:
        raise UnavailableError("not installed: pip install 'crosscurrent[peer]'") from error
    size = RLTConfig(**SHAPES[shape])
    torch.manual_seed(42)
    return RLT(
        num_tokens=size.vocab_size,
        dim=size.hidden_size,
        enc_depth=size.num_encoder_layers,
        dec_depth=size.num_decoder_layers,
        dim_head=size.head_dim,
        heads=size.num_attention_heads,
        dec_sliding_window_size=size.sliding_window,
        recurrent_transition_alpha=size.feedback_scale,
    ).to(device)


def _step_subjects(conditions: Conditions, figures: Mapping[str, Any]) -> list[Subject]:
    def tokens(num_tokens: int) -> Tensor:
        vocab_size = RLTConfig(**SHAPES[figures["model"]]).vocab_size
        return random_tokens(vocab_size, figures["batch_size"], num_tokens, conditions.device)

    def ours(dtype: Dtype) -> Workload:
        model = make_rlt(figures["model"], conditions.device)
        return training_step(model, loss_of(model, tokens(figures["num_tokens"])), conditions, dtype)

    def peer(dtype: Dtype) -> Workload:
        model = make_peer(figures["model"], conditions.device)
        ids = tokens(figures["num_tokens"] + 1)  # it runs over all but the last
        return training_step(model, lambda: model(ids, return_loss=True), conditions, dtype)

    return [
        Subject(f"{name} {label}", lambda build=build, dtype=dtype: build(dtype))  # type: ignore[misc]
        for name, build in ((OURS, ours), (PEER, peer))
        for label, dtype in DTYPES.items()
    ]


RLT_PEER_STEP = Case(
    name="rlt-peer-step",
    summary="training step of RLT-1 against rlt-pytorch, both in float32 and under bfloat16 autocast",
    unit="step",
    sizes={
        "tiny": {"batch_size": 2, "num_tokens": 5, "model": "tiny"},
        "standard": {"batch_size": 32, "num_tokens": 40, "model": "published"},
        "large": {"batch_size": 256, "num_tokens": 128, "model": "published"},
    },
    repeats=5,
    has_memory=True,
    subjects=_step_subjects,
    ratios=lambda figures: [
        Ratio(f"{PEER} fp32", f"{OURS} fp32", at_least=1.8),
        Ratio(f"{PEER} fp32", f"{OURS} bf16", at_least=3.5),
        Ratio(f"{PEER} bf16", f"{OURS} bf16"),
        Ratio(f"{PEER} fp32", f"{OURS} fp32", "memory"),
    ],
)


def _peer_generate(model: Any, prompt: Tensor, num_new: int, conditions: Conditions) -> Workload:
    """Seconds per token of the peer's greedy `generate`, the prompt's own time left out."""

    def run() -> float:
        clock = TokenClock(conditions.device)

        def look(logits: Tensor, **settings: Any) -> Tensor:
            clock.note()
            return logits

        with conditions.autocast():
            model.generate(prompt, seq_len=prompt.shape[1] + num_new + 1, temperature=0.0, filter_fn=look)
        return clock.seconds_per_token()

    return Workload(run, model)


def _decode_subjects(conditions: Conditions, figures: Mapping[str, Any]) -> list[Subject]:
    vocab_size, device = RLTConfig(**SHAPES[figures["model"]]).vocab_size, conditions.device
    kinds: dict[str, Any] = {
        f"{OURS} generate": (make_rlt, generate),
        f"{OURS} loop": (make_rlt, decode),
        f"{PEER} generate": (make_peer, _peer_generate),
        f"{LLAMA} generate": (make_llama, generate),
        f"{LLAMA} loop": (make_llama, decode),
    }

    def build(kind: str, context: int) -> Workload:
        make, workload = kinds[kind]
        prompt = random_tokens(vocab_size, 1, context, device)
        return workload(make(figures["model"], device), prompt, figures["num_new_tokens"], conditions)

    return [
        Subject(f"{kind} at {context}", lambda kind=kind, context=context: build(kind, context))  # type: ignore[misc]
        for context in figures["contexts"]
        for kind in kinds
    ]


def _decode_ratios(figures: Mapping[str, Any]) -> list[Ratio]:
    ratios = []
    for context in figures["contexts"]:
        at_least = 3.0 if context >= JUDGED_FROM else None
        ratios += [
            Ratio(f"{PEER} generate at {context}", f"{OURS} generate at {context}", at_least=at_least),
            Ratio(f"{PEER} generate at {context}", f"{OURS} loop at {context}"),
            Ratio(f"{OURS} loop at {context}", f"{LLAMA} loop at {context}"),
        ]
    return ratios


RLT_DECODE = Case(
    name="rlt-decode",
    summary="time of a generated token: RLT-1, rlt-pytorch and a plain Transformer, greedy, batch 1",
    unit="token",
    sizes={
        "tiny": {"contexts": (3, 5), "num_new_tokens": 2, "model": "tiny"},
        "standard": {"contexts": (64, 512), "num_new_tokens": 24, "model": "published"},
        "large": {"contexts": (64, 512), "num_new_tokens": 48, "model": "published"},  # the peer fails from about 990
    },
    repeats=4,
    has_memory=False,
    subjects=_decode_subjects,
    ratios=_decode_ratios,
)
