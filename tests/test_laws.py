"""The laws of docs/design.md, for every architecture and solver that they apply to, in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import crosscurrent as cc
from tests.subjects import (
    SOLVER_NAMES,
    SUBJECTS,
    T2MLR_BASES,
    cache_of,
    exact_solvers,
    gradients,
    largest_difference,
    make_base,
    make_rlt,
    make_t2mlr,
    recurrent_parameters,
    token_ids,
)

pytestmark = [
    pytest.mark.usefixtures("exact_arithmetic"),
    pytest.mark.filterwarnings("ignore:scan=True has no effect"),  # for RLT, which has nothing to scan
]

T = 7
EXACT = 1e-11  # float64 rounding on logits of order 1

for_each_subject = pytest.mark.parametrize("subject", SUBJECTS)
# What the others add to these two is arithmetic of our own.
ON_EACH_TRANSFORMERS = ("jacobi", "sequential")
for_each_solver = pytest.mark.parametrize(
    "solver",
    [pytest.param(name, marks=() if name in ON_EACH_TRANSFORMERS else pytest.mark.once) for name in SOLVER_NAMES],
)
for_each_base = pytest.mark.parametrize("base_name", T2MLR_BASES)


def solver_named(name: str) -> Any:
    return exact_solvers(3 * T)[name]


def is_recurrent(model: Any) -> bool:
    return model.config.feedback_interval is not None


# 1. Identity


@for_each_base
def test_identity_of_a_fresh_retrofit(base_name: str) -> None:
    base, ids = make_base(base_name), token_ids(2, T)
    model = cc.retrofit(base, 1, 3)
    assert torch.equal(model(ids).logits, base(ids).logits)
    assert largest_difference(model(ids, solver=cc.Sequential()).logits, base(ids).logits) < EXACT


@for_each_base
def test_identity_with_left_padding(base_name: str) -> None:
    base, ids = make_base(base_name), token_ids(2, T)
    mask = torch.ones(2, T, dtype=torch.int64)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = base(ids, attention_mask=mask, position_ids=positions).logits
    got = cc.retrofit(base, 1, 3)(ids, attention_mask=mask).logits
    assert torch.equal(got[1], expected[1]) and torch.equal(got[0, 3:], expected[0, 3:])


# 2. Causality


@for_each_subject
@for_each_solver
def test_causality(subject: str, solver: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, T)
    before = model(ids, solver=solver_named(solver)).logits
    for changed in (1, 4, T - 1):
        other = ids.clone()
        other[0, changed] = (ids[0, changed] + 1) % model.config.vocab_size
        after = model(other, solver=solver_named(solver)).logits
        assert largest_difference(after[:, :changed], before[:, :changed]) < EXACT
        assert largest_difference(after[:, changed], before[:, changed]) > 1e-4


def test_state_reaches_far_beyond_the_window() -> None:
    """With attention cut to the last token only the state can carry the first token to the end."""
    recurrent, plain = make_rlt(num_encoder_layers=1), make_rlt(num_encoder_layers=1, feedback_interval=None)
    for model, reaches in ((recurrent, True), (plain, False)):
        embeddings = torch.randn(1, T, 16, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():  # no path through attention: neither the encoder's nor the memory's
            for attention in (model.model.encoder[0].self_attn, *(d.memory_attn for d in model.model.decoder.layers)):
                attention.o_proj.weight.zero_()
        model(inputs_embeds=embeddings).logits[:, -1].sum().backward()
        assert embeddings.grad is not None
        assert bool((embeddings.grad[0, 0].abs() > 0).any()) is reaches


# 3. Splitting


@for_each_subject
@for_each_solver
@pytest.mark.parametrize("sizes", [(1, 6), (6, 1), (3, 2, 2), (1,) * T], ids=str)
def test_splitting(subject: str, solver: str, sizes: tuple[int, ...]) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    whole = model(ids, solver=solver_named(solver), use_cache=True)
    cache: Any = None
    logits = []
    for part in ids.split(sizes, dim=1):
        output = model(part, cache=cache, use_cache=True, solver=solver_named(solver))
        cache = cache_of(output)
        logits.append(output.logits)
    assert largest_difference(torch.cat(logits, dim=1), whole.logits) < EXACT
    assert largest_difference(cache.state.register, cache_of(whole).state.register) < EXACT
    assert torch.equal(cache.state.num_tokens, torch.tensor([T, T]))


@for_each_subject
def test_splitting_keeps_gradients(subject: str) -> None:
    """A loss on the second of two calls reaches through the cache into the first."""
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    labels = ids.clone()
    labels[:, :4] = -100  # the second call's own first token has no predecessor in that call
    whole = model(ids, labels=labels, solver=cc.Sequential(), use_cache=True).loss
    cache = cache_of(model(ids[:, :3], solver=cc.Sequential(), use_cache=True))
    second = model(ids[:, 3:], labels=ids[:, 3:], cache=cache, solver=cc.Sequential()).loss
    assert abs(whole.item() - second.item()) < EXACT
    assert largest_difference(gradients(model, whole), gradients(model, second)) < 1e-10


# 4. Batching


def ragged(model: Any, side: str, pad_id: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    rows = [token_ids(1, length, seed=length) for length in (3, 7, 5)]
    ids, mask = torch.full((3, 7), pad_id), torch.zeros(3, 7, dtype=torch.int64)
    for index, row in enumerate(rows):
        columns = slice(7 - row.shape[1], 7) if side == "left" else slice(0, row.shape[1])
        ids[index, columns], mask[index, columns] = row[0], 1
    return rows, ids, mask


@for_each_subject
@for_each_solver
@pytest.mark.parametrize("side", ["left", "right"])
def test_batching(subject: str, solver: str, side: str) -> None:
    model = SUBJECTS[subject]()
    for pad_id in (0, 11):
        rows, ids, mask = ragged(model, side, pad_id)
        batch = model(ids, attention_mask=mask, solver=solver_named(solver), use_cache=True)
        assert torch.isfinite(batch.logits).all()
        for index, row in enumerate(rows):
            alone = model(row, solver=solver_named(solver), use_cache=True)
            assert largest_difference(batch.logits[index, mask[index] == 1], alone.logits[0]) < EXACT
            state, expected = cache_of(batch).state, cache_of(alone).state
            assert largest_difference(state.register[index], expected.register[0]) < EXACT
            assert state.num_tokens[index] == row.shape[1]


@for_each_subject
@pytest.mark.parametrize("side", ["left", "right"])
def test_batching_of_loss_and_gradients(subject: str, side: str) -> None:
    model = SUBJECTS[subject]()
    rows, ids, mask = ragged(model, side, pad_id=11)
    for index in (0, 2):
        labels = torch.full_like(ids, -100)
        labels[index] = ids[index]  # the padding's own labels must not count either
        batch = model(ids, attention_mask=mask, labels=labels, solver=cc.Sequential(), use_cache=False).loss
        alone = model(rows[index], labels=rows[index], solver=cc.Sequential(), use_cache=False).loss
        assert abs(batch.item() - alone.item()) < EXACT
        assert largest_difference(gradients(model, batch), gradients(model, alone)) < 1e-10


@for_each_subject
def test_continuing_after_right_padding(subject: str) -> None:
    model = SUBJECTS[subject]()
    rows, ids, mask = ragged(model, "right", pad_id=11)
    cache = cache_of(model(ids, attention_mask=mask, solver=cc.Sequential(), use_cache=True))
    following = token_ids(3, 2, seed=9)
    if getattr(model.config, "sliding_window", None) is not None and isinstance(model, cc.T2MLRForCausalLM):
        with pytest.raises(ValueError, match="Pad on the left"):
            model(following, cache=cache)
        return
    together = model(following, cache=cache, solver=cc.Sequential()).logits
    for index, row in enumerate(rows):
        alone = model(torch.cat([row, following[index : index + 1]], dim=1), solver=cc.Sequential()).logits
        assert largest_difference(together[index], alone[0, -2:]) < EXACT


@for_each_subject
def test_a_row_of_padding_only_harms_nobody(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    mask = torch.ones_like(ids)
    mask[0] = 0
    output = model(ids, attention_mask=mask, labels=ids, use_cache=True)
    alone = model(ids[1:], labels=ids[1:])
    assert torch.isfinite(output.logits).all()
    assert largest_difference(output.logits[1], alone.logits[0]) < EXACT
    assert abs(output.loss.item() - alone.loss.item()) < EXACT
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model, output.loss).values())
    assert cache_of(output).state.num_tokens.tolist() == [0, T]


@for_each_subject
def test_padding_inside_a_row_is_passed_over(subject: str) -> None:
    model, row = SUBJECTS[subject](), token_ids(1, 6)
    columns = [0, 1, 4, 5, 7, 8]
    ids, mask = torch.full((1, 9), 11), torch.zeros(1, 9, dtype=torch.int64)
    ids[0, columns], mask[0, columns] = row[0], 1
    if getattr(model.config, "sliding_window", None) is not None and isinstance(model, cc.T2MLRForCausalLM):
        with pytest.raises(ValueError, match="Pad on the left"):
            model(ids, attention_mask=mask)
        return
    got = model(ids, attention_mask=mask, labels=ids, solver=cc.Sequential())
    expected = model(row, labels=row, solver=cc.Sequential())
    assert largest_difference(got.logits[0, columns], expected.logits[0]) < EXACT
    assert abs(got.loss.item() - expected.loss.item()) < EXACT


# 5. Packing


@for_each_subject
@for_each_solver
def test_packing(subject: str, solver: str) -> None:
    model = SUBJECTS[subject]()
    documents = [token_ids(1, length, seed=length) for length in (4, 1, 6, 2)]
    packed = torch.cat(documents, dim=1)
    segments = torch.cat([torch.full_like(d, index) for index, d in enumerate(documents)], dim=1)
    count = sum(d.shape[1] - 1 for d in documents)
    settings = {"solver": solver_named(solver), "num_items_in_batch": count, "use_cache": False}
    together = model(packed, labels=packed, segment_ids=segments, **settings)
    alone = [model(d, labels=d, **settings) for d in documents]
    assert largest_difference(together.logits, torch.cat([output.logits for output in alone], dim=1)) < EXACT
    total = torch.stack([output.loss for output in alone]).sum()
    assert abs(together.loss.item() - total.item()) < EXACT
    assert largest_difference(gradients(model, together.loss), gradients(model, total)) < 1e-10


@for_each_subject
def test_packing_across_calls_and_padding(subject: str) -> None:
    """Documents that begin, go on and end in different calls, beside a row that is padded in between."""
    model = SUBJECTS[subject]()
    ids = token_ids(2, 9)
    segments = torch.tensor([[0, 0, 0, 2, 2, 2, 2, 5, 5], [0, 0, 0, 0, 0, 1, 1, 1, 1]])
    cache: Any = None
    logits = []
    for columns in (slice(0, 2), slice(2, 5), slice(5, 9)):
        output = model(
            ids[:, columns], segment_ids=segments[:, columns], cache=cache, use_cache=True, solver=cc.Sequential()
        )
        cache = cache_of(output)
        logits.append(output.logits)
    got = torch.cat(logits, dim=1)
    for row, start, stop in ((0, 0, 3), (0, 3, 7), (0, 7, 9), (1, 0, 5), (1, 5, 9)):
        alone = model(ids[row : row + 1, start:stop], solver=cc.Sequential()).logits
        assert largest_difference(got[row, start:stop], alone[0]) < EXACT


@for_each_subject
def test_packing_told_by_restarting_positions(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, T)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    got = model(ids, position_ids=positions).logits
    expected = model(ids, segment_ids=torch.tensor([[0, 0, 0, 1, 1, 1, 1]])).logits
    assert largest_difference(got, expected) < EXACT


# 6. Exactness


@for_each_subject
def test_exactness_of_jacobi(subject: str, record_figures: Any) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    exact = model(ids, labels=ids, solver=cc.Sequential(), use_cache=True)
    jacobi = model(ids, labels=ids, solver=cc.Jacobi(T, T), use_cache=True)
    differences = {
        "logits": largest_difference(jacobi.logits, exact.logits),
        "state": largest_difference(cache_of(jacobi).state.register, cache_of(exact).state.register),
        "gradients": largest_difference(gradients(model, jacobi.loss), gradients(model, exact.loss)),
    }
    record_figures(f"Jacobi with T iterations against sequential, {subject}", differences)
    assert differences["logits"] < EXACT and differences["state"] < EXACT and differences["gradients"] < 1e-10
    for iterations in range(1, T):
        partial = model(ids, solver=cc.Jacobi(iterations, 1))
        assert largest_difference(partial.logits[:, :iterations], exact.logits[:, :iterations]) < EXACT
        assert partial.solver_report.iterations <= iterations
    if model.config.feedback_interval == 1:
        rough = model(ids, solver=cc.Jacobi(1, 1))
        assert largest_difference(rough.logits, exact.logits) > 1e-6  # and it is no more exact than that
        assert not rough.solver_report.exact and rough.solver_report.converged is None


# 7. Gradients


@for_each_subject
@for_each_solver
def test_gradients_against_finite_differences(subject: str, solver: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    chosen = exact_solvers(T)[solver]
    everything = dict(model.named_parameters())
    named = recurrent_parameters(model) | {name: everything[name] for name in list(everything)[::5]}
    found = gradients(model, model(ids, labels=ids, solver=chosen, use_cache=False).loss)
    step = 1e-6
    for name, parameter in named.items():
        direction = torch.randn(parameter.shape, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * step)
                losses.append(model(ids, labels=ids, solver=chosen, use_cache=False).loss.item())
                parameter.sub_(direction, alpha=sign * step)
        numeric = (losses[0] - losses[1]) / (2 * step)
        analytic = (found[name] * direction).sum().item()
        assert abs(analytic) > 1e-9 or name not in recurrent_parameters(model), name
        assert abs(numeric - analytic) < 1e-5 * max(1, abs(analytic)), name


@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name != "rlt0"])
@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Sequential(truncate=5), cc.Jacobi(3, 1)], ids=str)
def test_every_recurrent_parameter_learns(subject: str, solver: Any) -> None:
    """From the untrained start: there the scalars move first and open the way for the rest."""
    model = SUBJECTS[subject]()
    if isinstance(model, cc.T2MLRForCausalLM):
        for module in (model.fusion, model.carry):
            model._init_weights(module)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = token_ids(2, T)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids, solver=solver, use_cache=False).loss.backward()
        optimizer.step()
    for name in recurrent_parameters(model):
        assert not torch.equal(model.state_dict()[name], before[name]), name


# 8. Round trip


@for_each_subject
def test_round_trip(subject: str, tmp_path: Path) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, T)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not list(tmp_path.glob("*.bin"))
    attention = model.config._attn_implementation  # a choice of the moment, which is not saved
    result: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation=attention
    )
    loaded, info = result
    assert type(loaded) is type(model) and loaded.dtype == torch.float64
    assert not info["missing_keys"] and not info["unexpected_keys"]
    saved, again = model.state_dict(), loaded.state_dict()
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    assert loaded.config.solver == model.config.solver
    loaded.double()  # rotary frequencies too, which transformers computes in float32
    assert torch.equal(loaded(ids).logits, model(ids).logits)


# 9. Reductions


def test_no_feedback_scale_is_rlt0() -> None:
    silent = make_rlt(feedback_scale=0.0)
    without = make_rlt(feedback_interval=None)
    without.load_state_dict({k: v for k, v in silent.state_dict().items() if "merge" not in k})
    ids = token_ids(2, T)
    assert largest_difference(silent(ids).logits, without(ids).logits) < EXACT


def test_interval_longer_than_the_sequence_reads_only_the_start_state() -> None:
    model, ids = make_rlt(feedback_interval=50), token_ids(2, T)
    output = model(ids, use_cache=True)
    assert output.solver_report.iterations == 1
    start = model.model.merge.start_state
    assert torch.equal(cache_of(output).state.register, start.expand(2, -1))


@pytest.mark.parametrize("sizes", [(5, 2), (2, 5), (4, 3), (8, 9), (1, 1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_any_length_and_interval_splits(interval: int, sizes: tuple[int, ...]) -> None:
    """Chunks go on across calls, and are counted from each row's first real token."""
    model, total = make_rlt(feedback_interval=interval), sum(sizes)
    ids, mask = token_ids(2, total), torch.ones(2, total, dtype=torch.int64)
    mask[1, : sizes[0] - 1] = 0
    cache: Any = None
    logits, seen = [], 0
    for part in ids.split(sizes, dim=1):
        seen += part.shape[1]
        output = model(part, attention_mask=mask[:, :seen], cache=cache, use_cache=True)
        cache = cache_of(output)
        logits.append(output.logits)
    alone = model(ids[1:, sizes[0] - 1 :]).logits
    got = torch.cat(logits, dim=1)
    assert largest_difference(got[1, sizes[0] - 1 :], alone[0]) < EXACT
    assert largest_difference(got[0], model(ids[:1]).logits[0]) < EXACT


