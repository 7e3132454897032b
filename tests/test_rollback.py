"""Tokens taken back leave no trace; decoding with drafts gives what decoding without them gives."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import SUBJECTS, gradients, largest_difference, make_base, make_t2mlr, token_ids
from tests.test_generation import GREEDY

ROLLING = ["rlt0", "rlt1", "rlt2", "rlt_encoder_window", "t2mlr_gemma3", "t2mlr_gpt2", "t2mlr_interval", "t2mlr_llama"]
EXACT = cc.Sequential()
for_rolling = pytest.mark.parametrize("subject", ROLLING)


def recording(model: Any) -> Any:
    cache = model.new_cache()
    cache.activate_past_recording()
    return cache


def call(model: Any, ids: Tensor, cache: Any, **settings: Any) -> Tensor:
    return model(ids, **{CACHE_NAME: cache}, solver=EXACT, **settings).logits


@pytest.mark.parametrize("subject", SUBJECTS)
def test_rejected_tokens_leave_no_trace(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 13)
    drafts = token_ids(2, 4, seed=9)
    cache = recording(model)
    call(model, ids[:, :10], cache)
    call(model, drafts, cache)
    cache.crop(-3)
    kept = torch.cat([ids[:, :10], drafts[:, :1], ids[:, 10:]], dim=1)
    fresh = model.new_cache()
    expected = call(model, kept, fresh)[:, -3:]
    assert largest_difference(call(model, ids[:, 10:], cache), expected) < 2e-6
    assert cache.get_seq_length() == 14
    assert largest_difference(cache.state.register, fresh.state.register) < 2e-6
    assert torch.equal(cache.state.num_tokens, fresh.state.num_tokens)


@for_rolling
def test_taking_back_across_calls_padding_and_documents(subject: str) -> None:
    """One token at a time, then all of them at once: through padding, a document's start, and the calls' borders."""
    model, ids = SUBJECTS[subject](), token_ids(2, 9)
    mask = torch.tensor([[1] * 9, [0, 0] + [1] * 7])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 5 + [1] * 4])
    cache = recording(model)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        columns = slice(start, stop)
        call(model, ids[:, columns], cache, attention_mask=mask[:, columns], segment_ids=segments[:, columns])
    for kept in (8, 5, 4, 2, 0):
        cache.crop(-(cache.key_labels.shape[1] - kept)) if kept == 0 else cache.crop(kept)
        going_on = copy.deepcopy(cache)
        rest = slice(kept, 9)
        logits = call(model, ids[:, rest], going_on, attention_mask=mask[:, rest], segment_ids=segments[:, rest])
        whole = call(model, ids, model.new_cache(), attention_mask=mask, segment_ids=segments)
        is_real = mask[:, rest].bool()
        assert largest_difference(logits[is_real], whole[:, rest][is_real]) < 1e-9
    fresh = model.new_cache()
    assert torch.equal(call(model, ids[:, :3], cache), call(model, ids[:, :3], fresh))


@for_rolling
def test_rows_of_a_recording_cache_can_be_rearranged(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(2, 9)
    cache = recording(model)
    call(model, ids[:, :8], cache)
    order = torch.tensor([1, 1, 0])
    cache.batch_select_indices(order)
    cache.crop(6)
    expected = call(model, ids[order], model.new_cache())[:, 6:]
    assert largest_difference(call(model, ids[order][:, 6:], cache), expected) < 1e-9


@for_rolling
def test_what_was_not_kept_cannot_be_taken_back(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, 3)
    cache = model.new_cache()
    call(model, ids, cache)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    call(model, ids[:, :2], cache)
    with pytest.raises(ValueError, match="3 tokens cannot be taken back: the cache has recorded 2"):
        cache.crop(-3)
    cache.crop(3)
    assert cache.get_seq_length() == 3
    cache.reset()
    call(model, ids, cache)
    cache.crop(-9)  # more than there is: all of it
    assert torch.equal(call(model, ids, cache), call(model, ids, model.new_cache()))


@for_rolling
def test_gradients_flow_through_what_is_left(subject: str) -> None:
    model, ids = SUBJECTS[subject](), token_ids(1, 7)
    cache = recording(model)
    call(model, ids[:, :4], cache)
    call(model, token_ids(1, 2, seed=9), cache)
    cache.crop(4)
    found = gradients(model, call(model, ids[:, 4:], cache).square().sum())
    whole = call(model, ids, model.new_cache())[:, 4:]
    for name, gradient in gradients(model, whole.square().sum()).items():
        assert largest_difference(found[name], gradient) < 2e-6 * max(1.0, gradient.abs().max().item()), name


def test_recording_ends_with_the_drafts_that_needed_it() -> None:
    model: Any = make_t2mlr("llama")
    ids = prompt_with_repeats()
    cache: Any = model.new_cache()
    call(model, ids[:, :5], cache)
    model.generate(ids, prompt_lookup_num_tokens=3, **{CACHE_NAME: cache}, **settings_of(ids))
    assert not cache.is_croppable and cache.registers is None


def test_a_window_that_dropped_entries_cannot_record() -> None:
    model = make_t2mlr("gemma3")
    cache = model.new_cache()
    call(model, token_ids(1, 6), cache)
    with pytest.raises(ValueError, match="before the first token"):
        cache.activate_past_recording()
    assert not cache.is_croppable


def prompt_with_repeats() -> Tensor:
    start = token_ids(1, 9)
    return torch.cat([start, start[:, :6]], dim=1)


def settings_of(ids: Tensor, **more: Any) -> dict[str, Any]:
    limits = {"max_new_tokens": 16, "eos_token_id": 0, "solver": EXACT, "attention_mask": torch.ones_like(ids)}
    return GREEDY | limits | more


@for_rolling
@pytest.mark.parametrize("prompt_recurrence", [True, False])
def test_prompt_lookup_equals_greedy_decoding(subject: str, prompt_recurrence: bool) -> None:
    model, ids = SUBJECTS[subject](), prompt_with_repeats()
    settings = settings_of(ids, prompt_recurrence=prompt_recurrence)
    expected = model.generate(ids, use_cache=False, **settings)
    found = model.generate(ids, prompt_lookup_num_tokens=4, **settings)
    # transformers 5.8 may return one token more than was asked for
    assert torch.equal(found[:, : expected.shape[1]], expected)


@for_rolling
@pytest.mark.parametrize("assistant", ["base", "itself", "of_another_setting"])
@pytest.mark.parametrize("prompt_recurrence", [True, False])
def test_assisted_decoding_equals_greedy_decoding(subject: str, assistant: str, prompt_recurrence: bool) -> None:
    model, ids = SUBJECTS[subject](), prompt_with_repeats()
    others: dict[str, Any] = {
        "base": lambda: make_base("llama"),
        "itself": lambda: model,
        "of_another_setting": lambda: make_t2mlr("llama", prompt_recurrence=not prompt_recurrence),
    }
    helper = others[assistant]()
    helper.generation_config.num_assistant_tokens = 5
    helper.generation_config.assistant_confidence_threshold = 0.0
    settings = settings_of(ids, prompt_recurrence=prompt_recurrence)
    expected = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(model.generate(ids, assistant_model=helper, **settings), expected)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_verified_exactly_whatever_solves_the_prompt(seed: int) -> None:
    """One Jacobi iteration is far from exact on several tokens: drafts solved by it would be judged wrongly."""
    model: Any = make_t2mlr("llama")
    few = cc.Jacobi(1, 1)
    start = token_ids(1, 7, seed=seed)
    ids = torch.cat([start, start[:, :5]], dim=1)
    cache: Any = model.new_cache()
    model(ids[:, :-1], **{CACHE_NAME: cache}, solver=few)
    expected = model.generate(ids, **{CACHE_NAME: cache}, **settings_of(ids))  # all but the last token solved by few
    found = model.generate(ids, prompt_lookup_num_tokens=4, **settings_of(ids, solver=few))
    assert torch.equal(found[:, : expected.shape[1]], expected)


def test_drafts_are_accepted() -> None:
    """A model that drafts for itself is right every time: else the state that it drafts from would be wrong."""
    model: Any = make_t2mlr("llama", solver=cc.Sequential())
    ids = prompt_with_repeats()
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(ids, assistant_model=model, **settings_of(ids, max_new_tokens=13))
    assert len([width for width in widths if width == 6]) == 2  # 13 tokens: two rounds of five drafts and one more


@for_rolling
def test_assisted_sampling_is_repeatable_and_goes_on_from_a_cache(subject: str) -> None:
    model, ids = SUBJECTS[subject](), prompt_with_repeats()
    sampled = []
    for _ in range(2):
        torch.manual_seed(4)
        sampled.append(model.generate(ids, prompt_lookup_num_tokens=3, **settings_of(ids, do_sample=True)))
    assert torch.equal(*sampled)
    cache = recording(model)
    call(model, ids[:, :7], cache)
    settings = settings_of(ids)
    expected = model.generate(ids, **settings)
    found = model.generate(ids, prompt_lookup_num_tokens=3, **{CACHE_NAME: cache}, **settings)
    assert torch.equal(found[:, : expected.shape[1]], expected)


def test_what_assisted_decoding_does_not_do_is_refused_before_the_first_token() -> None:
    model, ids = make_t2mlr("llama"), prompt_with_repeats()
    refused: dict[str, dict[str, Any]] = {
        "guidance_scale": {"prompt_lookup_num_tokens": 3, "guidance_scale": 1.5},
        "assistant_early_exit": {"assistant_early_exit": 2},
        "grows": {"prompt_lookup_num_tokens": 3, "cache_implementation": "static"},
        "output_attentions": {
            "prompt_lookup_num_tokens": 3,
            "output_attentions": True,
            "return_dict_in_generate": True,
        },
        "output_hidden_states": {
            "prompt_lookup_num_tokens": 3,
            "output_hidden_states": True,
            "return_dict_in_generate": True,
        },
    }
    for message, request in refused.items():
        with pytest.raises(ValueError, match=message):
            model.generate(ids, **request, **settings_of(ids))
    with pytest.raises(ValueError, match="one prompt at a time"):
        model.generate(ids.expand(2, -1), prompt_lookup_num_tokens=3, **settings_of(ids.expand(2, -1)))
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError):
        model.generate(inputs_embeds=embeds, prompt_lookup_num_tokens=3, **settings_of(ids))
