"""Attention: eager and sdpa compute the same, a window means one thing everywhere, and no empty row gives NaN."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    masking_utils,
)
from transformers.integrations import flex_attention as flex_integration

import crosscurrent as cc
from crosscurrent.models.t2mlr.bases import base_class_of
from tests.subjects import SIZES, cache_of, gradients, largest_difference, make_t2mlr, moved, token_ids

EXACT = 1e-11  # float64 rounding on logits of order 1
T = 9
W = 4
GROUPED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

BASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=W),
    "gemma3": lambda: Gemma3TextConfig(**GROUPED, sliding_window=W, query_pre_attn_scalar=8, layer_types=MIXED),
}
WINDOWED: dict[str, Callable[[int], PreTrainedConfig]] = {
    "mistral": lambda num_layers: MistralConfig(**(GROUPED | {"num_hidden_layers": num_layers}), sliding_window=W),
    "gemma3": lambda num_layers: Gemma3TextConfig(
        **(GROUPED | {"num_hidden_layers": num_layers}),
        sliding_window=W,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention"] * num_layers,
    ),
}
ATTENTIONS = ("eager", "sdpa")
for_each_attention = pytest.mark.parametrize("attention", ATTENTIONS)
for_each_base = pytest.mark.parametrize("base_name", BASES)
for_each_solver = pytest.mark.parametrize("solver", [cc.Sequential(), cc.Jacobi(iterations=20, backward_iterations=20)])


def retrofitted(config: PreTrainedConfig, layer_start: int, layer_end: int, attention: str) -> Any:
    torch.manual_seed(1)
    base = moved(base_class_of(config)(config))
    base.set_attn_implementation(attention)
    model = cc.retrofit(base, layer_start, layer_end)
    moved(model.fusion)
    moved(model.carry)
    return model


def batches() -> dict[str, dict[str, Tensor]]:
    left = torch.ones(3, T, dtype=torch.int64)
    left[0, :4] = 0
    left[2, :1] = 0
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 1]])
    return {
        "plain": {},
        "left_padded": {"attention_mask": left},
        "packed": {"segment_ids": documents},
        "packed_and_padded": {"segment_ids": documents, "attention_mask": left},
    }


# ---- eager and sdpa ----


@pytest.mark.usefixtures("exact_arithmetic")
@for_each_base
@for_each_solver
@pytest.mark.parametrize("kind", batches())
def test_eager_and_sdpa_agree_in_outputs_and_gradients(base_name: str, solver: Any, kind: str) -> None:
    ids, arguments = token_ids(3, T), batches()[kind]
    found = []
    for attention in ATTENTIONS:
        model = retrofitted(BASES[base_name](), 1, 3, attention)
        assert model.config._attn_implementation == model.config.base_config._attn_implementation == attention
        output = model(ids, labels=ids, solver=solver, **arguments)
        found.append((output.logits, gradients(model, output.loss)))
    is_real = arguments.get("attention_mask", torch.ones_like(ids)) != 0
    assert largest_difference(found[0][0][is_real], found[1][0][is_real]) < EXACT
    assert largest_difference(found[0][1], found[1][1]) < 1e-10


@pytest.mark.usefixtures("exact_arithmetic")
@for_each_base
@pytest.mark.parametrize("kind", ["plain", "left_padded"])
def test_eager_and_sdpa_agree_from_a_cache(base_name: str, kind: str) -> None:
    """A prompt, a chunk, single tokens."""
    ids = token_ids(3, T + 5)
    mask = batches()[kind].get("attention_mask", torch.ones(3, T, dtype=torch.int64))
    mask = torch.cat([mask, torch.ones(3, 5, dtype=torch.int64)], dim=1)
    found = []
    for attention in ATTENTIONS:
        model = retrofitted(BASES[base_name](), 1, 3, attention)
        found.append(in_parts(model, ids, (T - 2, 4, 1, 1, 1), mask))
        whole = model(ids, attention_mask=mask, solver=cc.Sequential()).logits
        assert largest_difference(found[-1][mask != 0], whole[mask != 0]) < EXACT
    assert largest_difference(found[0][mask != 0], found[1][mask != 0]) < EXACT


def in_parts(model: Any, ids: Tensor, sizes: tuple[int, ...], mask: Tensor | None = None, **options: Any) -> Tensor:
    """Logits of a sequence that is read in parts, each continuing from the cache of those before it."""
    cache: Any = None
    logits, start = [], 0
    masks = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    for part in ids.split(list(sizes), dim=1):
        columns = slice(start, start + part.shape[1])
        arguments = {name: value[:, columns] for name, value in masks.items()}
        if mask is not None:
            arguments["attention_mask"] = mask[:, : columns.stop]
        output = model(part, cache=cache, use_cache=True, solver=cc.Sequential(), **arguments)
        cache, start = cache_of(output), columns.stop
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def test_eager_and_sdpa_generate_the_same() -> None:
    for base_name, config in BASES.items():
        said = [
            retrofitted(config(), 1, 3, attention).generate(
                token_ids(3, T),
                attention_mask=batches()["left_padded"]["attention_mask"],
                max_new_tokens=8,
                pad_token_id=0,
            )
            for attention in ATTENTIONS
        ]
        assert torch.equal(*said), base_name


# ---- other kernels ----


def test_flash_attention_without_its_package_is_transformers_own_message(tmp_path: Any) -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, T)
    before = model(ids).logits
    with pytest.raises(ImportError, match=r"FlashAttention2 .*installed"):
        model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "sdpa" and torch.equal(model(ids).logits, before)
    model.save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=r"FlashAttention2 .*installed"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match='"sdpam"` is not supported'):
        model.set_attn_implementation("sdpam")


def uncompiled(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kwargs: Any) -> Any:
    return flex_attention(query, key, value, **kwargs)


def uncompiled_block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
    return create_block_mask(*args, **kwargs)


@pytest.mark.parametrize("base_name", ["llama", "mistral"])
def test_flex_attention_runs_whole_rows_of_one_document(base_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled here, which would take half a minute. What it cannot do is refused."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(masking_utils, "create_block_mask", uncompiled_block_mask)
    ids, mask = token_ids(3, T), batches()["left_padded"]["attention_mask"]
    expected, model = make_t2mlr(base_name, 0, 2), make_t2mlr(base_name, 0, 2)
    model.set_attn_implementation("flex_attention")
    exact = cc.Jacobi(iterations=T)
    with torch.no_grad():
        for arguments in ({}, {"attention_mask": mask}):
            difference = model(ids, solver=exact, **arguments).logits - expected(ids, solver=exact, **arguments).logits
            assert difference[mask != 0].abs().max() < 1e-5
        with pytest.raises(ValueError, match="BlockMask, which cannot be cut to single tokens"):
            model(ids, solver=cc.Sequential())
    with pytest.raises(ValueError, match="several documents in a row need attn_implementation 'sdpa' or 'eager'"):
        model(ids, segment_ids=torch.arange(T).expand(3, T) // 5)


# ---- sliding windows: W tokens are seen, the current one among them ----

READINGS = ("whole", "token by token", "in chunks", "one chunk, then tokens")
LENGTH = 14


def read(model: Any, ids: Tensor, how: str, recurrent: bool, pads: int = 0) -> Tensor:
    """Logits [B, LENGTH, V] of sequences, read in one of several ways, with padding before them."""
    ids = torch.nn.functional.pad(ids, (pads, 0))
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    recurrent_mask = torch.full_like(ids, int(recurrent))
    if how == "whole":
        return model(ids, attention_mask=mask, recurrent_mask=recurrent_mask, solver=cc.Sequential()).logits[:, pads:]
    rest = LENGTH - 6
    sizes = {
        "token by token": (pads + 1, *(1,) * (LENGTH - 1)),
        "in chunks": (pads + 3, 5, 2, LENGTH - 10),
        "one chunk, then tokens": (pads + 6, *(1,) * rest),
    }[how]
    return in_parts(model, ids, sizes, mask if pads else None, recurrent_mask=recurrent_mask)[:, pads:]


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.parametrize("base_name", WINDOWED)
@for_each_attention
@pytest.mark.parametrize("num_layers", [1, 2])
def test_one_meaning_of_the_window(base_name: str, attention: str, num_layers: int) -> None:
    """Without recurrence a change reaches W - 1 tokens on through each layer, and no further."""
    model = retrofitted(WINDOWED[base_name](num_layers), 0, 1, attention)
    reach = num_layers * (W - 1)
    ids, moved_at = token_ids(1, LENGTH), LENGTH - 1 - reach
    rows = torch.cat([ids, with_another(ids, moved_at), with_another(ids, moved_at - 1)])
    with torch.no_grad():
        for how in READINGS:
            for pads in (0, 3):
                before, seen, unseen = read(model, rows, how, recurrent=False, pads=pads)
                assert largest_difference(seen[-1], before[-1]) > 1e-6, (how, pads)
                assert largest_difference(unseen[-1], before[-1]) < EXACT, (how, pads)
                assert largest_difference(unseen[-2], before[-2]) > 1e-6, (how, pads)


def with_another(ids: Tensor, column: int) -> Tensor:
    other = ids.clone()
    other[0, column] = ids[0, column] % (SIZES["vocab_size"] - 1) + 1
    return other


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.parametrize("base_name", WINDOWED)
def test_the_state_reaches_beyond_every_window(base_name: str) -> None:
    model = retrofitted(WINDOWED[base_name](1), 0, 1, "sdpa")
    ids = token_ids(1, LENGTH)
    with torch.no_grad():
        before, after = (read(model, x, "whole", recurrent=True) for x in (ids, with_another(ids, 0)))
    assert largest_difference(before[:, -1], after[:, -1]) > 1e-9


@pytest.mark.usefixtures("exact_arithmetic")
@for_each_base
@for_each_attention
@pytest.mark.parametrize("recurrent", [True, False])
def test_every_reading_is_the_same(base_name: str, attention: str, recurrent: bool) -> None:
    model, ids = retrofitted(BASES[base_name](), 1, 3, attention), token_ids(1, LENGTH)
    with torch.no_grad():
        whole = read(model, ids, "whole", recurrent)
        for how in READINGS:
            for pads in (0, 3):
                assert largest_difference(read(model, ids, how, recurrent, pads), whole) < EXACT, (how, pads)


# ---- rows with nothing to see ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@for_each_base
@for_each_attention
@for_each_solver
def test_padding_gives_no_nan(base_name: str, attention: str, solver: Any, dtype: torch.dtype) -> None:
    """Left padding, and a row of padding only, forward and backward."""
    model = retrofitted(BASES[base_name](), 1, 3, attention).to(dtype).train()
    ids, mask = token_ids(3, T), batches()["left_padded"]["attention_mask"].clone()
    mask[1] = 0
    output = model(ids, attention_mask=mask, labels=ids, solver=solver)
    assert bool(torch.isfinite(output.logits).all()) and bool(torch.isfinite(output.loss))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients(model, output.loss).values())
    rest = mask.sum(dim=1) > 0
    alone = model(ids[rest], attention_mask=mask[rest], labels=ids[rest], solver=solver)
    assert largest_difference(output.loss.float(), alone.loss.float()) < 1e-5
