"""Reports, tolerances and what happens when a solver does not converge."""

from typing import Any

import pytest
import torch

import crosscurrent as cc
from crosscurrent.recurrence import SOLVERS, solver_from_dict, solver_to_dict
from tests.subjects import gradients, largest_difference, make_rlt, make_t2mlr, token_ids

pytestmark = pytest.mark.usefixtures("exact_arithmetic")


def contracting_model() -> cc.T2MLRForCausalLM:
    model = make_t2mlr("llama")
    with torch.no_grad():
        model.fusion.recurrent_scale.fill_(0.05)
        model.fusion.current_scale.fill_(0.05)
    return model


def test_residuals_fall_and_tell_the_error() -> None:
    model, ids = contracting_model(), token_ids(2, 24)
    exact = model(ids, solver=cc.Sequential()).logits
    report = model(ids, solver=cc.Jacobi(12, 1)).solver_report
    assert report.solver == "jacobi" and report.iterations == 12 and report.residuals.shape == (12,)
    assert bool((report.residuals[1:] < report.residuals[:-1]).all())
    errors = [largest_difference(model(ids, solver=cc.Jacobi(k, 1)).logits, exact) for k in (1, 4, 8, 12)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3 * errors[0]


def test_tolerance_stops_early_but_keeps_the_gradient() -> None:
    model, ids = contracting_model(), token_ids(2, 24)
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
    model, ids = contracting_model(), token_ids(2, 12)
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


def test_last_k_iterations_carry_gradient() -> None:
    """Gradients differ with K, and grow towards full back-propagation."""
    model, ids = contracting_model(), token_ids(1, 12)
    full = gradients(model, model(ids, labels=ids, solver=cc.Sequential(), use_cache=False).loss)
    name = "fusion.recurrent_projection.weight"
    errors = []
    for backward in (1, 2, 4, 12):
        solver = cc.Jacobi(12, backward)
        found = gradients(model, model(ids, labels=ids, solver=solver, use_cache=False).loss)
        errors.append(largest_difference(found[name], full[name]))
    assert errors == sorted(errors, reverse=True) and errors[0] > 1e-8 and errors[-1] < 1e-12


@pytest.mark.parametrize(
    "solver", [cc.Sequential(truncate=7), cc.Jacobi(9, 3, tolerance=1e-3, on_nonconvergence="warn")]
)
def test_solvers_survive_the_configuration(solver: cc.Jacobi | cc.Sequential) -> None:
    assert solver_from_dict(solver_to_dict(solver)) == solver
    assert set(SOLVERS) == {"sequential", "jacobi"}
    assert make_rlt(solver=solver).config.solver == solver_to_dict(solver)


def test_the_configured_solver_is_used_unless_another_is_asked_for() -> None:
    model, ids = make_t2mlr("llama", solver=cc.Jacobi(2, 1)), token_ids(1, 9)
    for mode in (True, False):
        model.train(mode)
        assert model(ids).solver_report.iterations == 2
        assert model(ids, solver=cc.Sequential()).solver_report.solver == "sequential"
