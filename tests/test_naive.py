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
    assert largest_difference(model(ids).logits[0], NaiveRLT(model)(ids[0].tolist())) < 1e-11


@pytest.mark.parametrize("base_name", T2MLR_BASES)
@pytest.mark.parametrize("num_prompt", [0, 1, 4])
def test_t2mlr(base_name: str, num_prompt: int) -> None:
    """Prompt tokens are not recurrent; the last one leaves the first state all the same."""
    model, ids = make_t2mlr(base_name), token_ids(1, 9)
    recurrent = [False] * num_prompt + [True] * (9 - num_prompt)
    got = model(ids, recurrent_mask=torch.tensor([recurrent]), solver=cc.Sequential()).logits[0]
    assert largest_difference(got, naive_t2mlr(model, ids, recurrent)) < 1e-11
