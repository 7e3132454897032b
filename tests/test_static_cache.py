"""A cache that never grows: the same results, and a fixed number of compiled graphs."""

import copy
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import SUBJECTS, largest_difference, make_t2mlr, token_ids
from tests.test_generation import GREEDY

STATIC = [
    "rlt0",
    "rlt1",
    "rlt2",
    "rlt_encoder_window",
    "rlt_groups",
    "rlt_no_decoder",
    "t2mlr_eager",
    "t2mlr_first_layers",
    "t2mlr_gemma3",
    "t2mlr_gpt2",
    "t2mlr_interval",
    "t2mlr_llama",
    "t2mlr_mistral",
]
for_static = pytest.mark.parametrize("subject", STATIC)


@for_static
def test_generates_what_a_growing_cache_gives(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 7)
    even, padded = torch.ones_like(ids), torch.tensor([[1] * 7, [0, 0] + [1] * 5])
    requests: list[dict[str, Any]] = [
        {"attention_mask": even},
        {"attention_mask": padded, "solver": cc.Jacobi(16, 4)},
        {"attention_mask": padded, "num_beams": 3},
        {"attention_mask": even, "prefill_chunk_size": 3},
        {"attention_mask": padded, "prompt_recurrence": False},
    ]
    for request in requests:
        settings = GREEDY | {"solver": cc.Sequential()} | request
        expected = model.generate(ids, **settings)
        assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected), request


@for_static
@torch.no_grad()
def test_any_split_gives_the_same(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 17)
    cache: Any = model.new_cache(max_cache_len=20)
    cache.activate_past_recording()
    parts = [model(ids[:, :6], **{CACHE_NAME: cache}, solver=cc.Sequential()).logits]
    parts += [model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in (6, 7)]
    model(token_ids(2, 5, seed=8), **{CACHE_NAME: cache}, solver=cc.Sequential())
    cache.crop(-5)
    copied = copy.deepcopy(cache)
    parts.append(model(ids[:, 8:], **{CACHE_NAME: cache}, solver=cc.Jacobi(9, 1)).logits)
    whole = model(ids, solver=cc.Sequential()).logits
    assert largest_difference(torch.cat(parts, dim=1), whole) < 2e-6
    assert (
        largest_difference(model(ids[:, 8:], **{CACHE_NAME: copied}, solver=cc.Sequential()).logits, whole[:, 8:])
        < 2e-6
    )
    cache.reset()
    assert largest_difference(model(ids, **{CACHE_NAME: cache}, solver=cc.Sequential()).logits, whole) < 2e-6


@for_static
@torch.no_grad()
def test_documents_and_rows(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 6)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    expected = model(ids, segment_ids=segments, solver=cc.Sequential()).logits
    cache: Any = model.new_cache(max_cache_len=9)
    found = model(ids[:, :4], **{CACHE_NAME: cache}, segment_ids=segments[:, :4], solver=cc.Sequential()).logits
    assert largest_difference(found, expected[:, :4]) < 2e-6
    rest = {"segment_ids": segments[:, 4:], "solver": cc.Sequential()}
    detached = cache.detach()
    assert largest_difference(model(ids[:, 4:], **{CACHE_NAME: detached}, **rest).logits, expected[:, 4:]) < 2e-6
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    swapped = {"segment_ids": segments[:, 4:].flip(0), "solver": cc.Sequential()}
    assert (
        largest_difference(model(ids[:, 4:].flip(0), **{CACHE_NAME: cache}, **swapped).logits, expected[:, 4:].flip(0))
        < 2e-6
    )


@for_static
def test_one_row_serves_several_sequences(subject: str) -> None:
    model, prefix = SUBJECTS[subject](), token_ids(1, 5)
    prompts = torch.cat([prefix.expand(3, -1), token_ids(3, 2, seed=4)], dim=1)
    cache: Any = model.new_cache(max_cache_len=20)
    with torch.no_grad():
        model(prefix, **{CACHE_NAME: cache}, solver=cc.Sequential())
    settings = GREEDY | {"solver": cc.Sequential()}
    assert torch.equal(model.generate(prompts, **{CACHE_NAME: cache}, **settings), model.generate(prompts, **settings))


def test_what_does_not_fit_is_refused() -> None:
    model = make_t2mlr("llama")
    cache = model.new_cache(max_cache_len=6)
    with torch.no_grad():
        model(token_ids(1, 5), **{CACHE_NAME: cache})
        with pytest.raises(ValueError, match="room for 6 tokens, holds 5 and is to take 2 more"):
            model(token_ids(1, 2), **{CACHE_NAME: cache})
        assert model(token_ids(1, 1), **{CACHE_NAME: cache}).logits.isfinite().all()
    with pytest.raises(ValueError, match="gradients"):
        model.train()(token_ids(1, 5), **{CACHE_NAME: model.new_cache(max_cache_len=6)})


def count_graphs(model: Any, max_cache_len: int | None) -> list[int]:
    """Graphs compiled so far after each of 32 single tokens. What they compute is checked as well."""
    graphs = 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend=backend)
    ids = token_ids(2, 40)
    mask = torch.ones_like(ids)
    cache = model.new_cache(max_cache_len)
    model(ids[:, :8], **{CACHE_NAME: cache}, attention_mask=mask[:, :8], solver=cc.Sequential())
    counts = []
    for t in range(8, 40):
        logits = forward(ids[:, t : t + 1], **{CACHE_NAME: cache}, attention_mask=mask[:, : t + 1].contiguous()).logits
        counts.append(graphs)
    assert largest_difference(logits, model(ids, solver=cc.Sequential()).logits[:, -1:]) < 2e-6
    return counts


@pytest.mark.parametrize("max_cache_len", [40, None])
@pytest.mark.parametrize("subject", ["t2mlr_llama", "rlt1", "rlt2"])
@torch.no_grad()
def test_a_fixed_number_of_graphs(subject: str, max_cache_len: int | None) -> None:
    counts = count_graphs(SUBJECTS[subject](), max_cache_len)
    assert counts[3] == counts[-1]  # the first steps tell the compiler which sizes change: all is compiled then
    assert 0 < counts[-1] <= 20


def test_passes_of_a_solver_are_compiled_once() -> None:
    model, ids = make_t2mlr("llama").train(), token_ids(2, 12)
    seen: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        seen.append(0)
        return module.forward

    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=backend)
    counts, losses = [], []
    for iterations in (3, 12):
        losses.append(compiled(ids, labels=ids, solver=cc.Jacobi(iterations, 2)).loss)
        counts.append(len(seen))
    assert counts[1] <= counts[0] + 4  # another solver, not another graph for each of its passes
    assert torch.equal(losses[1], model(ids, labels=ids, solver=cc.Jacobi(12, 2)).loss)


@pytest.mark.parametrize("subject", ["t2mlr_gemma3", "rlt1"])
def test_generate_compiles_and_gives_the_same(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 8)
    settings = GREEDY | {"max_new_tokens": 12, "solver": cc.Sequential(), "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **settings)
    compile_config: Any = CompileConfig(backend="aot_eager")
    compile_config.mode = None  # one of inductor's
    compile_config._compile_all_devices = True  # otherwise `generate` compiles on GPUs only
    torch._dynamo.reset()
    found = model.generate(ids, cache_implementation="static", compile_config=compile_config, **settings)
    assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
