"""Half precision: forward, generation and caching within rounding, for the models' own dtype and under autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent as cc
from tests.subjects import SUBJECTS, VOCAB, cache_of, largest_difference, token_ids

NAMES = ["t2mlr_llama", "t2mlr_gemma3", "t2mlr_interval", "rlt2"]
for_some_subjects = pytest.mark.parametrize("subject", NAMES)
for_half_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
T = 12
# How far apart two orders of the same arithmetic may be, in units of the largest logit: a few rounding errors.
ROUNDINGS = {torch.bfloat16: 16 * 2**-8, torch.float16: 16 * 2**-11}


def tame(subject: str, dtype: torch.dtype) -> Any:
    """A model whose logits are of order 1 and whose gates are open."""
    model = SUBJECTS[subject]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    return model.to(dtype)


def relative_difference(left: Tensor, right: Tensor) -> float:
    return largest_difference(left.double(), right.double()) / right.double().abs().max().item()


def read_in_parts(model: Any, ids: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Any]:
    cache: Any = None
    logits = []
    for part in ids.split(list(sizes), dim=1):
        output = model(part, cache=cache, use_cache=True, solver=cc.Sequential())
        cache = cache_of(output)
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


@for_some_subjects
@for_half_precision
def test_forward_and_cache_within_rounding(subject: str, dtype: torch.dtype) -> None:
    ids = token_ids(2, T)
    model, precise = tame(subject, dtype), tame(subject, dtype).double()  # with the same, rounded, weights
    with torch.no_grad():
        expected = precise(ids, solver=cc.Sequential()).logits
        without = precise(ids, recurrent_mask=torch.zeros_like(ids)).logits
        assert relative_difference(without, expected) > 2 * ROUNDINGS[dtype]  # a lost state would show
        for solver in (cc.Sequential(), cc.Jacobi(iterations=T)):
            found = model(ids, solver=solver, use_cache=True)
            assert found.logits.dtype == dtype and bool(torch.isfinite(found.logits).all())
            assert relative_difference(found.logits, expected) < ROUNDINGS[dtype]
        for sizes in ((T - 1, 1), (5, 4, 3), (1,) * T):
            logits, cache = read_in_parts(model, ids, sizes)
            assert relative_difference(logits, found.logits) < ROUNDINGS[dtype]
            assert relative_difference(cache.state.register, cache_of(found).state.register) < ROUNDINGS[dtype]


@for_some_subjects
@for_half_precision
def test_padding_within_rounding(subject: str, dtype: torch.dtype) -> None:
    model, rows = tame(subject, dtype), [token_ids(1, length, seed=length) for length in (4, 9)]
    ids = torch.cat([torch.nn.functional.pad(rows[0], (5, 0)), rows[1]])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        together = model(ids, attention_mask=mask, solver=cc.Sequential()).logits
        for index, row in enumerate(rows):
            alone = model(row, solver=cc.Sequential()).logits[0]
            assert relative_difference(together[index, -row.shape[1] :], alone) < ROUNDINGS[dtype]


@for_some_subjects
@for_half_precision
def test_generation_is_greedy_within_rounding(subject: str, dtype: torch.dtype) -> None:
    """Each token generated from the cache is the best one of a whole forward pass, or as good within rounding."""
    model, ids = tame(subject, dtype), token_ids(2, 5)
    said = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0, solver=cc.Sequential())
    with torch.no_grad():
        logits = model(said, solver=cc.Sequential()).logits[:, 4:-1].double()
    chosen = logits.gather(2, said[:, 5:, None])[..., 0]
    assert (logits.max(dim=-1).values - chosen).max().item() < ROUNDINGS[dtype] * logits.abs().max().item()
    beams = model.generate(ids, num_beams=3, max_new_tokens=4, pad_token_id=0)
    assert beams.shape == (2, 9) and bool((beams < VOCAB).all())


@for_some_subjects
@for_half_precision
def test_training_step_is_finite(subject: str, dtype: torch.dtype) -> None:
    model, ids = tame(subject, dtype).train(), token_ids(2, T)
    loss = model(ids, labels=ids, solver=cc.Jacobi(iterations=4, backward_iterations=2)).loss
    assert loss.dtype == torch.float32  # the loss is computed wider than the logits
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@for_some_subjects
def test_autocast_with_a_cache(subject: str) -> None:
    """float32 weights, bf16 arithmetic: what is read from a cache made under autocast is what is read at once."""
    model, ids = tame(subject, torch.float32), token_ids(2, T)
    allowed = ROUNDINGS[torch.bfloat16]
    with torch.no_grad():
        expected = model(ids, solver=cc.Sequential()).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole = model(ids, solver=cc.Sequential(), use_cache=True)
            parts, cache = read_in_parts(model, ids, (5, 4, 1, 1, 1))
            said = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0, solver=cc.Sequential())
            again = model.generate(
                ids, do_sample=False, max_new_tokens=6, pad_token_id=0, solver=cc.Sequential(), use_cache=False
            )
    assert relative_difference(whole.logits, expected) < allowed
    assert relative_difference(parts, whole.logits) < allowed
    assert relative_difference(cache.state.register, cache_of(whole).state.register) < allowed
    assert said.shape == again.shape == (2, T + 6)
    with torch.no_grad():  # a cache made under autocast, continued without
        after = model(token_ids(2, 1, seed=9), cache=cache).logits
        direct = model(torch.cat([ids, token_ids(2, 1, seed=9)], dim=1), solver=cc.Sequential()).logits[:, -1:]
    assert relative_difference(after, direct) < allowed


@for_some_subjects
def test_autocast_gradients(subject: str) -> None:
    model, ids = tame(subject, torch.float32).train(), token_ids(2, T)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = model(ids, labels=ids, solver=cc.Jacobi(iterations=T, backward_iterations=T)).loss
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append(torch.cat(gradients))
        assert found[-1].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found[0], found[1], dim=0) > 0.99
