"""How gradients flow through a solution: each rule against full back-propagation through time."""

from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import cache_of, gradients, largest_difference, make_gated, make_rlt, make_t2mlr, token_ids

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

T = 12
SUBJECTS: dict[str, Any] = {
    "t2mlr": lambda: make_t2mlr("llama"),
    "t2mlr_interval": lambda: make_t2mlr("gemma2", feedback_interval=3),
    "rlt1": make_rlt,
    "rlt2": lambda: make_rlt(feedback_interval=3),
}
for_each_subject = pytest.mark.parametrize("subject", SUBJECTS)


def found_by(model: Any, ids: Tensor, solver: Any, **inputs: Any) -> dict[str, Tensor]:
    return gradients(model, model(ids, labels=ids, solver=solver, use_cache=False, **inputs).loss)


def cosine(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    names = [name for name in left if name.startswith(("fusion.", "carry.", "model.layers.1", "model.layers.2"))]
    first, second = (torch.cat([found[name].flatten() for name in names]) for found in (left, right))
    return torch.cosine_similarity(first, second, dim=0).item()


@for_each_subject
@pytest.mark.parametrize("solver", [cc.Jacobi(T, gradient=cc.Implicit(T)), cc.Jacobi(T, gradient=cc.Implicit(T - 1))])
def test_implicit_is_full_back_propagation(subject: str, solver: cc.Jacobi) -> None:
    """With padding, documents and a prompt that is not recurrent; one term less than there are stages is enough."""
    model, ids = SUBJECTS[subject](), token_ids(3, T)
    mask, segments, recurrent = torch.ones(3, T), torch.zeros(3, T, dtype=torch.int64), torch.ones(3, T)
    mask[0, :3], segments[1, 5:], recurrent[2, :4] = 0, 1, 0
    inputs = {"attention_mask": mask, "segment_ids": segments, "recurrent_mask": recurrent}
    exact = found_by(model, ids, cc.Sequential(), **inputs)
    assert largest_difference(found_by(model, ids, solver, **inputs), exact) < 1e-10


@for_each_subject
def test_implicit_reaches_into_an_earlier_call(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    exact, implicit = cc.Sequential(), cc.Jacobi(T, gradient=cc.Implicit(T))
    found = []
    for solver in (exact, implicit):
        cache = cache_of(model(ids[:, :5], solver=solver, use_cache=True))
        middle = model(
            ids[:, 5:8], solver=solver, cache=cache
        )  # no loss of its own: only the state's gradient reaches it
        loss = model(ids[:, 8:], labels=ids[:, 8:], cache=cache_of(middle), solver=solver).loss
        found.append(gradients(model, loss))
    assert largest_difference(*found) < 1e-10


@for_each_subject
def test_too_few_terms_are_too_few(subject: str) -> None:
    """The depth is what it takes: with less the gradient is another one, and each term brings it nearer."""
    model, ids = SUBJECTS[subject](), token_ids(1, T)
    depth = model(ids, solver=cc.Jacobi(T)).solver_report.iterations

    def found(solver: Any) -> dict[str, Tensor]:
        output = model(ids, labels=ids, solver=solver, use_cache=True)
        return gradients(model, output.loss + cache_of(output).state.register.square().sum())

    exact = found(cc.Sequential())
    errors = [
        largest_difference(found(cc.Jacobi(T, gradient=cc.Implicit(terms))), exact)
        for terms in (0, depth - 2, depth - 1)
    ]
    assert errors[0] > errors[1] > 1e-10 > errors[2]


@pytest.mark.parametrize("scan", [False, True])
def test_cosine_improves_with_terms_and_passes(scan: bool) -> None:
    model, ids = make_gated(0.05), token_ids(2, 24)
    full = found_by(model, ids, cc.Sequential())
    for rules in ([cc.Implicit(n) for n in (0, 1, 2, 4)], [cc.LastPasses(n) for n in (1, 2, 3, 5)]):
        losses = [1 - cosine(found_by(model, ids, cc.Jacobi(24, gradient=rule, scan=scan)), full) for rule in rules]
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.05 * losses[0]


def test_scanning_the_adjoint_needs_fewer_terms() -> None:
    model, ids = make_gated(0.05), token_ids(2, 24)
    full = found_by(model, ids, cc.Sequential())
    plain, scanned = (
        1 - cosine(found_by(model, ids, cc.Jacobi(24, gradient=cc.Implicit(1), scan=scan)), full)
        for scan in (False, True)
    )
    assert scanned < 0.5 * plain


def test_a_detached_residual_is_not_scanned_back() -> None:
    model, ids = make_gated(0.05, detach_residual=True), token_ids(2, T)
    full = found_by(model, ids, cc.Sequential())
    assert largest_difference(found_by(model, ids, cc.Jacobi(T, gradient=cc.Implicit(T), scan=True)), full) < 1e-10
    plain, scanned = (found_by(model, ids, cc.Jacobi(T, gradient=cc.Implicit(1), scan=scan)) for scan in (False, True))
    assert largest_difference(plain, scanned) < 1e-10


def test_a_tolerance_ends_the_terms() -> None:
    model, ids = make_gated(0.05), token_ids(2, 24)
    full = found_by(model, ids, cc.Sequential())
    few, loose, tight = (
        found_by(model, ids, cc.Jacobi(24, gradient=gradient))
        for gradient in (cc.Implicit(1), cc.Implicit(24, tolerance=1e9), cc.Implicit(24, tolerance=1e-6))
    )
    assert largest_difference(few, loose) == 0.0
    assert 1e-12 < largest_difference(tight, full) < 1e-6


def test_weights_get_their_gradient_once() -> None:
    """As data-parallel wrappers, which send a gradient when it is there, need it."""
    model, ids = make_gated(0.05), token_ids(2, T)
    counts = dict.fromkeys(dict(model.named_parameters()), 0)

    def counter(name: str) -> Any:
        def count(_: Any) -> None:
            counts[name] += 1

        return count

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(counter(name))
    model(ids, labels=ids, solver=cc.Jacobi(6, gradient=cc.Implicit(5)), use_cache=False).loss.backward()
    assert set(counts.values()) == {1}


def test_memory_does_not_grow_with_iterations_or_terms() -> None:
    model, ids = make_gated(0.05), token_ids(2, T)

    def saved(solver: cc.Jacobi) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, labels=ids, solver=solver, use_cache=False).loss.backward()
        return sum(sizes)

    few, many = saved(cc.Jacobi(2, gradient=cc.Implicit(1))), saved(cc.Jacobi(9, gradient=cc.Implicit(8)))
    assert few == many
    assert saved(cc.Jacobi(9, 2)) > 1.3 * many


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    model, ids = make_gated(0.05, "gpt2").train(), token_ids(2, T)
    solver = cc.Jacobi(4, gradient=cc.Implicit(3))
    without = found_by(model, ids, solver)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            model(ids, labels=ids, solver=solver).loss.backward()
        return
    assert largest_difference(found_by(model, ids, solver), without) == 0.0


def test_autocast() -> None:
    model, ids = make_gated(0.05).float(), token_ids(2, T)
    exact = found_by(model, ids, cc.Jacobi(T, gradient=cc.Implicit(T)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, solver=cc.Jacobi(T, gradient=cc.Implicit(T), scan=True), use_cache=False).loss
    assert cosine(gradients(model, loss), exact) > 0.999


def test_second_derivatives_are_refused() -> None:
    model, ids = make_gated(0.05), token_ids(1, T)
    model.set_attn_implementation("eager")  # the others have no second derivative anyway
    loss = model(ids, labels=ids, solver=cc.Jacobi(4, gradient=cc.Implicit(2)), use_cache=False).loss
    (first,) = torch.autograd.grad(loss, model.fusion.recurrent_scale, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_each_rule_teaches_the_recurrent_weights() -> None:
    model, ids = make_gated(0.05), token_ids(2, T)
    names = [name for name, _ in model.named_parameters() if name.startswith(("fusion.", "carry."))]
    for gradient, constants in (
        (cc.Implicit(0), {"carry.norm.weight"}),
        (cc.Implicit(1), set()),
        (cc.LastPasses(1), set()),
    ):
        found = found_by(model, ids, cc.Jacobi(3, gradient=gradient))
        assert {name for name in names if not found[name].any()} == constants


def test_no_gradient_through_hidden_states_of_the_range() -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, 5)

    def hidden(solver: Any) -> Any:
        return model(ids, solver=solver, output_hidden_states=True, use_cache=False).hidden_states

    implicit, full = cc.Jacobi(5, gradient=cc.Implicit(5)), cc.Jacobi(5, 5)
    assert largest_difference(hidden(implicit), hidden(full)) < 1e-11
    for outside in (1, 4):  # the stream into the range, and the last one
        found = [gradients(model, hidden(solver)[outside].square().sum()) for solver in (implicit, full)]
        assert largest_difference(*found) < 1e-9
    with pytest.raises(RuntimeError, match="through hidden_states and attentions"):
        gradients(model, hidden(implicit)[2].square().sum())


def test_frozen_models_have_no_graph() -> None:
    for model in (make_t2mlr("llama"), make_rlt()):
        model.requires_grad_(False)
        solver = cc.Jacobi(3, gradient=cc.Implicit(2))
        assert not model(token_ids(2, 5), solver=solver).logits.requires_grad
        embeddings = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
        model(inputs_embeds=embeddings, solver=solver).logits.sum().backward()
        assert embeddings.grad is not None and bool((embeddings.grad != 0).any())


def test_static_caches_need_no_grad() -> None:
    model, ids = make_t2mlr("llama"), token_ids(1, 5)
    with pytest.raises(ValueError, match="no_grad"):
        model(ids, **{CACHE_NAME: model.new_cache(max_cache_len=8)}, solver=cc.Jacobi(3, gradient=cc.Implicit(1)))


@pytest.mark.parametrize("settings", [{"scan": "no"}, {"scan": 1}, {"tolerance": True}, {"tolerance": float("inf")}])
def test_settings_of_the_wrong_kind(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not allowed: give"):
        cc.Jacobi(4, **settings)
