"""Columns before the first recurrent token are computed once, and that changes no number."""

from typing import Any

import pytest
import torch

import crosscurrent as cc
from crosscurrent.models.rlt.decoder import DecoderRun
from crosscurrent.models.t2mlr.layer_range import LayerRange
from tests.subjects import (
    SOLVER_NAMES,
    cache_of,
    exact_solvers,
    gradients,
    largest_difference,
    make_rlt,
    make_t2mlr,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

T = 11
INEXACT = [
    cc.Jacobi(3, 2),
    cc.Jacobi(3, gradient=cc.Implicit(2), scan=True),
    cc.Jacobi(3, 1, guess="inputs"),
    cc.Jacobi(3, gradient=cc.Implicit(2), scan=True, guess="inputs"),
]
SUBJECTS: dict[str, Any] = {
    "t2mlr": lambda: make_t2mlr("llama"),
    "t2mlr_sliding": lambda: make_t2mlr("gemma2"),
    "t2mlr_interval": lambda: make_t2mlr("llama", feedback_interval=3),
    "t2mlr_last_layers": lambda: make_t2mlr("gpt2", 2, 4),
    "rlt1": make_rlt,
    "rlt2": lambda: make_rlt(feedback_interval=3),
}


def ragged() -> dict[str, torch.Tensor]:
    """Prompts of 4, 6 and 5 tokens that are not recurrent; the second row is padded, the third holds two documents."""
    recurrent, mask = torch.ones(3, T), torch.ones(3, T)
    segments = torch.zeros(3, T, dtype=torch.int64)
    recurrent[0, :4], recurrent[1, :6], recurrent[2, :5] = 0, 0, 0
    mask[1, :2], segments[2, 2:] = 0, 1
    return {"recurrent_mask": recurrent, "attention_mask": mask, "segment_ids": segments}


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterate over all columns, as if a call could not be split."""
    for core in (LayerRange, DecoderRun):
        monkeypatch.setattr(core, "can_be_split", False)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("solver", INEXACT, ids=repr)
@pytest.mark.filterwarnings("ignore:scan=True has no effect")
def test_equals_iterating_over_all_columns(subject: str, solver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, found = SUBJECTS[subject](), token_ids(3, T), []
    for is_split in (True, False):
        if not is_split:
            whole(monkeypatch)
        cache: Any = model.new_cache()
        cache.activate_past_recording()
        hidden = {} if subject.startswith("rlt") else {"output_hidden_states": True}
        output = model(ids, solver=solver, cache=cache, **ragged(), **hidden)
        cache = cache_of(output)
        registers = cache.registers
        following = model(token_ids(3, 2), cache=cache, solver=cc.Sequential()).logits
        found.append((output.logits, registers, following, *(output.hidden_states or ())))
        assert output.solver_report.iterations == 3
    assert largest_difference(*found) < 1e-11


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("solver", [name for name in SOLVER_NAMES if name != "sequential"])
@pytest.mark.filterwarnings("ignore:scan=True has no effect")
def test_gradients_are_those_of_the_definition(subject: str, solver: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(3, T)
    found = []
    for chosen in (cc.Sequential(), exact_solvers(T)[solver]):
        output = model(ids, labels=ids, solver=chosen, use_cache=True, **ragged())
        following = model(token_ids(3, 2), cache=cache_of(output), solver=cc.Sequential()).logits
        found.append(gradients(model, output.loss + following.square().mean()))
    assert largest_difference(*found) < 1e-10


def test_gradients_reach_what_the_prompt_left_behind() -> None:
    """It is no constant of an older pass: with one pass the gradient reaches the prompt's last token."""
    model, embeddings = make_t2mlr("llama"), torch.randn(1, T, 16, dtype=torch.float64, requires_grad=True)
    recurrent = torch.arange(T)[None] > 5
    with torch.no_grad():  # no path through attention
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
    logits = model(inputs_embeds=embeddings, recurrent_mask=recurrent, solver=cc.Jacobi(3, 1)).logits
    (found,) = torch.autograd.grad(logits[0, 6].sum(), embeddings)
    assert found[0].any(dim=1).nonzero().flatten().tolist() == [5, 6]


def test_the_prompt_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    inner = LayerRange.run

    def counted(core: Any, z: torch.Tensor, columns: slice, past: Any) -> Any:
        runs.append(z.shape[1])
        return inner(core, z, columns, past)

    monkeypatch.setattr(LayerRange, "run", counted)
    model, ids, recurrent = make_t2mlr("llama"), token_ids(2, T), torch.ones(2, T)
    recurrent[:, :6] = 0
    model(ids, recurrent_mask=recurrent, solver=cc.Jacobi(3, 1))
    assert runs == [6] + [T - 6] * 4
    runs.clear()
    model(ids, recurrent_mask=torch.zeros(2, T), solver=cc.Jacobi(3, 1))
    assert runs == [T]


def test_exact_after_as_many_passes_as_there_are_recurrent_tokens() -> None:
    model, ids, recurrent = make_t2mlr("llama"), token_ids(2, T), torch.ones(2, T)
    recurrent[:, :6] = 0
    exact = model(ids, recurrent_mask=recurrent, solver=cc.Sequential()).logits
    for passes, is_exact in ((T - 7, False), (T - 6, True)):
        output = model(ids, recurrent_mask=recurrent, solver=cc.Jacobi(passes, 1))
        assert output.solver_report.exact is is_exact
        assert (largest_difference(output.logits, exact) < 1e-11) is is_exact


def test_dropout_draws_the_same_in_each_pass() -> None:
    model, ids, recurrent = make_t2mlr("gpt2"), token_ids(2, T), torch.ones(2, T)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    recurrent[:, :6] = 0
    report = model.train()(ids, recurrent_mask=recurrent, solver=cc.Jacobi(T - 7, 1)).solver_report
    assert not report.exact and report.residuals[-1] < 0.2 * report.residuals[0]


def test_gradient_checkpointing_iterates_over_all() -> None:
    model, ids, recurrent = make_t2mlr("gpt2").train(), token_ids(2, T), torch.ones(2, T)
    recurrent[:, :6] = 0
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        output = model(ids, labels=ids, recurrent_mask=recurrent, solver=cc.Jacobi(T, T))
        found.append(gradients(model, output.loss))
    assert largest_difference(*found) < 1e-11


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("solver", INEXACT, ids=repr)
@pytest.mark.filterwarnings("ignore:scan=True has no effect")
def test_a_row_is_solved_as_it_would_be_alone(subject: str, solver: Any) -> None:
    """However few the passes: neither neighbours nor documents before it change a row's logits and gradients."""
    model, ids = SUBJECTS[subject](), token_ids(3, T)
    recurrent = torch.ones(3, T)
    recurrent[0, :7], recurrent[1, :2] = 0, 0
    labels = torch.where(recurrent[:1] == 1, ids[:1], -100)
    others = torch.cat([labels, torch.full_like(ids[1:], -100)])
    settings: dict[str, Any] = {"solver": solver, "use_cache": False}
    alone = model(ids[:1], labels=labels, recurrent_mask=recurrent[:1], **settings)
    expected = gradients(model, alone.loss)
    batch = model(ids, labels=others, recurrent_mask=recurrent, **settings)
    packed = model(
        torch.cat([ids[1:2], ids[:1]], dim=1),
        labels=torch.cat([others[1:2], labels], dim=1),
        recurrent_mask=torch.cat([recurrent[1:2], recurrent[:1]], dim=1),
        segment_ids=torch.tensor([[0] * T + [1] * T]),
        **settings,
    )
    for output, logits in ((batch, batch.logits[:1]), (packed, packed.logits[:, T:])):
        assert largest_difference(logits, alone.logits) < 1e-11
        assert largest_difference(gradients(model, output.loss), expected) < 1e-10


def test_padded_prompts_under_jacobi_can_be_trained() -> None:
    model, ids = make_rlt(), token_ids(2, 8)
    mask = torch.ones(2, 8)
    mask[0, :3], mask[1, :1] = 0, 0
    found = [
        gradients(model, model(ids, attention_mask=mask, labels=ids, solver=solver, use_cache=False).loss)
        for solver in (cc.Sequential(), cc.Jacobi(8, 8))
    ]
    assert largest_difference(*found) < 1e-10
