"""Benchmarks of RLT: against RLT-0, against a plain Transformer, and of prefill against decode."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosscurrent.experiments.bench.case import Case, Conditions, Ratio, Subject, UnavailableError, Workload
from crosscurrent.experiments.bench.workloads import loss_of, prefill, random_tokens, token_by_token, training_step
from crosscurrent.models.rlt import RLTConfig, RLTForCausalLM
from crosscurrent.recurrence import Jacobi, LastPasses, Sequential, compiled_steps
from crosscurrent.recurrence.compiling import compiles_steps

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "published": {},  # the defaults of RLTConfig
    "tiny": {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 42,
        "num_attention_heads": 2,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
    },
}
VARIANTS: Mapping[str, int | None] = {"RLT-0": None, "RLT-1": 1, "RLT-2 (4)": 4}  # by feedback_interval
COMPILED, LLAMA = "RLT-1, compiled", "Llama"
SEQUENTIAL, TO_ROUNDING = "prefill, Sequential", "prefill, Jacobi to 1e-6"


def make_rlt(shape: str, device: str, feedback_interval: int | None = 1) -> RLTForCausalLM:
    torch.manual_seed(42)
    model: Any = RLTForCausalLM(RLTConfig(**SHAPES[shape], feedback_interval=feedback_interval))
    return model.to(device)


def make_llama(shape: str, device: str) -> LlamaForCausalLM:
    """As wide as an RLT and as deep as its encoder and decoder together."""
    rlt = RLTConfig(**SHAPES[shape])
    torch.manual_seed(42)
    config = LlamaConfig(
        vocab_size=rlt.vocab_size,
        hidden_size=rlt.hidden_size,
        intermediate_size=rlt.intermediate_size,
        num_attention_heads=rlt.num_attention_heads,
        num_hidden_layers=rlt.num_hidden_layers,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def _step_subjects(conditions: Conditions, figures: Mapping[str, Any]) -> list[Subject]:
    makers: dict[str, Any] = {
        name: lambda interval=interval: make_rlt(figures["model"], conditions.device, interval)
        for name, interval in VARIANTS.items()
    }
    makers[LLAMA] = lambda: make_llama(figures["model"], conditions.device)

    def build(make: Any) -> Workload:
        model = make()
        ids = random_tokens(model.config.vocab_size, figures["batch_size"], figures["num_tokens"], conditions.device)
        return training_step(model, loss_of(model, ids), conditions)

    def build_compiled() -> Workload:
        with compiled_steps():
            if not compiles_steps(conditions.device):
                raise UnavailableError("torch.compile fails here: it needs a C++ compiler")
        plain = build(makers["RLT-1"])

        def run() -> float:
            with compiled_steps():
                return plain.run()

        return Workload(run, plain.model)

    subjects = [Subject(name, lambda make=make: build(make)) for name, make in makers.items()]  # type: ignore[misc]
    return [*subjects, Subject(COMPILED, build_compiled)] if figures["has_compiled"] else subjects


def _step_ratios(figures: Mapping[str, Any]) -> list[Ratio]:
    compiled = [Ratio(COMPILED, "RLT-0", at_most=1.30), Ratio(COMPILED, "RLT-1")] if figures["has_compiled"] else []
    return [
        Ratio("RLT-1", "RLT-0", at_most=1.30),
        *compiled,
        Ratio("RLT-2 (4)", "RLT-0", at_most=1.12),
        Ratio("RLT-1", LLAMA),
        Ratio("RLT-1", "RLT-0", "memory"),
        Ratio("RLT-2 (4)", "RLT-0", "memory"),
    ]


RLT_STEP = Case(
    name="rlt-step",
    summary="training step of RLT-1 and RLT-2 (4) against RLT-0 and a plain Transformer, without the optimizer",
    unit="step",
    sizes={
        "tiny": {"batch_size": 2, "num_tokens": 5, "model": "tiny", "has_compiled": False},  # compiling takes long
        "standard": {"batch_size": 32, "num_tokens": 40, "model": "published", "has_compiled": True},
        "large": {"batch_size": 256, "num_tokens": 128, "model": "published", "has_compiled": False},
    },
    repeats=7,
    has_memory=True,
    subjects=_step_subjects,
    ratios=_step_ratios,
)


def _prefill_subjects(conditions: Conditions, figures: Mapping[str, Any]) -> list[Subject]:
    def build(workload: Any, **settings: Any) -> Any:
        model = make_rlt(figures["model"], conditions.device)
        ids = random_tokens(model.config.vocab_size, 1, figures["num_tokens"], conditions.device)
        return workload(model, ids, conditions, **settings)

    to_rounding = Jacobi(figures["num_tokens"], gradient=LastPasses(1), tolerance=1e-6)
    return [
        Subject(SEQUENTIAL, lambda: build(prefill, solver=Sequential())),
        Subject(TO_ROUNDING, lambda: build(prefill, solver=to_rounding)),
        Subject("token by token", lambda: build(token_by_token)),
    ]


RLT_PREFILL = Case(
    name="rlt-prefill",
    summary="exact prefill of RLT-1 in one call, by steps or by passes until nothing changes, against one call a token",
    unit="prefill",
    sizes={
        "tiny": {"num_tokens": 6, "model": "tiny"},
        "standard": {"num_tokens": 1024, "model": "published"},
        "large": {"num_tokens": 1024, "model": "published"},
    },
    repeats=3,
    has_memory=False,
    subjects=_prefill_subjects,
    ratios=lambda figures: [Ratio("token by token", TO_ROUNDING, at_least=4.0), Ratio("token by token", SEQUENTIAL)],
)
