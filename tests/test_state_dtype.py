"""The dtype of the carried state: at least float32 unless told otherwise, also beside a bfloat16 stream."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import SIZES, cache_of, largest_difference, make_t2mlr, token_ids

BFLOAT16 = torch.bfloat16


def contracting_model() -> Any:
    """As trained ones are: what is disturbed dies away. Its weights are numbers that bfloat16 holds."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 600}
    model: Any = cc.retrofit(LlamaForCausalLM(LlamaConfig(**(SIZES | sizes))), 1, 3)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.12)
    nn.init.constant_(model.fusion.current_scale, 0.3)
    nn.init.constant_(model.fusion.recurrent_scale, 0.6)
    return model.to(BFLOAT16).double().eval()


@torch.no_grad()
def states(model: Any, dtype: torch.dtype, state_dtype: torch.dtype | None, ids: Tensor) -> Tensor:
    """[B, T, D] the state after each token, in float64."""
    model = copy.deepcopy(model).to(dtype)
    model.carry.state_dtype = state_dtype
    cache = model.new_cache()
    cache.activate_past_recording()
    model(ids, **{CACHE_NAME: cache}, solver=cc.Sequential())
    assert cache.state.register.dtype == (state_dtype or torch.promote_types(dtype, torch.float32))
    return cache.registers[:, 1:].double()


def test_no_drift_over_512_steps(record_figures: Callable[[str, dict[str, float]], None]) -> None:
    model, ids = contracting_model(), token_ids(2, 512)
    exact = states(model, torch.float64, None, ids)
    errors = {}
    for name, state_dtype in (("float32 state", None), ("bfloat16 state", BFLOAT16)):
        found = states(model, BFLOAT16, state_dtype, ids)
        errors[name] = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert errors[name][:, -128:].mean() < 1.25 * errors[name][:, :128].mean()
    assert errors["float32 state"].mean() < errors["bfloat16 state"].mean() < 0.02
    record_figures(
        "relative error of the state, bfloat16 stream, 512 steps", {n: e.mean().item() for n, e in errors.items()}
    )


def test_a_wider_state_is_kept_as_it_is() -> None:
    model: Any = make_t2mlr("llama")
    assert cache_of(model(token_ids(1, 3), use_cache=True)).state.register.dtype == torch.float64
    narrow = copy.deepcopy(model).to(BFLOAT16)
    ids = token_ids(2, 5)
    for solver in (cc.Sequential(), cc.Jacobi(3, 2)):
        cache = cache_of(narrow(ids, use_cache=True, solver=solver))
        assert cache.state.register.dtype == torch.float32
        assert narrow(ids[:, :1], **{CACHE_NAME: cache}).logits.dtype == BFLOAT16
        assert cache.state.register.dtype == torch.float32


@pytest.mark.parametrize("given", [BFLOAT16, "bfloat16", "torch.bfloat16"])
def test_it_is_a_setting_saved_with_the_model(given: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = cc.retrofit(LlamaForCausalLM(LlamaConfig(**SIZES)), 1, 3, state_dtype=given)
    assert model.config.state_dtype == "bfloat16"
    model.save_pretrained(tmp_path)
    loaded = cc.T2MLRForCausalLM.from_pretrained(tmp_path)
    ids = token_ids(1, 4)
    assert cache_of(loaded(ids, use_cache=True)).state.register.dtype == BFLOAT16
    assert largest_difference(loaded(ids).logits, model(ids).logits) < 1e-6


def test_gradients_reach_the_fusion_through_a_float32_state() -> None:
    model = contracting_model().to(BFLOAT16).train()
    ids = token_ids(2, 7)
    with pytest.warns(UserWarning, match="rounded away"):
        model(ids, labels=ids, solver=cc.Jacobi(4, 2)).loss.backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.fusion.parameters())
