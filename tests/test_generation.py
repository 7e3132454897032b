"""`generate`: with a cache it equals recomputing everything; in a batch it equals each prompt alone."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import (
    SUBJECTS,
    T2MLR_BASES,
    cache_of,
    largest_difference,
    make_base,
    make_rlt,
    make_t2mlr,
    token_ids,
)

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
GENERATORS = {"rlt1", "rlt2", "t2mlr_llama", "t2mlr_gemma3", "t2mlr_gpt2", "t2mlr_interval"}
for_some_subjects = pytest.mark.parametrize("subject", sorted(GENERATORS))


def left_padded(rows: list[torch.Tensor], pad_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=pad_id) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    return ids, mask


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("prompt_recurrence", [True, False])
def test_cached_equals_recomputed_and_batched_equals_alone(subject: str, prompt_recurrence: bool) -> None:
    model = SUBJECTS[subject]()
    rows = [token_ids(1, length, seed=length) for length in (3, 7, 1, 5, 6)]
    settings = GREEDY | {"prompt_recurrence": prompt_recurrence, "solver": cc.Sequential()}
    for pad_id in (0, 9):
        ids, mask = left_padded(rows, pad_id)
        together = model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
        for index, row in enumerate(rows):
            alone = model.generate(row, **settings)[:, row.shape[1] :]
            assert torch.equal(together[index], alone[0])
        recomputed = model.generate(ids, attention_mask=mask, use_cache=False, **settings)[:, ids.shape[1] :]
        assert torch.equal(together, recomputed)


@for_some_subjects
@pytest.mark.parametrize("prompt_recurrence", [True, False])
def test_scores_follow_teacher_forcing(subject: str, prompt_recurrence: bool) -> None:
    """Generated tokens are recurrent whatever the prompt is."""
    model, ids = SUBJECTS[subject](), token_ids(2, 5)
    settings = GREEDY | {"max_new_tokens": 6, "output_scores": True, "return_dict_in_generate": True}
    output = model.generate(ids, solver=cc.Sequential(), prompt_recurrence=prompt_recurrence, **settings)
    recurrent = torch.ones_like(output.sequences)
    recurrent[:, :5] = int(prompt_recurrence)
    forced = model(output.sequences, recurrent_mask=recurrent, solver=cc.Sequential()).logits[:, 4:-1]
    assert largest_difference(torch.stack(output.scores, dim=1).double(), forced) < 1e-6


@for_some_subjects
def test_sampling_is_repeatable_and_returned_sequences_follow_their_own_state(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, 4)
    settings = {"do_sample": True, "max_new_tokens": 6, "num_return_sequences": 4, "pad_token_id": 0}
    runs = []
    for use_cache in (True, True, False):
        torch.manual_seed(7)
        runs.append(model.generate(ids, use_cache=use_cache, solver=cc.Sequential(), **settings))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert len({tuple(row) for row in runs[0].tolist()}) > 1


@for_some_subjects
def test_beam_search_reorders_the_state(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 4)
    settings = GREEDY | {"num_beams": 3, "num_return_sequences": 3, "solver": cc.Sequential()}
    for mask in (torch.ones_like(ids), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])):
        cached = model.generate(ids, attention_mask=mask, **settings)
        assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **settings))


@for_some_subjects
def test_nothing_leaks_from_one_request_into_the_next(subject: str) -> None:
    model = SUBJECTS[subject]()
    first, second = token_ids(3, 6, seed=1), token_ids(1, 4, seed=2)
    expected = model.generate(second, **GREEDY)
    model.generate(first, **GREEDY)
    assert torch.equal(model.generate(second, **GREEDY), expected)
    assert not [name for name, value in vars(model).items() if isinstance(value, torch.Tensor)]


@for_some_subjects
def test_decoding_consumes_the_stored_state(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, 6)
    cache = cache_of(model(ids, use_cache=True))
    disturbed = copy.deepcopy(cache)
    disturbed.state = cc.RecurrentState(cache.state.register + 0.5, cache.state.num_tokens, cache.state.segment)
    following = token_ids(1, 1, seed=8)
    assert largest_difference(model(following, cache=cache).logits, model(following, cache=disturbed).logits) > 1e-5


@for_some_subjects
def test_prompt_recurrence_is_a_setting_of_the_model(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, 6)
    mask = torch.tensor([[0, 0, 1, 0, 1, 1]])
    without = model.generate(ids, prompt_recurrence=False, return_dict_in_generate=True, output_logits=True, **GREEDY)
    model.config.prompt_recurrence = False
    configured = model.generate(ids, return_dict_in_generate=True, output_logits=True, **GREEDY)
    with_ = model.generate(ids, prompt_recurrence=True, return_dict_in_generate=True, output_logits=True, **GREEDY)
    masked = model.generate(ids, recurrent_mask=mask, return_dict_in_generate=True, output_logits=True, **GREEDY)
    assert torch.equal(without.logits[0], configured.logits[0])
    assert not torch.equal(without.logits[0], with_.logits[0])
    assert largest_difference(masked.logits[0], model(ids, recurrent_mask=mask).logits[:, -1].float()) < 1e-5


@for_some_subjects
def test_prefill_in_chunks_reads_the_masks_own_columns(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, 9)
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 1, 0]])
    settings = GREEDY | {"recurrent_mask": mask, "solver": cc.Sequential(), "attention_mask": torch.ones_like(ids)}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    whole, chunks = model.generate(ids, **settings), model.generate(ids, prefill_chunk_size=4, **settings)
    assert largest_difference(whole.logits, chunks.logits) < 1e-6


@for_some_subjects
def test_continuing_from_a_cache(subject: str) -> None:
    """A prefix is read once; its copies continue independently and the original stays as it was."""
    model, prefix = SUBJECTS[subject](), token_ids(1, 5)
    cache = cache_of(model(prefix, use_cache=True))  # with gradients on: the copies must not mind
    for seed in (1, 2):
        prompt = torch.cat([prefix, token_ids(1, 3, seed=seed)], dim=1)
        expected = model.generate(prompt, **GREEDY)
        assert torch.equal(model.generate(prompt, **{CACHE_NAME: copy.deepcopy(cache)}, **GREEDY), expected)
    assert cache.get_seq_length() == 5 and cache.state.num_tokens.tolist() == [5]
    wide = copy.deepcopy(cache)
    wide.batch_repeat_interleave(3)
    endings = torch.cat([token_ids(1, 3, seed=seed) for seed in (1, 2, 3)])
    prompts = torch.cat([prefix.expand(3, -1), endings], dim=1)
    assert torch.equal(model.generate(prompts, **{CACHE_NAME: wide}, **GREEDY), model.generate(prompts, **GREEDY))


@for_some_subjects
def test_a_cache_of_one_row_serves_several_sequences(subject: str) -> None:
    model, prefix = SUBJECTS[subject](), token_ids(1, 5)
    cache = cache_of(model(prefix, use_cache=True, solver=cc.Sequential()))
    prompts = torch.cat([prefix.expand(3, -1), token_ids(3, 2, seed=4)], dim=1)
    exact = GREEDY | {"solver": cc.Sequential()}
    requests: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (prompts[:1], {"do_sample": True, "num_return_sequences": 4}),
        (prompts[:1], {"num_beams": 3, "num_return_sequences": 2}),
        (prompts, {}),
        (prompts, {"num_beams": 2}),
    ]
    for ids, request in requests:
        found = []
        for given in ({}, {CACHE_NAME: cache}):
            torch.manual_seed(3)
            found.append(model.generate(ids, **(exact | request | given)))
            cache = copy.deepcopy(cache)  # a single row is extended itself
        assert torch.equal(*found), request
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_cache_is_taken_under_either_name(name: str) -> None:
    for seed in range(4):
        model, ids = make_t2mlr("llama"), token_ids(1, 9, seed=seed)
        cache = cache_of(model(ids[:, :6], use_cache=True, solver=cc.Sequential()))
        settings = GREEDY | {"solver": cc.Sequential()}
        assert torch.equal(model.generate(ids, **{name: cache}, **settings), model.generate(ids, **settings))


@pytest.mark.parametrize("num_held", [1, 6, 7])
def test_a_prompt_needs_a_token_that_the_cache_does_not_hold(num_held: int) -> None:
    model, ids = make_t2mlr("llama"), token_ids(1, 7)
    cache = cache_of(model(ids[:, :num_held], use_cache=True))
    settings = GREEDY | {CACHE_NAME: cache}
    if num_held < 7:
        assert torch.equal(model.generate(ids, **settings), model.generate(ids, **GREEDY))
        return
    with pytest.raises(ValueError, match="at least one token more"):
        model.generate(ids, **settings)


@for_some_subjects
def test_batch_size_may_change_between_calls(subject: str) -> None:
    model = SUBJECTS[subject]()
    model.config.solver = cc.Sequential()
    cache = cache_of(model(token_ids(3, 5), use_cache=True))
    cache.batch_select_indices(torch.tensor([2, 0]))
    kept = token_ids(3, 5)[[2, 0]]
    following = token_ids(2, 2, seed=4)
    expected = model(torch.cat([kept, following], dim=1)).logits[:, -2:]
    assert largest_difference(model(following, cache=cache).logits, expected) < 1e-6
    cache.reset()
    assert largest_difference(model(kept, cache=cache).logits, model(kept).logits) < 1e-6
    with pytest.raises(ValueError, match="the call has 3"):
        model(token_ids(3, 1), cache=cache)


@pytest.mark.parametrize("subject", ["rlt1", "t2mlr_llama"])
def test_caches_of_another_kind_are_refused(subject: str) -> None:
    model, other = SUBJECTS[subject](), make_rlt() if subject != "rlt1" else make_t2mlr("llama")
    for cache in (DynamicCache(), other.new_cache()):
        with pytest.raises(ValueError, match="needs a"):
            model(token_ids(1, 3), cache=cache)
        with pytest.raises(ValueError, match="needs a"):
            model.generate(token_ids(1, 3), **{CACHE_NAME: cache}, **GREEDY)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(token_ids(1, 3), cache_implementation="quantized", **GREEDY)


def test_a_failed_call_leaves_the_cache_as_it_was() -> None:
    model = make_t2mlr("llama", solver=cc.Sequential())
    cache = cache_of(model(token_ids(1, 5), use_cache=True))
    strict = cc.Jacobi(iterations=1, backward_iterations=1, tolerance=1e-12, on_nonconvergence="raise")
    with pytest.raises(cc.ConvergenceError):
        model(token_ids(1, 4, seed=6), cache=cache, solver=strict)
    assert cache.get_seq_length() == 5 and cache.key_labels.shape == (1, 5)
    following = token_ids(1, 1, seed=8)
    expected = model(torch.cat([token_ids(1, 5), following], dim=1)).logits[:, -1:]
    assert largest_difference(model(following, cache=cache).logits, expected) < 1e-6


@pytest.mark.parametrize("base_name", T2MLR_BASES)
def test_fresh_retrofit_generates_what_its_base_does(base_name: str) -> None:
    base, ids = make_base(base_name), token_ids(2, 5)
    mask = torch.ones_like(ids)
    expected = base.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(cc.retrofit(base, 1, 3).generate(ids, attention_mask=mask, **GREEDY), expected)


def test_embeddings_as_prompt() -> None:
    model: Any = make_t2mlr("llama")
    ids = token_ids(1, 5)
    embeds = model.get_input_embeddings()(ids)
    for prompt_recurrence in (True, False):
        settings = GREEDY | {"prompt_recurrence": prompt_recurrence}
        expected = model.generate(ids, **settings)[:, 5:]
        assert torch.equal(model.generate(inputs_embeds=embeds, **settings), expected)
