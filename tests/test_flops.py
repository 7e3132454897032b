"""Operations of a training step by formula against PyTorch's own counter of those that were run.

Neither counts elementwise work. The counter sees attention where it is made of plain products (eager, or the math kernel).
Older versions of transformers make rotary angles by a product, too: hence `EQUAL`, of equal counts.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import crosscurrent as cc
from crosscurrent.models.baselines import LSTMConfig, LSTMForCausalLM
from crosscurrent.training.flops import peak_flops, step_flops

ROWS, TOKENS = 2, 24
EQUAL = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
RLT_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "sliding_window": TOKENS,  # wide enough for masked and cut windows to be one
}


class Counter(TorchDispatchMode):
    """PyTorch's `FlopCounterMode` without its hooks on modules, which do not stand passes without gradient."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        self.total += 0 if count is None else count(*args, **(kwargs or {}), out_val=result)
        return result


def counted(model: Any, **settings: Any) -> float:
    model.train()
    ids = torch.randint(SIZES["vocab_size"], (ROWS, TOKENS))
    with Counter() as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, labels=ids, **settings).loss.backward()
    return counter.total


def make_llama(**changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | changes)))


def make_t2mlr(layer_start: int = 1, layer_end: int = 3, **settings: Any) -> Any:
    return cc.retrofit(make_llama(), layer_start, layer_end, **settings)


def make_rlt(**changes: Any) -> Any:
    return cc.RLTForCausalLM(cc.RLTConfig(**(RLT_SIZES | changes)))


SOLVERS = {
    "published": cc.Jacobi(iterations=6, backward_iterations=4),
    "default": None,
    "one pass of gradient": cc.Jacobi(3, gradient=cc.LastPasses(1)),
    "one-step gradient": cc.Jacobi(3, gradient=cc.Implicit(0), guess="inputs"),
    "implicit": cc.Jacobi(2, gradient=cc.Implicit(5)),
    "more iterations than tokens": cc.Jacobi(iterations=TOKENS + 9, gradient=cc.LastPasses(2)),
    "sweeps": cc.Sweeps(chunk_size=4, sweeps=2, gradient=cc.Implicit(2)),
    "sweeps of more chunks than there are": cc.Sweeps(chunk_size=16, sweeps=5),
}


@pytest.mark.parametrize(
    "model",
    [
        make_llama(),
        make_llama(num_key_value_heads=1, head_dim=32),
        make_llama(tie_word_embeddings=True),
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=50, attn_implementation="eager")
        ),
    ],
    ids=["GQA", "multi-query", "tied", "gpt2"],
)
def test_plain_models(model: Any) -> None:
    flops = step_flops(model, ROWS, TOKENS)
    assert flops.recurrence == 0
    assert flops.total == pytest.approx(counted(model), rel=EQUAL)


def test_lstm() -> None:
    """The counter sees no LSTM: written out. Each of 8 D^2 weights of a layer meets every token, and is met twice back."""
    model = LSTMForCausalLM(LSTMConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2))
    assert step_flops(model, ROWS, TOKENS).total == 3 * 2 * (2 * 8 * 64**2 + 50 * 64) * ROWS * TOKENS


@pytest.mark.parametrize("name", SOLVERS)
def test_t2mlr_by_whole_passes(name: str) -> None:
    model, solver = make_t2mlr(), SOLVERS[name]
    flops = step_flops(model, ROWS, TOKENS, solver)
    assert flops.model == step_flops(make_llama(), ROWS, TOKENS).total
    assert flops.total == pytest.approx(counted(model, solver=solver), rel=EQUAL)


@pytest.mark.parametrize("interval", [1, 5, None])
@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Sequential(recompute_every=6), cc.Jacobi(30, 30)])
def test_t2mlr_token_by_token(interval: int | None, solver: Any) -> None:
    """Steps compute only what is causal of the attention: the formula stays above, by less than half of the range's."""
    model = make_t2mlr(feedback_interval=interval)
    flops = step_flops(model, ROWS, TOKENS, solver)
    excess = 1 - counted(model, solver=solver) / flops.total
    assert -EQUAL < excess < (0.03 if isinstance(solver, cc.Sequential) else EQUAL)


