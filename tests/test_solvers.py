"""Reports, tolerances and what happens when a solver does not converge."""

import json
from typing import Any

import pytest
import torch

import crosscurrent as cc
from crosscurrent.recurrence import (
    SOLVERS,
    BoundedSum,
    GatedFusion,
    NormalizedSum,
    Problem,
    RecurrentState,
    Schedule,
    Tokens,
    as_solver,
    solver_from_dict,
    solver_to_dict,
)
from tests.subjects import (
    RunningMean,
    gradients,
    largest_difference,
    make_gated,
    make_rlt,
    make_t2mlr,
    moved,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("exact_arithmetic")


def test_residuals_fall_and_tell_the_error() -> None:
    model, ids = make_gated(0.05), token_ids(2, 24)
    exact = model(ids, solver=cc.Sequential()).logits
    report = model(ids, solver=cc.Jacobi(12, 1)).solver_report
    assert report.solver == "jacobi" and report.iterations == 12 and report.residuals.shape == (12,)
    assert bool((report.residuals[1:] < report.residuals[:-1]).all())
    errors = [largest_difference(model(ids, solver=cc.Jacobi(k, 1)).logits, exact) for k in (1, 4, 8, 12)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3 * errors[0]


def test_tolerance_stops_early_but_keeps_the_gradient() -> None:
    model, ids = make_gated(0.05), token_ids(2, 24)
    loose = cc.Jacobi(iterations=20, backward_iterations=2, tolerance=1e-2)
    output = model(ids, labels=ids, solver=loose, use_cache=False)
    assert output.solver_report.iterations < 10 and output.solver_report.converged is True
    assert not output.solver_report.exact
    found = gradients(model, output.loss)
    full = gradients(model, model(ids, labels=ids, solver=cc.Jacobi(24, 24), use_cache=False).loss)
    for name in ("fusion.recurrent_projection.weight", "carry.norm.weight"):
        cosine = torch.cosine_similarity(found[name].flatten(), full[name].flatten(), dim=0)
        assert cosine > 0.95, (name, cosine)
    very_loose = cc.Jacobi(iterations=20, backward_iterations=1, tolerance=1e6)
    assert model(ids, labels=ids, solver=very_loose, use_cache=False).loss.requires_grad


def test_same_numbers_with_and_without_gradients_and_in_either_mode() -> None:
    model, ids = make_gated(0.05), token_ids(2, 12)
    solver = cc.Jacobi(5, 2)
    with_gradient = model(ids, solver=solver).logits
    with torch.no_grad():
        assert torch.equal(model(ids, solver=solver).logits, with_gradient)
    assert torch.equal(model.train()(ids, solver=solver).logits, with_gradient)


def test_nonconvergence_is_answered_as_chosen() -> None:
    model, ids = make_t2mlr("llama"), token_ids(1, 12)
    settings: Any = {"iterations": 2, "backward_iterations": 1, "tolerance": 1e-9}
    recorded = model(ids, solver=cc.Jacobi(**settings)).solver_report
    assert recorded.converged is False and recorded.iterations == 2
    with pytest.raises(cc.ConvergenceError, match="did not converge in 2 iterations"):
        model(ids, solver=cc.Jacobi(**settings, on_nonconvergence="raise"))
    with pytest.warns(UserWarning, match="did not converge"):
        model(ids, solver=cc.Jacobi(**settings, on_nonconvergence="warn"))


def test_no_more_passes_than_there_are_stages() -> None:
    model, ids = make_rlt(feedback_interval=5), token_ids(1, 11)
    report = model(ids, solver=cc.Jacobi(16, 4)).solver_report
    assert report.iterations == 3 and report.exact and report.converged is True
    one = model(ids[:, :1], solver=cc.Jacobi(16, 4)).solver_report
    assert one.iterations == 1 and one.exact and one.residuals.numel() == 0
    unread = model(ids, recurrent_mask=torch.zeros_like(ids), solver=cc.Jacobi(16, 4)).solver_report
    assert unread.iterations == 1 and unread.exact


@pytest.mark.parametrize("backward", [1, 2, 3])
def test_jacobi_against_iterating_by_hand(backward: int) -> None:
    """Values, residuals and gradients with fewer iterations than tokens: first guess, counting, the last K passes."""
    fuse, carry = moved(GatedFusion(4)), moved(NormalizedSum(4))
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.zeros(2, 7, dtype=torch.int64)
    recurrent = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    state = RecurrentState.start(fuse.initial_state(2))
    problem = Problem(x, Schedule(1).plan(Tokens(labels, recurrent), state), state, fuse, RunningMean(), carry)
    solution = cc.Jacobi(iterations=3, backward_iterations=backward).solve(problem)

    core, mask, zero = RunningMean(), recurrent[..., None], torch.zeros(2, 1, 4, dtype=torch.float64)
    y, read = core.run(x, slice(None), None)[0].detach(), torch.zeros(2, 7, 4, dtype=torch.float64)
    states, residuals = carry.norm(y), []
    for iteration in range(3):
        if iteration < 3 - backward:
            states = states.detach()
        elif iteration == 3 - backward:  # the last constant outputs, through a differentiable carry
            states = carry.norm(y.detach() + read.detach() * (mask if iteration else 0))
        read = torch.cat([zero, states[:, :-1]], dim=1)
        y = core.run(torch.where(mask, fuse(x, read), x), slice(None), None)[0]
        new = carry.norm(y + read * mask)
        change = (new - states).flatten(1).norm(dim=1) / new.flatten(1).norm(dim=1)
        residuals.append(change.max().item())
        states = new

    assert largest_difference(solution.outputs, y) < 1e-13
    assert largest_difference(solution.state.register, states[:, -1]) < 1e-13
    assert largest_difference(solution.report.residuals.double(), torch.tensor(residuals).double()) < 1e-6
    parameters = [x, *fuse.parameters(), *carry.parameters()]
    found, expected = (
        torch.autograd.grad(outputs.square().sum() + register.sum(), parameters)
        for outputs, register in ((solution.outputs, solution.state.register), (y, states[:, -1]))
    )
    assert largest_difference(found, expected) < 1e-12


def test_last_k_iterations_carry_gradient() -> None:
    """Gradients differ with K, and grow towards full back-propagation."""
    model, ids = make_gated(0.05), token_ids(1, 12)
    full = gradients(model, model(ids, labels=ids, solver=cc.Sequential(), use_cache=False).loss)
    name = "fusion.recurrent_projection.weight"
    errors = []
    for backward in (1, 2, 4, 12):
        solver = cc.Jacobi(12, backward)
        found = gradients(model, model(ids, labels=ids, solver=solver, use_cache=False).loss)
        errors.append(largest_difference(found[name], full[name]))
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[1] > errors[2] > 1e-9 and errors[-1] < 1e-12


@pytest.mark.parametrize(
    "solver",
    [
        cc.Sequential(truncate=7),
        cc.Jacobi(9, 3, tolerance=1e-3, on_nonconvergence="warn"),
        cc.Sweeps(chunk_size=2, sweeps=1, gradient=cc.Implicit(1), tolerance=1e-2, on_nonconvergence="raise"),
        cc.Jacobi(3, gradient=cc.Implicit(iterations=1, tolerance=1e-2), scan=True, guess="inputs"),
    ],
    ids=repr,
)
def test_solvers_survive_the_configuration(solver: cc.Jacobi | cc.Sequential) -> None:
    stored = json.loads(json.dumps(solver_to_dict(solver)))
    assert solver_from_dict(stored) == solver and as_solver(stored) == solver
    assert set(SOLVERS) == {"sequential", "jacobi", "sweeps"}
    assert make_rlt(solver=solver).config.solver == solver_to_dict(solver)


def test_the_configured_solver_is_used_unless_another_is_asked_for() -> None:
    model, ids = make_t2mlr("llama", solver=cc.Jacobi(2, 1)), token_ids(1, 9)
    for mode in (True, False):
        model.train(mode)
        assert model(ids).solver_report.iterations == 2
        assert model(ids, solver=cc.Sequential()).solver_report.solver == "sequential"


def test_the_factor_of_a_bounded_sum_is_a_constant_to_the_gradient() -> None:
    carry = BoundedSum(bound=2.0, residual_weight=0.5)
    y, r = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(1, 3, 4, dtype=torch.float64)
    fused = torch.tensor([[[True], [True], [False]]])
    total = y + 0.5 * r
    factor = (total.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt().clamp(0.5, 2.0).detach()
    expected = torch.where(fused, total * factor, y)
    found = carry(y, r, fused)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    gradient, constant = (torch.autograd.grad((out * weights).sum(), y)[0] for out in (found, expected))
    assert torch.equal(gradient, constant)