@for_each_base
def test_no_recurrent_token_is_the_base_model(base_name: str) -> None:
    base, ids = make_base(base_name), token_ids(2, T)
    model = make_t2mlr(base_name)
    none = torch.zeros_like(ids)
    assert torch.equal(model(ids, recurrent_mask=none).logits, base(ids).logits)
    assert torch.equal(model(ids, recurrent_mask=none, solver=cc.Sequential()).logits, base(ids).logits)
    assert not torch.equal(model(ids).logits, base(ids).logits)


@for_each_base
def test_no_feedback_interval_is_the_base_model(base_name: str) -> None:
    base, ids = make_base(base_name), token_ids(2, T)
    assert torch.equal(make_t2mlr(base_name, feedback_interval=None)(ids).logits, base(ids).logits)


# 10. Reproducibility


@for_each_subject
def test_resumed_training_equals_uninterrupted_training(subject: str, tmp_path: Path) -> None:
    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            ids = token_ids(2, T, seed=step)
            optimizer.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

    straight = SUBJECTS[subject]()
    optimizer = torch.optim.AdamW(straight.parameters(), lr=1e-3)
    train(straight, optimizer, range(4))

    stopped = SUBJECTS[subject]()
    optimizer = torch.optim.AdamW(stopped.parameters(), lr=1e-3)
    train(stopped, optimizer, range(2))
    stopped.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    attention = stopped.config._attn_implementation
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).double()
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(resumed, optimizer, range(2, 4))
    assert largest_difference(dict(resumed.named_parameters()), dict(straight.named_parameters())) == 0.0
