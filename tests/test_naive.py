"""The models against both systems written out token by token."""

from typing import Any

import pytest
import torch

import crosscurrent as cc
from tests.naive import NaiveRLT, naive_t2mlr
from tests.subjects import RLTS, T2MLR_BASES, largest_difference, make_rlt, make_t2mlr, token_ids

pytestmark = pytest.mark.usefixtures("exact_arithmetic")


@pytest.mark.parametrize("changes", [*RLTS.values(), {"sliding_window": 5, "num_decoder_layers": 3}], ids=str)
def test_rlt(changes: dict[str, Any]) -> None:
    model, ids = make_rlt(**changes), token_ids(1, 11)
    for recurrent in ([True] * 11, [True, False, True, True, False, False, True, True, True, False, True]):
        got = model(ids, recurrent_mask=torch.tensor([recurrent])).logits[0]
        assert largest_difference(got, NaiveRLT(model)(ids[0].tolist(), recurrent)) < 1e-11


@pytest.mark.parametrize("base_name", T2MLR_BASES)
@pytest.mark.parametrize("pattern", ["111111111", "011111111", "000011111", "110100101"])
def test_t2mlr(base_name: str, pattern: str) -> None:
    """Tokens that are not recurrent (0) leave a state for the next one all the same."""
    model, ids = make_t2mlr(base_name), token_ids(1, 9)
    recurrent = [mark == "1" for mark in pattern]
    expected = naive_t2mlr(model, ids, recurrent)
    for solver in (cc.Sequential(), cc.Jacobi(9, 9)):
        got = model(ids, recurrent_mask=torch.tensor([recurrent]), solver=solver).logits[0]
        assert largest_difference(got, expected) < 1e-11
