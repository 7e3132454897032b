"""Benchmarks of T2MLR against its base, at the shape of SmolLM2-135M, random weights, gates open."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosscurrent.experiments.bench.case import Case, Conditions, Ratio, Subject
from crosscurrent.experiments.bench.workloads import decode, loss_of, prefill, random_tokens, training_step
from crosscurrent.models.t2mlr import T2MLRForCausalLM, retrofit
from crosscurrent.models.t2mlr.configuration_t2mlr import DEFAULT_SOLVER
from crosscurrent.recurrence import Implicit, Jacobi, Solver

SMOLLM2_135M: Mapping[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}
TINY: Mapping[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SHAPES: Mapping[str, tuple[Mapping[str, Any], tuple[int, int]]] = {
    "SmolLM2-135M": (SMOLLM2_135M, (12, 18)),
    "tiny": (TINY, (1, 3)),
}
OPEN = 0.5  # of both scalars of the fusion, whose tanh multiplies the gates

BASE = "base"
CONFIGURED = "T2MLR, configured solver"
SOLVERS: Mapping[str, Solver | None] = {  # None: what a new model is configured with
    CONFIGURED: None,
    "T2MLR, Jacobi(16, 4)": Jacobi(16, 4),
    "T2MLR, Jacobi(4, 2)": Jacobi(4, 2),
    "T2MLR, Jacobi(2, 2)": Jacobi(2, 2),
    "T2MLR, 2 passes": replace(DEFAULT_SOLVER, iterations=2, gradient=Implicit(1)),
    "T2MLR, 16 passes": replace(DEFAULT_SOLVER, iterations=16),
}


def make_base(shape: str, device: str) -> LlamaForCausalLM:
    torch.manual_seed(42)
    config = LlamaConfig(**SHAPES[shape][0], tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def make_t2mlr(shape: str, device: str) -> T2MLRForCausalLM:
    layer_start, layer_end = SHAPES[shape][1]
    model: Any = retrofit(make_base(shape, device), layer_start, layer_end)
    with torch.no_grad():
        model.fusion.current_scale.fill_(OPEN)
        model.fusion.recurrent_scale.fill_(OPEN)
    return model.to(device)


def _models(conditions: Conditions, figures: Mapping[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Makers of the base and of the recurrent model, which are made once and serve several subjects."""
    shape, device = figures["model"], conditions.device
    return cache(lambda: make_base(shape, device)), cache(lambda: make_t2mlr(shape, device))


def _step_subjects(conditions: Conditions, figures: Mapping[str, Any]) -> list[Subject]:
    base, recurrent = _models(conditions, figures)

    def build(make: Callable[[], Any], settings: dict[str, Any]) -> Any:
        model = make()
        ids = random_tokens(model.config.vocab_size, figures["batch_size"], figures["num_tokens"], conditions.device)
        return training_step(model, loss_of(model, ids, **settings), conditions)

    return [
        Subject(BASE, lambda: build(base, {})),
        *(
            Subject(name, lambda solver=solver: build(recurrent, {"solver": solver}))  # type: ignore[misc]
            for name, solver in SOLVERS.items()
        ),
    ]


def _step_ratios(figures: Mapping[str, Any]) -> list[Ratio]:
    others = [name for name in SOLVERS if name != CONFIGURED]
    return [
        Ratio(CONFIGURED, BASE, at_most=1.30),
        *(Ratio(name, BASE) for name in others),
        Ratio(CONFIGURED, BASE, "memory", at_most=1.15),
        *(Ratio(name, BASE, "memory") for name in others),
        # Flat in the number of iterations:
        Ratio("T2MLR, 16 passes", CONFIGURED, "memory", at_most=1.02),
    ]


T2MLR_STEP = Case(
    name="t2mlr-step",
    summary="training step and memory of T2MLR against its base, a fifth of the layers recurrent, by solver",
    unit="step",
    sizes={
        "tiny": {"batch_size": 2, "num_tokens": 5, "model": "tiny"},
        "standard": {"batch_size": 2, "num_tokens": 128, "model": "SmolLM2-135M"},
        "large": {"batch_size": 8, "num_tokens": 1024, "model": "SmolLM2-135M"},
    },
    repeats=4,
    has_memory=True,
    subjects=_step_subjects,
    ratios=_step_ratios,
)


def _decode_subjects(conditions: Conditions, figures: Mapping[str, Any]) -> list[Subject]:
    base, recurrent = _models(conditions, figures)

    def build(make: Callable[[], Any], context: int) -> Any:
        model = make()
        prompt = random_tokens(model.config.vocab_size, 1, context, conditions.device)
        return decode(model, prompt, figures["num_new_tokens"], conditions)

    return [
        Subject(f"{name} at {context}", lambda make=make, context=context: build(make, context))  # type: ignore[misc]
        for context in figures["contexts"]
        for name, make in ((BASE, base), ("T2MLR", recurrent))
    ]


T2MLR_DECODE = Case(
    name="t2mlr-decode",
    summary="time of a generated token: T2MLR against its base, one call per token, batch 1",
    unit="token",
    sizes={
        "tiny": {"contexts": (3, 5), "num_new_tokens": 2, "model": "tiny"},
        "standard": {"contexts": (32, 256, 1024), "num_new_tokens": 8, "model": "SmolLM2-135M"},
        "large": {"contexts": (32, 256, 1024, 4096), "num_new_tokens": 16, "model": "SmolLM2-135M"},
    },
    repeats=15,
    has_memory=False,
    subjects=_decode_subjects,
    ratios=lambda figures: [
        Ratio(f"T2MLR at {context}", f"{BASE} at {context}", at_most=1.02) for context in figures["contexts"]
    ],
)


def _prefill_subjects(conditions: Conditions, figures: Mapping[str, Any]) -> list[Subject]:
    base, recurrent = _models(conditions, figures)

    def build(make: Callable[[], Any]) -> Any:
        model = make()
        ids = random_tokens(model.config.vocab_size, 1, figures["num_tokens"], conditions.device)
        return prefill(model, ids, conditions)

    return [Subject(BASE, lambda: build(base)), Subject(CONFIGURED, lambda: build(recurrent))]


T2MLR_PREFILL = Case(
    name="t2mlr-prefill",
    summary="prefill of T2MLR with the solver that it is configured with against its base, batch 1",
    unit="prefill",
    sizes={
        "tiny": {"num_tokens": 6, "model": "tiny"},
        "standard": {"num_tokens": 1024, "model": "SmolLM2-135M"},
        "large": {"num_tokens": 4096, "model": "SmolLM2-135M"},
    },
    repeats=3,
    has_memory=False,
    subjects=_prefill_subjects,
    ratios=lambda figures: [Ratio(CONFIGURED, BASE)],
)
