"""The scan along the tokens against a loop, and what it is for: fewer passes."""

from typing import Any

import pytest
import torch

import crosscurrent as cc
from crosscurrent.recurrence import BoundedSum, NormalizedSum, RecurrentState, Schedule, Tokens
from crosscurrent.recurrence.scan import change_of_reads, linear_scan
from tests.subjects import largest_difference, make_rlt, make_t2mlr, token_ids

pytestmark = pytest.mark.usefixtures("exact_arithmetic")


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 17])
@pytest.mark.parametrize("width", [1, 5])
def test_linear_scan_is_the_loop(num_tokens: int, width: int) -> None:
    decay = torch.randn(2, num_tokens, width, dtype=torch.float64)
    drive = torch.randn(2, num_tokens, 5, dtype=torch.float64)
    decay[0, num_tokens // 2] = 0.0
    expected, h = [], torch.zeros(2, 5, dtype=torch.float64)
    for t in range(num_tokens):
        h = decay[:, t] * h + drive[:, t]
        expected.append(h)
    assert largest_difference(linear_scan(decay, drive), torch.stack(expected, dim=1)) < 1e-12


@pytest.mark.parametrize("interval", [1, 3])
def test_changes_follow_what_is_read(interval: int) -> None:
    """Padding in front, inside and behind, several documents, and a row that continues an earlier call's document."""
    labels = torch.tensor([[-1, -1, 0, 0, -1, 0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4, 5, -1, -1]])
    state = RecurrentState(torch.zeros(2, 3), torch.tensor([0, 5]), torch.tensor([-1, 4]))
    plan = Schedule(interval).plan(Tokens(labels, torch.ones_like(labels, dtype=torch.bool)), state)
    change, decay = torch.randn(2, 11, 3, dtype=torch.float64), torch.rand(2, 11, 1, dtype=torch.float64)
    expected, changes = torch.zeros(2, 11, 3, dtype=torch.float64), torch.zeros(2, 11, 3, dtype=torch.float64)
    for row in range(2):
        for t in range(11):
            source = int(plan.source[row, t])
            if source >= 0:
                expected[row, t] = changes[row, source]
            changes[row, t] = change[row, t] + decay[row, t] * expected[row, t]
    found = change_of_reads(plan, change, decay)
    real = labels != -1
    assert largest_difference(found[real], expected[real]) < 1e-12


@pytest.mark.parametrize(
    "carry", [NormalizedSum(6), BoundedSum(), BoundedSum(bound=1.2, residual_weight=0.4)], ids=repr
)
def test_decay_is_the_slope_with_the_scale_held(carry: Any) -> None:
    y, r = torch.randn(1, 4, 6, dtype=torch.float64) * 3, torch.randn(1, 4, 6, dtype=torch.float64)
    fused = torch.tensor([True, True, False, True])[None, :, None]
    state = carry(y, r, fused)
    decay = carry.decay(y, r, fused, state)
    assert decay.shape == (1, 4, 1) and bool((decay >= 0).all()) and bool((decay <= 1).all())
    weight = getattr(carry, "residual_weight", 1.0)
    assert largest_difference((decay * (y + weight * r))[fused[..., 0]], weight * state[fused[..., 0]]) < 1e-12
    assert not decay[0, 2].any()
    opposed = carry.decay(y, -y / weight * 0.999, fused, carry(y, -y / weight * 0.999, fused))
    assert bool((opposed <= 1).all())  # a recursion that grows would run over in a long row


@pytest.mark.parametrize("bounded", [False, True])
def test_scan_needs_fewer_passes_where_gates_are_small(bounded: bool) -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, 24)
    if bounded:
        model.carry = BoundedSum()
    with torch.no_grad():
        model.fusion.recurrent_scale.fill_(0.05)
        model.fusion.current_scale.fill_(0.05)
    exact = model(ids, solver=cc.Sequential()).logits
    errors = {
        scan: [largest_difference(model(ids, solver=cc.Jacobi(k, 1, scan=scan)).logits, exact) for k in (1, 2, 4)]
        for scan in (False, True)
    }
    assert all(scanned < 0.5 * plain for scanned, plain in zip(errors[True], errors[False], strict=True))
    assert errors[True] == sorted(errors[True], reverse=True)
    tolerant: dict[str, Any] = {"solver": cc.Jacobi(24, 1, tolerance=1e-3)}
    plain = model(ids, **tolerant).solver_report.iterations
    assert model(ids, solver=cc.Jacobi(24, 1, tolerance=1e-3, scan=True)).solver_report.iterations < plain


@pytest.mark.parametrize("guess", ["pass", "inputs"])
def test_scan_is_exact_no_later(guess: Any) -> None:
    """Whatever the scan does behind them, the first k tokens are exact after k passes: also with wide-open gates."""
    model, ids = make_t2mlr("llama"), token_ids(2, 9)
    exact = model(ids, solver=cc.Sequential()).logits
    for passes in range(1, 10):
        found = model(ids, solver=cc.Jacobi(passes, 1, scan=True, guess=guess)).logits
        assert largest_difference(found[:, :passes], exact[:, :passes]) < 1e-11


def test_long_rows_stay_finite() -> None:
    """The scan itself is bounded: each state takes over at most all of a change, never more."""
    model, ids = make_t2mlr("llama").float(), token_ids(1, 60)
    with torch.no_grad():
        model.layers[2].mlp.down_proj.weight.zero_()
        model.layers[1].mlp.down_proj.weight.zero_()
    assert torch.isfinite(model(ids, solver=cc.Jacobi(4, 2, scan=True)).logits).all()


def test_nothing_to_scan_warns() -> None:
    model, ids = make_rlt(), token_ids(1, 5)
    with pytest.warns(UserWarning, match="scan=True has no effect: the carry LastOutput"):
        scanned = model(ids, solver=cc.Jacobi(3, 1, scan=True))
    assert torch.equal(scanned.logits, model(ids, solver=cc.Jacobi(3, 1)).logits)
