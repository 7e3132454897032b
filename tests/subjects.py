"""The models that the laws are tested on. A new architecture joins the battery by one line in `T2MLR_BASES` or `RLTS`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.t2mlr.bases import base_class_of

VOCAB = 43
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
PLAIN = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
QUIET: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

T2MLR_BASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=4),
    "qwen2": lambda: Qwen2Config(**PLAIN, num_key_value_heads=1),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=4, query_pre_attn_scalar=8, layer_types=MIXED),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=4, query_pre_attn_scalar=8, layer_types=MIXED),
    "olmo2": lambda: Olmo2Config(**PLAIN, num_key_value_heads=1),
    "phi3": lambda: Phi3Config(**PLAIN, num_key_value_heads=1),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=16, n_inner=24, n_layer=4, n_head=2, n_positions=64, **QUIET),
    "gpt_neox": lambda: GPTNeoXConfig(**PLAIN),
}

RLT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "sliding_window": 3,
    "feedback_scale": 0.7,
}
RLTS: dict[str, dict[str, Any]] = {
    "rlt1": {},
    "rlt2": {"feedback_interval": 3},
    "rlt0": {"feedback_interval": None},
    "rlt_no_decoder": {"num_decoder_layers": 0},
    "rlt_tied": {"tie_encoder_decoder": True, "tie_word_embeddings": False},
    "rlt_encoder_window": {"encoder_sliding_window": 3},
    "rlt_memory_window": {"memory_sliding_window": 2},
    "rlt_groups": {"num_memory_groups": 2, "sliding_window": 1},
}


def make_rlt(**changes: Any) -> cc.RLTForCausalLM:
    torch.manual_seed(1)
    return moved(cc.RLTForCausalLM(cc.RLTConfig(**(RLT_SIZES | changes))))


def make_base(name: str) -> Any:
    config = T2MLR_BASES[name]()
    torch.manual_seed(1)
    return moved(base_class_of(config)(config))


def make_t2mlr(name: str, layer_start: int = 1, layer_end: int = 3, **settings: Any) -> cc.T2MLRForCausalLM:
    model = cc.retrofit(make_base(name), layer_start, layer_end, **settings)
    moved(model.fusion)
    moved(model.carry)
    return model


def make_gated(opening: float, base_name: str = "llama", **settings: Any) -> cc.T2MLRForCausalLM:
    """Gates nearly closed, as of a model that was trained for a short time: the iteration contracts."""
    model = make_t2mlr(base_name, **settings)
    with torch.no_grad():
        model.fusion.recurrent_scale.fill_(opening)
        model.fusion.current_scale.fill_(opening)
    return model


class RunningMean:
    """A core simple enough to write a solver out by hand: y_t = tanh(mean of z_1..z_t)."""

    learns = False
    can_be_split = False

    def start(self, keeps_entries: bool) -> None:
        return None

    def run(self, z: Tensor, columns: slice, past: None) -> tuple[Tensor, None]:
        assert columns == slice(None)
        return torch.tanh(z.cumsum(1) / torch.arange(1, z.shape[1] + 1)[:, None]), None

    def by_columns(self, past: None, first: int) -> Any:
        raise NotImplementedError

    def map(self, past: None, change: Any) -> None:
        return None

    def detach(self, past: None) -> None:
        return None


SUBJECTS: dict[str, Callable[[], Any]] = {
    **{name: partial(make_rlt, **changes) for name, changes in RLTS.items()},
    **{f"t2mlr_{name}": partial(make_t2mlr, name) for name in T2MLR_BASES},
    "t2mlr_interval": lambda: make_t2mlr("llama", feedback_interval=4),
    "t2mlr_first_layers": lambda: make_t2mlr("llama", 0, 2),
    "t2mlr_last_layers": lambda: make_t2mlr("gemma3", 2, 4),
    "t2mlr_eager": lambda: _eager(make_t2mlr("gemma2")),
}


def _eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def moved(module: Any) -> Any:
    """float64, in evaluation mode, every parameter moved off its start: there most mistakes are invisible."""
    generator = torch.Generator().manual_seed(5)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * (0.7 if parameter.numel() == 1 else 0.25))
    return module


def token_ids(batch_size: int, num_tokens: int, seed: int = 3) -> Tensor:
    """Random tokens from 1: `generate` takes the pad token, 0 here, for padding wherever it meets it."""
    return torch.randint(1, VOCAB, (batch_size, num_tokens), generator=torch.Generator().manual_seed(seed))


def exact_solvers(num_tokens: int) -> dict[str, Any]:
    """Solvers that equal the definition on sequences of up to `num_tokens`. A new one joins by one line."""
    return {
        "sequential": cc.Sequential(),
        "jacobi": cc.Jacobi(iterations=num_tokens, backward_iterations=num_tokens),
        "jacobi_inputs": cc.Jacobi(iterations=num_tokens, backward_iterations=num_tokens, guess="inputs"),
        "jacobi_scan": cc.Jacobi(iterations=num_tokens, backward_iterations=num_tokens, scan=True),
        "implicit": cc.Jacobi(iterations=num_tokens, gradient=cc.Implicit(iterations=num_tokens)),
        "sweeps": cc.Sweeps(chunk_size=3, sweeps=num_tokens, gradient=cc.Implicit(num_tokens)),
        "sweeps_interleaved": cc.Sweeps(chunk_size=2, sweeps=num_tokens, gradient=cc.LastPasses(num_tokens)),
        "implicit_scan": cc.Jacobi(iterations=num_tokens, gradient=cc.Implicit(iterations=num_tokens), scan=True),
    }


SOLVER_NAMES = sorted(exact_solvers(1))


def recurrent_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that exist because of the recurrence."""
    prefixes = ("fusion.", "carry.", "model.merge.")
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(prefixes)}


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of every parameter; zeros where the loss does not depend on it."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def cache_of(output: Any) -> Any:
    return getattr(output, CACHE_NAME)


def largest_difference(left: Any, right: Any) -> float:
    """Over two tensors, or over two dictionaries or sequences of tensors."""
    if isinstance(left, Tensor):
        return 0.0 if left.numel() == 0 else (left - right).abs().max().item()
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        return max(largest_difference(left[key], right[key]) for key in left)
    return max(largest_difference(a, b) for a, b in zip(left, right, strict=True))
