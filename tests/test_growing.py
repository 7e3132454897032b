"""Keys and values written into room for more are what concatenated ones would be, whoever else writes there."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

import crosscurrent as cc
from crosscurrent.models import growing
from crosscurrent.models.cache import branch_layer
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.growing import GrowingLayer
from tests.subjects import SUBJECTS, gradients, largest_difference, token_ids

EXACT = cc.Sequential()
SUBJECT_NAMES = ["rlt1", "rlt2", "rlt_groups", "t2mlr_gemma3", "t2mlr_gpt2", "t2mlr_llama"]


@pytest.fixture(autouse=True)
def room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "FEWEST_ELEMENTS", 0)
    monkeypatch.setattr(growing, "FEWEST_COLUMNS", 4)


def entries(num_columns: int, seed: int, batch_size: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch_size, 3, num_columns, 5, generator=generator) for _ in range(2))  # type: ignore[return-value]


def rows_of(layer: Any, order: list[int]) -> None:
    layer.keys, layer.values = layer.keys[order], layer.values[order]


@torch.no_grad()
def test_the_same_as_concatenated_entries_after_any_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs: list[list[Any]] = [[GrowingLayer(), DynamicLayer()]]
    for step in range(400):
        which = int(torch.randint(len(pairs), (1,), generator=generator))
        operation = int(torch.randint(8, (1,), generator=generator))
        pair = pairs[which]
        num_columns = pair[1].get_seq_length()
        if operation == 0 and len(pairs) < 6:
            pairs.append([branch_layer(layer) for layer in pair])
        elif operation == 1 and num_columns > 3:
            for layer in pair:
                layer.crop(-2)
        elif operation == 2 and num_columns > 0:
            order = torch.randint(2, (2,), generator=generator).tolist()
            for layer in pair:
                rows_of(layer, order)
        elif operation == 3 and num_columns > 40:
            pairs[which] = [GrowingLayer(), DynamicLayer()]
        else:
            new = entries(1 + step % 3, seed=step)
            for found, expected in zip(pair[0].update(*new), pair[1].update(*new), strict=True):
                assert torch.equal(found, expected)
        for layer, reference in pairs:  # what was done to one of them left the others alone
            assert layer.get_seq_length() == reference.get_seq_length()
            if reference.get_seq_length() > 0:
                assert torch.equal(layer.keys, reference.keys) and torch.equal(layer.values, reference.values)


@torch.no_grad()
def test_entries_are_seldom_copied() -> None:
    layer = GrowingLayer()
    places = set()
    for step in range(500):
        keys, _ = layer.update(*entries(1, seed=step))
        places.add(keys.untyped_storage().data_ptr())
        assert keys.untyped_storage().nbytes() <= 4 * 2 * 3 * 5 * (1.5 * (step + 1) + 6)
    assert len(places) <= 16


@torch.no_grad()
def test_a_wider_dtype_and_modes_of_autograd() -> None:
    layer, reference = GrowingLayer(), DynamicLayer()
    for step, dtype in enumerate([torch.float32, torch.float32, torch.float64, torch.float32, torch.float32]):
        new = [part.to(dtype) for part in entries(1, seed=step)]
        with torch.inference_mode(step in (1, 3)):
            found, expected = layer.update(*new)[0].clone(), reference.update(*new)[0]
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("subject", SUBJECT_NAMES)
@torch.no_grad()
def test_copies_of_a_cache_go_on_apart(subject: str) -> None:
    model, ids, other = SUBJECTS[subject](), token_ids(2, 14), token_ids(2, 14, seed=8)
    cache: Any = model.new_cache()
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8)):
        model(ids[:, start:stop], **{CACHE_NAME: cache}, solver=EXACT)
    copies = {"itself": cache, "detached": cache.detach(), "copied": copy.deepcopy(cache), "branch": cache.branch()}
    logits: dict[str, list[Tensor]] = {name: [] for name in copies}
    for t in range(8, 14):  # turn by turn, so that each would overwrite what the one before it wrote
        for name, one in copies.items():
            tokens = (ids if name in ("itself", "copied") else other)[:, t : t + 1]
            logits[name].append(model(tokens, **{CACHE_NAME: one}).logits)
    for name, found in logits.items():
        tail = (ids if name in ("itself", "copied") else other)[:, 8:]
        expected = model(torch.cat([ids[:, :8], tail], dim=1), solver=EXACT).logits[:, 8:]
        assert largest_difference(torch.cat(found, dim=1), expected) < 1e-9, name


@pytest.mark.parametrize("subject", SUBJECT_NAMES)
def test_a_call_that_fails_leaves_the_cache_as_it_was(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 9)
    cache: Any = model.new_cache()
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 7)):
            model(ids[:, start:stop], **{CACHE_NAME: cache}, solver=EXACT)
        with pytest.raises(IndexError):  # raised after all layers have run
            model(token_ids(2, 1, seed=8), **{CACHE_NAME: cache}, logits_to_keep=torch.tensor([7]))
        found = model(ids[:, 7:], **{CACHE_NAME: cache}, solver=EXACT).logits
        expected = model(ids, solver=EXACT).logits[:, 7:]
    assert largest_difference(found, expected) < 1e-9


@pytest.mark.parametrize("subject", SUBJECT_NAMES)
def test_gradients_of_a_call_that_goes_on_from_room(subject: str) -> None:
    """Tokens decoded without gradients, then two calls with: the second reaches into the first through the cache."""
    model, ids = SUBJECTS[subject](), token_ids(2, 12)

    def loss(keeps_room: bool) -> Tensor:
        cache: Any = model.new_cache()
        with torch.no_grad():
            for start, stop in ((0, 5), (5, 6), (6, 7)):
                model(ids[:, start:stop], **{CACHE_NAME: cache}, solver=EXACT)
        cache = cache if keeps_room else copy.deepcopy(cache)
        model(ids[:, 7:10], **{CACHE_NAME: cache}, solver=EXACT)
        with torch.no_grad():
            model(ids[:, 11:], **{CACHE_NAME: cache.branch()})
        return model(ids[:, 10:], **{CACHE_NAME: cache}, solver=EXACT).logits.square().sum()

    found = gradients(model, loss(keeps_room=True))
    for name, expected in gradients(model, loss(keeps_room=False)).items():
        assert torch.equal(found[name], expected), name
