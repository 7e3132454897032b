"""Sweeps: exact chunk after chunk, in agreement with the same steps written out, and refused where they cannot be had."""

from typing import Any

import pytest
import torch

import crosscurrent as cc
from crosscurrent.models.rlt.decoder import DecoderColumns
from crosscurrent.models.t2mlr.layer_range import LayerRange
from tests.subjects import (
    SUBJECTS,
    RunningMean,
    cache_of,
    gradients,
    largest_difference,
    make_gated,
    make_rlt,
    make_t2mlr,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

T = 11
FEW = ("t2mlr_llama", "t2mlr_gemma2", "t2mlr_gpt2", "t2mlr_interval", "rlt1", "rlt2", "rlt_groups")
for_each_subject = pytest.mark.parametrize("subject", FEW)


@for_each_subject
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 20])
def test_exact_on_one_chunk_more_with_each_sweep(subject: str, chunk_size: int) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    exact = model(ids, solver=cc.Sequential()).logits
    for sweeps in range(1, -(-T // chunk_size) + 1):
        output = model(ids, solver=cc.Sweeps(chunk_size, sweeps))
        known = min(sweeps * chunk_size, T)
        assert largest_difference(output.logits[:, :known], exact[:, :known]) < 1e-11
        assert output.solver_report.exact is (known == T)
        assert output.solver_report.iterations == sweeps + 1
    again = model(ids, solver=cc.Sweeps(chunk_size, 99))
    assert again.solver_report.iterations == -(-T // chunk_size) + 1  # and no more than are needed


def test_one_sweep_of_chunks_of_one_is_a_jacobi_pass() -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, T)
    sweep, jacobi = (model(ids, solver=solver) for solver in (cc.Sweeps(1, 3), cc.Jacobi(4, 1)))
    assert largest_difference(sweep.logits, jacobi.logits) < 1e-12
    assert largest_difference(sweep.solver_report.residuals, jacobi.solver_report.residuals) < 1e-6
    labelled = [model(ids, labels=ids, solver=solver).loss for solver in (cc.Sweeps(1, 3), cc.Jacobi(4, 1))]
    assert largest_difference(*(gradients(model, loss) for loss in labelled)) < 1e-11


class Mean(RunningMean):
    can_be_split = True

    def by_columns(self, past: None, first: int) -> "MeanColumns":
        assert first == 0
        return MeanColumns()


class MeanColumns:
    """The same by columns; a loop over what is newest."""

    def __init__(self) -> None:
        self.entries = torch.zeros(0)

    def run(self, z: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        if self.entries.numel() == 0:
            self.entries = z.clone()
        self.entries[:, columns] = z
        return torch.stack([torch.tanh(self.entries[:, : t + 1].mean(dim=1)) for t in columns.tolist()], dim=1)


def test_against_the_steps_by_hand() -> None:
    from crosscurrent.recurrence import GatedFusion, NormalizedSum, Problem, RecurrentState, Schedule, Tokens
    from tests.subjects import moved

    fuse, carry = moved(GatedFusion(4)), moved(NormalizedSum(4))
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    labels, recurrent = torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.bool)
    state = RecurrentState.start(fuse.initial_state(2))
    problem = Problem(x, Schedule(1).plan(Tokens(labels, recurrent), state), state, fuse, Mean(), carry)
    solution = cc.Sweeps(chunk_size=3, sweeps=2).solve(problem)

    def read(states: torch.Tensor, t: int) -> torch.Tensor:
        return states[:, t - 1] if t else torch.zeros_like(states[:, 0])

    z = x.clone()
    states = carry.norm(torch.tanh(z.cumsum(1) / torch.arange(1, 8)[:, None]))
    for _ in range(2):
        for offset in range(3):
            known, newest = states.clone(), z.clone()
            for t in range(offset, 7, 3):
                newest[:, t] = fuse(x[:, t : t + 1], read(known, t)[:, None])[:, 0]
            for t in range(offset, 7, 3):
                states[:, t] = carry.norm(torch.tanh(newest[:, : t + 1].mean(dim=1)) + read(known, t))
            z = newest
    shifted = torch.stack([read(states, t) for t in range(7)], dim=1)
    y, _ = Mean().run(fuse(x, shifted), slice(None), None)
    assert largest_difference(solution.outputs, y) < 1e-13
    assert largest_difference(solution.state.register, carry.norm(y + shifted)[:, -1]) < 1e-13


def test_errors_and_residuals_fall_faster_than_by_passes() -> None:
    model, ids = make_gated(0.1), token_ids(2, 24)
    exact = model(ids, solver=cc.Sequential()).logits
    errors = [largest_difference(model(ids, solver=cc.Sweeps(4, m)).logits, exact) for m in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    passes = [largest_difference(model(ids, solver=cc.Jacobi(m + 1, 1)).logits, exact) for m in (1, 2, 3)]
    assert errors[0] < passes[0] and errors[1] < 0.1 * passes[1] and errors[2] < 0.05 * passes[2]
    tolerant = model(ids, solver=cc.Sweeps(4, 6, tolerance=1e-2)).solver_report
    assert tolerant.converged is True and tolerant.iterations < 7 and not tolerant.exact
    residuals = tolerant.residuals
    assert bool((residuals[1:] < residuals[:-1]).all())


@for_each_subject
def test_behind_a_prompt_and_after_an_earlier_call(subject: str) -> None:
    """Few sweeps, so that all but the first chunks are rough: the same numbers whichever way they were cut."""
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    recurrent = torch.ones_like(ids)
    recurrent[:, :5] = 0
    solver, exact = cc.Sweeps(2, 2), cc.Sequential()
    whole = model(ids, recurrent_mask=recurrent, solver=solver, use_cache=True)
    cache = cache_of(model(ids[:, :5], recurrent_mask=recurrent[:, :5], solver=exact, use_cache=True))
    after = model(ids[:, 5:], recurrent_mask=recurrent[:, 5:], solver=solver, cache=cache)
    assert largest_difference(whole.logits[:, 5:], after.logits) < 1e-11
    following = [model(token_ids(2, 2), cache=cache_of(output), solver=exact).logits for output in (whole, after)]
    assert largest_difference(*following) < 1e-11
    if model.config.feedback_interval == 1:
        assert largest_difference(whole.logits, model(ids, recurrent_mask=recurrent, solver=exact).logits) > 1e-6


def test_hidden_states_are_those_of_the_last_pass() -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, T)
    found = [
        model(ids, solver=solver, output_hidden_states=True).hidden_states
        for solver in (cc.Sweeps(4, 9), cc.Sequential())
    ]
    assert largest_difference(*found) < 1e-11


def test_each_sweep_costs_one_pass_of_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    inner = DecoderColumns.run

    def counted(core: Any, z: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        runs.append(z.shape[1])
        return inner(core, z, columns)

    monkeypatch.setattr(DecoderColumns, "run", counted)
    make_rlt()(token_ids(2, T), solver=cc.Sweeps(4, 2))
    assert runs == [T] + 2 * [3, 3, 3, 2]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_t2mlr("llama").train(), token_ids(1, T)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient checkpointing drops .* cc\.Jacobi"):
        model(ids, solver=cc.Sweeps(2, 1))
    model.gradient_checkpointing_disable()
    monkeypatch.setattr(LayerRange, "can_be_split", False)  # as with flash or flex attention
    with pytest.raises(ValueError, match=r"cc\.Sweeps needs"):
        model(ids, solver=cc.Sweeps(2, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"sweeps": 1.5}, r"sweeps=1\.5"),
        ({"tolerance": -1}, "tolerance=-1"),
        ({"on_nonconvergence": "raise"}, "needs a tolerance"),
        ({"gradient": None}, "gradient=None"),
    ],
    ids=str,
)
def test_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cc.Sweeps(**settings)
