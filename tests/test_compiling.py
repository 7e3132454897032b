"""Compiled steps compute what plain ones do. Most tests compile up to the graphs only: generating code takes long."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent as cc
from crosscurrent.experiments.bench import Conditions, run_case
from crosscurrent.experiments.bench.rlt import RLT_STEP
from crosscurrent.recurrence import compiling
from tests.subjects import gradients, largest_difference, make_rlt, token_ids
from tests.test_steps import padded_batch

Counts = dict[str, int]
BATCH: dict[str, Any] = padded_batch()


@pytest.fixture(params=["aot_eager"])
def counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """How often each function has run compiled, by a backend of torch.compile; None: only counted."""
    found: Counts = {}

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        found[function.__name__] = found.get(function.__name__, 0) + 1
        return torch.compile(function, backend=request.param) if request.param else function

    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "_can_compile", lambda device: True)
    monkeypatch.setattr(compiling, "_compiled", compiled)
    return found


def measured(
    model: Any, is_compiled: bool, is_autocast: bool = False, **inputs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    with cc.compiled_steps(is_compiled), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = model(**inputs).loss
    return loss, gradients(model, loss)


def check(model: Any, tolerance: float, **settings: Any) -> None:
    loss, found = measured(model, True, **settings)
    expected_loss, expected = measured(model, False, **settings)
    assert largest_difference(loss, expected_loss) < tolerance
    for name, gradient in expected.items():
        assert largest_difference(found[name], gradient) < tolerance * max(1.0, gradient.abs().max().item()), name


@pytest.mark.parametrize("counts", ["inductor"], indirect=True)
def test_as_code(counts: Counts) -> None:
    model, ids = make_rlt(num_decoder_layers=2, sliding_window=16).float().train(), token_ids(2, 11)
    check(model, 1e-5, input_ids=ids, labels=ids)
    # Two layers; not the first column, which sees one key, nor the last, which sees all there is room for.
    assert counts == {"_forward": 2 * 9, "_backward": 2 * 9}


def test_padded_and_packed(counts: Counts) -> None:
    """Several columns a step."""
    check(make_rlt(feedback_interval=3, sliding_window=16).train(), 1e-12, **BATCH)
    assert counts["_forward"] == counts["_backward"] > 2


def test_under_autocast(counts: Counts) -> None:
    check(make_rlt(sliding_window=16).float().train(), 0.1, is_autocast=True, **BATCH)
    assert counts["_backward"] > 2


def test_lengths_and_reordered_weights(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscurrent.recurrence.steps._FEWEST_ELEMENTS", 1)
    model = make_rlt(sliding_window=16).float().train()
    for num_tokens in (9, 12, 11, 2, 3):
        ids = token_ids(2, num_tokens)
        check(model, 1e-4, input_ids=ids, labels=ids)


def test_recomputing_changes_no_bit(counts: Counts) -> None:
    """With a window that moves."""
    model = make_rlt().train()
    check(model, 1e-12, **BATCH)
    loss, expected = measured(model, True, **BATCH)
    again, found = measured(model, True, solver=cc.Sequential(recompute_every=4), **BATCH)
    assert torch.equal(loss, again)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_decoding(counts: Counts) -> None:
    model, ids = make_rlt().eval(), token_ids(2, 5)

    def generated() -> Any:
        settings = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    expected = generated()
    with cc.compiled_steps():
        found = generated()
    assert torch.equal(found.sequences, expected.sequences)
    assert all(largest_difference(a, b) < 1e-12 for a, b in zip(found.scores, expected.scores, strict=True))


@pytest.mark.parametrize("counts", [None], indirect=True)
def test_the_backward_pass_follows_its_forward_pass(counts: Counts) -> None:
    model, ids = make_rlt().train(), token_ids(2, 6)
    plain = model(ids, labels=ids).loss
    with cc.compiled_steps():
        loss = model(ids, labels=ids).loss
        plain.backward()
    assert "_backward" not in counts
    loss.backward()
    assert counts["_backward"] > 2


def test_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning, once, and plain code."""

    def failing(function: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", failing)
    compiling._can_compile.cache_clear()
    model = make_rlt().train()
    try:
        with pytest.warns(UserWarning, match=r"not compiled.*\(no compiler\).*C\+\+ compiler"):
            loss, found = measured(model, True, **BATCH)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measured(model, True, **BATCH)
    finally:
        compiling._can_compile.cache_clear()
    plain_loss, expected = measured(model, False, **BATCH)
    assert torch.equal(loss, plain_loss) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_can_compile", lambda device: True)
    assert not compiling.compiles_steps("cpu")
    with cc.compiled_steps():
        assert compiling.compiles_steps("cpu")
        with cc.compiled_steps(False):
            assert not compiling.compiles_steps("cpu")
    assert not compiling.compiles_steps("cpu")
    monkeypatch.setenv(compiling.VARIABLE, "1")
    assert compiling._from_environment()
    monkeypatch.setenv(compiling.VARIABLE, "yes")
    with pytest.raises(ValueError, match="CROSSCURRENT_COMPILE='yes' is not allowed: give 1"):
        compiling._from_environment()


@pytest.mark.parametrize("counts", [None], indirect=True)
def test_the_row_of_the_benchmark(counts: Counts) -> None:
    figures = {**RLT_STEP.sizes["tiny"], "has_compiled": True}
    case = replace(RLT_STEP, sizes={"tiny": figures})
    result = run_case(case, Conditions(size="tiny"), repeats=1, with_memory=False)
    assert {ratio["over"] for ratio in result["ratios"] if ratio["median"]} >= {"RLT-1, compiled", "RLT-1"}
    # One layer, a warm-up and a round, and three of five columns.
    assert counts == {"_forward": 2 * 3, "_backward": 2 * 3}
