"""One token without a solver is what each solver makes of it."""

import copy
from typing import Any

import pytest
import torch

from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import SUBJECTS, exact_solvers, token_ids


@pytest.mark.parametrize("subject", SUBJECTS)
def test_one_token_without_a_solver_is_what_each_solver_gives(subject: str) -> None:
    """With gradients on the solver runs, without it does not. Rows: in a document, beginning, padded, not recurrent."""
    model: Any = SUBJECTS[subject]()
    begun: Any = model.new_cache()
    begun.activate_past_recording()
    mask = torch.tensor([[1] * 4, [0] * 4, [0, 1, 1, 1], [1] * 4])
    with torch.no_grad():
        model(token_ids(4, 4), **{CACHE_NAME: begun}, attention_mask=mask)
    plain: Any = model.new_cache()
    plain.activate_past_recording()
    with torch.no_grad():
        model(token_ids(4, 4), **{CACHE_NAME: plain})
    requests: dict[str, dict[str, Any]] = {
        "mixed": {
            CACHE_NAME: begun,
            "attention_mask": torch.tensor([[1], [1], [0], [1]]),
            "recurrent_mask": torch.tensor([[1], [1], [1], [0]]),
        },
        "another document": {CACHE_NAME: plain, "segment_ids": torch.tensor([[0], [1], [1], [0]])},
        "plain": {CACHE_NAME: plain},
        "plain, with a mask": {CACHE_NAME: plain, "attention_mask": torch.ones(4, 5)},
        "first": {},
    }
    for solver_name, solver in exact_solvers(1).items():
        for name, request in requests.items():
            found = {}
            for has_gradient in (False, True):
                with torch.set_grad_enabled(has_gradient):
                    given = request | {CACHE_NAME: copy.deepcopy(request.get(CACHE_NAME))}
                    found[has_gradient] = model(token_ids(4, 1, seed=7), use_cache=True, solver=solver, **given)
            short, whole = found[False], found[True]
            left, right = getattr(short, CACHE_NAME), getattr(whole, CACHE_NAME)
            assert torch.equal(short.logits, whole.logits), (solver_name, name)
            for part in ("register", "num_tokens", "segment"):
                assert torch.equal(getattr(left.state, part), getattr(right.state, part)), (solver_name, name, part)
            assert torch.equal(left.key_labels, right.key_labels) and left.is_plain == right.is_plain, (
                solver_name,
                name,
            )
            if left.registers is not None:
                assert torch.equal(left.registers, right.registers), (solver_name, name)
            facts = [
                (r.solver, r.iterations, r.exact, r.converged, len(r.residuals))
                for r in (short.solver_report, whole.solver_report)
            ]
            assert facts[0] == facts[1] and facts[0][0] == solver.name
