"""Gradients that are put off until all steps have run: the same as step by step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.rlt import decoder
from crosscurrent.models.rlt.layer_step import LayerStep
from crosscurrent.recurrence import steps
from tests.subjects import SUBJECTS, cache_of, gradients, largest_difference, make_rlt, token_ids

RLTS = ["rlt1", "rlt2", "rlt_encoder_window", "rlt_memory_window", "rlt_groups", "rlt_no_decoder", "rlt_tied"]
DEFERRING = [*RLTS, "t2mlr_interval", "t2mlr_llama"]
for_deferring = pytest.mark.parametrize("subject", DEFERRING)
EXACT = cc.Sequential()


@contextmanager
def step_by_step() -> Iterator[None]:
    """Nothing is steps."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (steps, decoder):
            patch.setattr(module, "current_steps", lambda: None)
        yield


def padded_batch() -> dict[str, Tensor]:
    ids = token_ids(3, 11)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    segments = torch.tensor([[0] * 11, [0] * 11, [0] * 5 + [1] * 6])
    return {"input_ids": ids, "labels": ids, "attention_mask": mask, "segment_ids": segments}


@for_deferring
@pytest.mark.parametrize("truncate", [None, 4])
@pytest.mark.parametrize("most_rows", [4096, 7])
def test_same_loss_and_gradients(
    subject: str, truncate: int | None, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_MOST_ROWS", most_rows)
    model, solver = SUBJECTS[subject]().train(), cc.Sequential(truncate=truncate)
    loss = model(**padded_batch(), solver=solver).loss
    found = gradients(model, loss)
    with step_by_step():
        plain_loss = model(**padded_batch(), solver=solver).loss
        expected = gradients(model, plain_loss)
    assert largest_difference(loss, plain_loss) < 1e-13
    for name, gradient in expected.items():
        assert largest_difference(found[name], gradient) < 1e-13 * max(1.0, gradient.abs().max().item()), name


def test_it_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product per weight, not one per step."""
    taken = []
    total = steps._Factors.total

    def counting(self: Any) -> Any:
        taken.append(len(self._inputs))
        return total(self)

    monkeypatch.setattr(steps._Factors, "total", counting)
    model, ids = make_rlt().train(), token_ids(2, 9)
    model(ids, labels=ids).loss.backward()
    # Per layer: q, k, v together; o; q and o of the memory; gate and up together; down. In the merge: the gate's
    # side of the state, and the projection.
    assert taken == [9] * (2 * 6 + 2)


@for_deferring
def test_a_graph_can_be_used_twice_and_in_part(subject: str) -> None:
    model, ids = SUBJECTS[subject]().train(), token_ids(2, 6)
    loss = model(ids, labels=ids, solver=EXACT).loss
    weight = next(p for name, p in model.named_parameters() if name.startswith(("fusion.", "model.merge.")))
    (alone,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    assert largest_difference(alone, first) < 1e-14
    loss.backward()
    assert largest_difference(weight.grad, 2 * first) < 1e-13


def test_frozen_weights_get_none_and_pass_gradients_on() -> None:
    model, ids = make_rlt().train(), token_ids(2, 6)
    expected = gradients(model, model(ids, labels=ids).loss)
    model.model.decoder.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    model.model.decoder.layers[1].mlp.down_proj.weight.requires_grad_(False)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) != parameter.requires_grad, name
        if parameter.grad is not None:
            assert largest_difference(parameter.grad, expected[name]) < 1e-13, name


@for_deferring
def test_under_autocast(subject: str) -> None:
    model, ids = SUBJECTS[subject]().float().train(), token_ids(2, 8)

    def measured() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, solver=EXACT).loss
        return gradients(model, loss)

    found = measured()
    with step_by_step():
        expected = measured()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        assert largest_difference(found[name], gradient) <= 0.1 * gradient.abs().max().item() + 1e-4, name


def test_adapters_take_the_place_of_layers() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(make_rlt().train(), LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"]))
    ids = token_ids(2, 6)
    loss = model(input_ids=ids, labels=ids).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained)
    with step_by_step():
        expected = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, trained)
    assert all(largest_difference(a, b) < 1e-13 for a, b in zip(found, expected, strict=True))


def test_nothing_is_deferred_without_gradients_or_beyond_a_call() -> None:
    model, ids = make_rlt(), token_ids(1, 5)
    with torch.no_grad():
        expected = model(ids).logits
    assert largest_difference(model(ids).logits, expected) < 1e-13
    assert steps.current_steps() is None


@for_deferring
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_recomputing_changes_no_bit(subject: str, dtype: torch.dtype) -> None:
    model = SUBJECTS[subject]().to(dtype)
    for truncate, use_cache in ((None, False), (5, False), (None, True)):
        found = []
        for recompute_every in (None, 4, 1):
            solver = cc.Sequential(truncate=truncate, recompute_every=recompute_every)
            loss = model(**padded_batch(), solver=solver, use_cache=use_cache).loss
            found.append((loss, gradients(model, loss)))
        for loss, others in found[1:]:
            assert torch.equal(loss, found[0][0])
            assert all(torch.equal(others[name], gradient) for name, gradient in found[0][1].items())


def test_recomputing_keeps_less() -> None:
    """Of 64 columns in segments of 8, what the backward pass will need is kept for about one segment at a time."""
    model, ids = make_rlt(num_encoder_layers=1, hidden_size=32).train(), token_ids(2, 64)

    def bytes_kept(solver: cc.Sequential) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, labels=ids, solver=solver)
        return sum(kept.values())

    assert bytes_kept(cc.Sequential(recompute_every=8)) < 0.5 * bytes_kept(cc.Sequential())


@pytest.mark.parametrize("subject", RLTS)
@pytest.mark.parametrize("is_autocast", [False, True], ids=["float32", "autocast"])
def test_weights_in_another_order(subject: str, is_autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reordered for oneDNN's kernels, in float32 and under bfloat16 autocast, weights give what they give as they are.

    Processors without bfloat16 instructions keep the order there.
    """
    monkeypatch.setattr(steps, "_FEWEST_ELEMENTS", 1)
    reordered: list[bool] = []
    ordered = steps._ordered

    def counting(*args: Any) -> Tensor:
        found = ordered(*args)
        reordered.append(found.is_mkldnn)
        return found

    monkeypatch.setattr(steps, "_ordered", counting)
    model, batch = SUBJECTS[subject]().float().train(), padded_batch()

    def measured() -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = model(**batch, solver=EXACT).loss
        return loss, gradients(model, loss)

    loss, found = measured()
    is_reordered = not is_autocast or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert reordered and set(reordered) == {is_reordered}
    with step_by_step():
        expected_loss, expected = measured()
    tolerance = 0.1 if is_autocast else 1e-4
    assert abs(loss - expected_loss) < tolerance
    for name, gradient in expected.items():
        assert largest_difference(found[name], gradient) < tolerance * max(gradient.abs().max().item(), 1e-2), name


def test_decoding_with_fixed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `fixed_weights` single tokens share reordered weights; outside, whatever has become of the model counts."""
    monkeypatch.setattr(steps, "_FEWEST_ELEMENTS", 1)
    model, ids = make_rlt().float(), token_ids(2, 9)

    @torch.no_grad()
    def decoded() -> Tensor:
        cache: Any = None
        logits = []
        for token in ids.split(1, dim=1):
            output = model(token, use_cache=True, **{CACHE_NAME: cache})
            cache = cache_of(output)
            logits.append(output.logits)
        return torch.cat(logits, dim=1)

    plain = decoded()
    with cc.fixed_weights():
        assert not torch.equal(decoded(), plain) and largest_difference(decoded(), plain) < 1e-4
    model.model.decoder.layers[0].mlp.up_proj.weight.data.mul_(2.0)
    assert largest_difference(decoded(), plain) > 1e-3
    with cc.fixed_weights():
        assert largest_difference(decoded(), model(ids).logits) < 1e-4


@pytest.mark.parametrize("subject", ["rlt1", "rlt_no_decoder", "t2mlr_llama"])
def test_second_derivatives_are_right_or_refused(subject: str) -> None:
    model, ids = SUBJECTS[subject]().train(), token_ids(2, 5)
    weights = list(model.parameters())

    def penalty(solver: Any, **settings: Any) -> Tensor:
        loss = model(ids, labels=ids, solver=solver, **settings).loss
        found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        return torch.stack([gradient.square().sum() for gradient in found if gradient is not None]).sum()

    with pytest.raises(RuntimeError, match="second derivatives"):
        penalty(EXACT)
    if subject.startswith("rlt"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):
            weight = model.model.merge.state_projection.weight
            (found,) = torch.autograd.grad(penalty(cc.Jacobi(5, 5)), weight)
            with torch.no_grad():
                weight[0, 0] += 1e-5
            above = penalty(cc.Jacobi(5, 5)).item()
            with torch.no_grad():
                weight[0, 0] -= 2e-5
            assert abs((above - penalty(cc.Jacobi(5, 5)).item()) / 2e-5 - found[0, 0].item()) < 1e-4


def test_weights_changed_before_the_backward_pass_are_refused() -> None:
    for name in ("mlp.up_proj", "self_attn.q_norm", "memory_layernorm"):
        model, ids = make_rlt().train(), token_ids(2, 5)
        loss = model(ids, labels=ids).loss
        with torch.no_grad():
            model.model.decoder.layers[1].get_submodule(name).weight.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"changed between|modified by an inplace"):
            loss.backward()


def test_other_parameters_of_a_functional_call() -> None:
    model, ids = make_rlt().train(), token_ids(2, 5)
    other = {name: (p.detach() * 1.3 + 0.01).requires_grad_() for name, p in model.named_parameters()}

    def found() -> Any:
        loss = torch.func.functional_call(model, other, (ids,), {"labels": ids}).loss
        return torch.autograd.grad(loss, list(other.values()), allow_unused=True)

    first = found()
    with step_by_step():
        expected = found()
    pairs = [(a, b) for a, b in zip(first, expected, strict=True) if b is not None]
    assert len(pairs) > 20 and all(largest_difference(a, b) < 1e-12 for a, b in pairs)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_are_called(kind: str) -> None:
    for name in ("self_attn.q_proj", "mlp", "memory_layernorm", "self_attn.k_norm"):
        model, ids = make_rlt().train(), token_ids(2, 5)
        calls: list[int] = []
        module = model.model.decoder.layers[0].get_submodule(name)
        getattr(module, f"register_{kind}_hook")(lambda *_, calls=calls: calls.append(1))
        model(ids, labels=ids).loss.backward()
        assert len(calls) == 5, name


def test_norms_with_their_own_epsilon() -> None:
    model, ids = make_rlt().train(), token_ids(2, 5)
    model.model.decoder.layers[0].self_attn.k_norm.eps = 0.5
    fast = model(ids).logits
    with step_by_step():
        assert largest_difference(fast, model(ids).logits) < 1e-13


def test_sixteen_bits_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are written down would be rounded: attention is left to PyTorch's kernels."""
    used: list[Any] = []

    def counting(*args: Any) -> LayerStep:
        used.append(args)
        return LayerStep(*args)

    monkeypatch.setattr(decoder, "LayerStep", counting)
    ids = token_ids(2, 7)
    make_rlt().bfloat16()(ids, solver=EXACT)
    assert not used
    make_rlt().float()(ids, solver=EXACT)
    assert len(used) == 2


@pytest.mark.parametrize("subject", RLTS)
def test_generating_under_autocast(subject: str) -> None:
    model, ids = SUBJECTS[subject]().float().eval(), token_ids(2, 7)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        for truncate in (None, 2):
            solver = cc.Sequential(truncate=truncate)
            model(ids, labels=ids, recurrent_mask=torch.zeros_like(ids), solver=solver, use_cache=False).loss.backward()
    assert tokens.shape == (2, 11)