def test_a_range_of_all_layers_and_of_one() -> None:
    for layer_start, layer_end in ((0, 4), (3, 4)):
        model = make_t2mlr(layer_start, layer_end)
        assert step_flops(model, ROWS, TOKENS).total == pytest.approx(counted(model), rel=EQUAL)


@pytest.mark.parametrize("interval", [1, 4, None])
@pytest.mark.parametrize("solver", [None, cc.Jacobi(4, 2), cc.Jacobi(3, gradient=cc.Implicit(2)), cc.Sweeps(4, 2)])
def test_rlt(interval: int | None, solver: Any) -> None:
    """In steps (solver None) the decoder's attentions are computed causally only; the weights are too small to be reordered,
    so the counter sees the products of steps. An adjoint leaves out the gradients of the memory, which fused kernels of
    GPUs do not."""
    model = make_rlt(feedback_interval=interval)
    flops = step_flops(model, ROWS, TOKENS, solver)
    plain = make_rlt(feedback_interval=None)
    assert flops.model == step_flops(plain, ROWS, TOKENS).total
    assert (flops.recurrence == 0) == (interval is None)
    excess = 1 - counted(model, solver=solver) / flops.total
    assert -EQUAL < excess < (EQUAL if isinstance(solver, cc.Jacobi) and solver.gradient is None else 0.05)


@pytest.mark.parametrize(
    "changes", [{"num_decoder_layers": 0}, {"tie_encoder_decoder": True}, {"num_memory_groups": 2}]
)
def test_rlt_of_other_kinds(changes: dict[str, Any]) -> None:
    model = make_rlt(**changes)
    assert step_flops(model, ROWS, TOKENS).total == pytest.approx(counted(model), rel=0.05)


def test_windows_count_their_width() -> None:
    wide, narrow = (step_flops(make_rlt(sliding_window=window), ROWS, TOKENS).total for window in (TOKENS, 4))
    assert wide - narrow == 3 * 4 * 64 * (TOKENS - 4) * 2 * ROWS * TOKENS
    config = AutoConfig.for_model("mistral", **SIZES, sliding_window=4)
    saved = (
        step_flops(make_llama(), ROWS, TOKENS).total
        - step_flops(AutoModelForCausalLM.from_config(config), ROWS, TOKENS).total
    )
    assert saved == 3 * 4 * 64 * (TOKENS - 4) * 4 * ROWS * TOKENS


def test_a_wrapped_model_counts_as_itself() -> None:
    model = make_t2mlr()
    assert step_flops(nn.Sequential(model), ROWS, TOKENS) == step_flops(model, ROWS, TOKENS)


def test_a_step_of_the_published_recipe_costs_what_the_docs_say() -> None:
    """[3 (1 - r) + r (guess + D + backward)] / 3 of the base's layers, which is nearly the truth without a head."""
    with torch.device("meta"):
        base = LlamaConfig(vocab_size=2, hidden_size=576, num_hidden_layers=30, num_attention_heads=9)
        model = cc.T2MLRForCausalLM(cc.T2MLRConfig(base_config=base, layer_start=12, layer_end=18))
    flops = step_flops(model, 1, 64, cc.Jacobi(16, 4))
    assert flops.total / flops.model == pytest.approx((3 * 0.8 + 0.2 * (1 + 16 + 2 * 4)) / 3, rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step_flops(make_llama(), 0, 5), "num_rows=0"),
        (lambda: step_flops(make_llama(), 1, 0), "sequence_length=0"),
        (lambda: step_flops(make_llama(), 1, 5, cc.Sequential()), "no recurrence"),
        (lambda: step_flops(nn.Linear(2, 2), 1, 5), "no causal language model"),
        (
            lambda: step_flops(
                AutoModelForCausalLM.from_config(
                    AutoConfig.for_model("mixtral", **SIZES, num_local_experts=2, num_experts_per_tok=1)
                ),
                1,
                5,
            ),
            "mlp.gate.weight",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_peaks_are_found_by_the_names_that_devices_give() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12,
        "NVIDIA GeForce RTX 4090": 165e12,
        "NVIDIA GeForce GTX 1080": None,
        "AMD EPYC 7B13": None,
    }
    assert {name: peak_flops(name, torch.bfloat16) for name in names} == names
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None
