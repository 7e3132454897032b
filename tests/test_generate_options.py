"""What users pass to `generate`: each option gives with the cache what it gives without, and batched what it gives alone,
or is refused before the first token with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import SUBJECTS, VOCAB, cache_of, largest_difference, make_t2mlr, token_ids

NUM_NEW = 6
EXACT: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": NUM_NEW,
    "pad_token_id": 0,
    "solver": cc.Sequential(),
}
FEW: dict[str, Any] = {"solver": cc.Jacobi(iterations=1, backward_iterations=1)}
ROWS = [token_ids(1, length, seed=length) for length in (7, 3, 5)]


class FavourLast(LogitsProcessor):
    """Prefers to repeat the sequence's last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(1, input_ids[:, -1:], torch.full_like(scores[:, :1], 2.0))


def neighbours(batch_id: int, sequence: Tensor) -> list[int]:
    """Only tokens near the last one are allowed."""
    last = int(sequence[-1])
    return [1 + (last + step) % (VOCAB - 1) for step in (3, 5, 11)]


BIASED = {(3, 5): -4.0, (7,): 2.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": [15, 21, 6]},
    "eos_token_id": {"eos_token_id": [15, 21, 6]},
    "bad_words_ids": {"bad_words_ids": [[15], [21], [6, 20]]},
    "sequence_bias": {"sequence_bias": BIASED},
    "suppress_tokens": {"suppress_tokens": [15, 21], "begin_suppress_tokens": [23]},
    "forced_eos_token_id": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 9},
    "logits_processor": {"logits_processor": LogitsProcessorList([FavourLast()])},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": neighbours},
    "max_time": {"max_time": 1000.0},
    "max_length": {"max_new_tokens": None, "max_length": 7 + NUM_NEW},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")},
    "num_beams": {"num_beams": 3, "length_penalty": 0.4, "early_stopping": True, "eos_token_id": [15, 21]},
    "num_beams_never": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never", "eos_token_id": [15, 21]},
    "low_memory": {"low_memory": True},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "guidance_scale": {"guidance_scale": 3.0},
    "synced_gpus": {"synced_gpus": False},
    "cache_dynamic": {"cache_implementation": "dynamic"},
    "generation_config": {"generation_config": GenerationConfig(repetition_penalty=1.7, max_new_tokens=NUM_NEW)},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature_top_k": {"temperature": 1.6, "top_k": 9},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.02},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "beam_sampling": {"num_beams": 3, "num_return_sequences": 2},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)},
    "guidance_scale": {"guidance_scale": 3.0, "num_return_sequences": 3},
}


def left_padded(rows: list[Tensor], pad_id: int = 0) -> dict[str, Tensor]:
    width = max(row.shape[1] for row in rows)
    pad = torch.nn.functional.pad
    ids = [pad(row, (width - row.shape[1], 0), value=pad_id) for row in rows]
    mask = [pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(mask)}


def without_end(row: Tensor, settings: dict[str, Any]) -> list[int]:
    """The row up to its first end-of-sequence token: what follows fills up a batch."""
    ends = settings.get("eos_token_id") or []
    found = [i for i, token in enumerate(row.tolist()) if token in (ends if isinstance(ends, list) else [ends])]
    return row.tolist()[: found[0] + 1] if found else row.tolist()


@pytest.mark.parametrize("subject", ["t2mlr_llama", "t2mlr_gemma3", "rlt2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_cached_equals_recomputed_and_batched_equals_alone(subject: str, name: str) -> None:
    model, settings = SUBJECTS[subject](), EXACT | OPTIONS[name]
    batch = left_padded(ROWS)
    together = model.generate(**batch, **settings)
    assert torch.equal(together, model.generate(**batch, use_cache=False, **settings))
    if name == "encoder_repetition_penalty":
        return  # transformers counts the batch's padding among the prompt's tokens
    for index, row in enumerate(ROWS):
        limit = settings | ({"max_length": row.shape[1] + NUM_NEW} if name == "max_length" else {})
        alone = model.generate(row, **limit)[0, row.shape[1] :]
        assert without_end(alone, settings) == without_end(together[index, 7:], settings)


WITHOUT_EFFECT = {"synced_gpus", "cache_dynamic", "max_time", "max_length", "low_memory", "renormalize_logits"}


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - WITHOUT_EFFECT))
def test_the_options_matter(name: str) -> None:
    """So that the laws above do not hold for want of an effect."""
    model, settings = make_t2mlr("llama"), EXACT | OPTIONS[name]
    plain = EXACT | {"eos_token_id": [15, 21, 6]} if name == "min_new_tokens" else EXACT
    changed = [
        without_end(model.generate(row, **settings)[0], settings) != without_end(model.generate(row, **plain)[0], plain)
        for row in ROWS
    ]
    assert any(changed)


@pytest.mark.parametrize("subject", ["t2mlr_llama", "rlt2"])
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_cached_equals_recomputed(subject: str, name: str) -> None:
    model, batch = SUBJECTS[subject](), left_padded(ROWS)
    said = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        settings = EXACT | {"do_sample": True} | SAMPLED[name]
        said.append(model.generate(**batch, use_cache=use_cache, **settings))
    assert torch.equal(*said) and len(set(map(tuple, said[0].tolist()))) > 1


@pytest.mark.parametrize("subject", ["t2mlr_llama", "t2mlr_gemma3", "rlt2"])
def test_scores_of_beams_are_those_of_their_sequences(subject: str) -> None:
    model, batch = SUBJECTS[subject](), left_padded(ROWS)
    settings = EXACT | {"num_beams": 3, "num_return_sequences": 3, "output_scores": True, "length_penalty": 0.0}
    said = model.generate(**batch, return_dict_in_generate=True, **settings)
    mask = torch.cat(
        [batch["attention_mask"].repeat_interleave(3, dim=0), torch.ones(9, NUM_NEW, dtype=torch.int64)], dim=1
    )
    with torch.no_grad():
        logits = model(said.sequences, attention_mask=mask, solver=cc.Sequential()).logits[:, 6:-1]
    each = logits.log_softmax(dim=-1).gather(2, said.sequences[:, 7:, None]).sum(dim=(1, 2))
    assert largest_difference(said.sequences_scores.double(), each) < 1e-5
    steps = model.compute_transition_scores(said.sequences, said.scores, said.beam_indices)
    assert largest_difference(steps.sum(dim=1), said.sequences_scores) < 1e-5


def test_hidden_states_and_attentions_of_each_step() -> None:
    model: Any = make_t2mlr("llama")
    model.set_attn_implementation("eager")
    wanted = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    settings = EXACT | wanted | {"solver": cc.Jacobi(iterations=20), "max_new_tokens": 4}
    cached, recomputed = (model.generate(**left_padded(ROWS), use_cache=flag, **settings) for flag in (True, False))
    assert torch.equal(cached.sequences, recomputed.sequences)
    for step in range(4):
        assert len(cached.hidden_states[step]) == 5 and len(cached.attentions[step]) == 4
        for layer in range(5):
            last = recomputed.hidden_states[step][layer][:, -1]
            assert largest_difference(cached.hidden_states[step][layer][:, -1], last) < 1e-6
        for layer in range(4):
            last = recomputed.attentions[step][layer][:, :, -1]
            assert largest_difference(cached.attentions[step][layer][:, :, -1], last) < 1e-6
    stepwise = model.generate(**left_padded(ROWS), **(settings | {"solver": cc.Sequential()}))
    assert largest_difference(stepwise.attentions[0], cached.attentions[0]) < 1e-6


@pytest.mark.parametrize("subject", ["t2mlr_llama", "t2mlr_gemma3", "rlt2"])
@pytest.mark.parametrize("size", [1, 3, 20])
def test_prefill_in_chunks(subject: str, size: int) -> None:
    model, batch = SUBJECTS[subject](), left_padded(ROWS)
    whole = model.generate(**batch, **EXACT)
    assert torch.equal(model.generate(**batch, prefill_chunk_size=size, **EXACT), whole)
    cache = cache_of(model(batch["input_ids"][:1, :4], use_cache=True, solver=cc.Sequential()))
    settings = EXACT | {"prefill_chunk_size": size, CACHE_NAME: cache}
    if CACHE_NAME == "cache":
        assert torch.equal(model.generate(ROWS[0], **settings), whole[:1])
        return
    with pytest.raises(ValueError, match="read those tokens twice"):  # before transformers 5.24
        model.generate(ROWS[0], **settings)


# ---- guidance runs a second sequence, with a cache of its own ----


def guided(model: Any, row: Tensor, negative: Tensor, scale: float, prompt_recurrence: bool, solver: Any) -> list[int]:
    """Greedy decoding by the definition: both sequences scored whole at every step."""
    said: list[int] = []
    for _ in range(NUM_NEW):
        scores = []
        for prompt in (row, negative):
            whole = torch.cat([prompt, torch.tensor([said], dtype=torch.int64)], dim=1)
            recurrent = (torch.arange(whole.shape[1]) >= prompt.shape[1])[None] | prompt_recurrence
            with torch.no_grad():
                logits = model(whole, recurrent_mask=recurrent, solver=solver).logits
            scores.append(logits[:, -1].float().log_softmax(dim=-1))
        said.append(int((scale * (scores[0] - scores[1]) + scores[1]).argmax()))
    return said


@pytest.mark.parametrize("subject", ["t2mlr_llama", "rlt2"])
@pytest.mark.parametrize("prompt_recurrence", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
def test_guidance_follows_its_definition(subject: str, prompt_recurrence: bool, use_cache: bool) -> None:
    """With the solver asked for, which is not the model's own, and the negative prompts run as the prompts are."""
    model = SUBJECTS[subject]()
    model.config.solver = FEW["solver"]
    negatives = [token_ids(1, length, seed=20 + length) for length in (4, 9, 6)]
    padded = left_padded(negatives)
    settings = EXACT | {"guidance_scale": 2.5, "prompt_recurrence": prompt_recurrence, "use_cache": use_cache}
    together = model.generate(
        **left_padded(ROWS),
        negative_prompt_ids=padded["input_ids"],
        negative_prompt_attention_mask=padded["attention_mask"],
        **settings,
    )
    for index, (row, negative) in enumerate(zip(ROWS, negatives, strict=True)):
        expected = guided(model, row, negative, 2.5, prompt_recurrence, cc.Sequential())
        assert together[index, 7:].tolist() == expected
        alone = model.generate(row, negative_prompt_ids=negative, **settings)
        assert alone[0, row.shape[1] :].tolist() == expected
    without = model.generate(ROWS[0], **settings)[0, 7:].tolist()  # the last token of the prompt is the negative one
    assert without == guided(model, ROWS[0], ROWS[0][:, -1:], 2.5, prompt_recurrence, cc.Sequential())


def test_guidance_with_a_negative_prompt_for_each_returned_sequence() -> None:
    model, negative = make_t2mlr("llama"), token_ids(1, 9, seed=29)
    settings = EXACT | {"guidance_scale": 2.5, "num_return_sequences": 2, "do_sample": True, "top_k": 1}
    with pytest.raises(ValueError, match=r"1 rows: one is needed for each of the 2 .*repeat_interleave"):
        model.generate(ROWS[0], negative_prompt_ids=negative, **settings)
    repeated = negative.repeat_interleave(2, dim=0)
    said = model.generate(ROWS[0], negative_prompt_ids=repeated, **settings)
    assert said[0, 7:].tolist() == said[1, 7:].tolist() == guided(model, ROWS[0], negative, 2.5, True, cc.Sequential())


# ---- refused ----

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "guidance with beams": ({"guidance_scale": 2.0, "num_beams": 2}, "do not follow the beams"),
    "guidance with a mask of both kinds": (
        {"guidance_scale": 2.0, "recurrent_mask": torch.tensor([[0, 0, 1, 1, 0, 1, 1]])},
        "does not say which tokens",
    ),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search is not supported.*greedy"),
    "contrastive search, trusted": (
        {"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True},
        "contrastive_search is not supported.*knows nothing of the recurrent state",
    ),
    "dola": ({"dola_layers": "low"}, "dola_generation is not supported"),
    "group beam search": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        "group_beam_search is not supported",
    ),
    "constrained beam search": ({"num_beams": 4, "force_words_ids": [[3]]}, "constrained_beam_search is not supported"),
    "offloaded cache": ({"cache_implementation": "offloaded"}, "'offloaded' is not supported"),
    "quantized cache": ({"cache_implementation": "quantized"}, "'quantized' is not supported"),
    "paged cache": ({"cache_implementation": "paged"}, "continuous batching .* no place for the recurrent state"),
    "unknown cache": ({"cache_implementation": "bogus"}, "bogus"),
    "prefill in chunks without a cache": ({"prefill_chunk_size": 2, "use_cache": False}, "without a cache"),
    "use_model_defaults": ({"use_model_defaults": True}, "use_model_defaults"),  # gone from transformers 5
    "misspelt option": ({"do_samples": True}, "do_samples"),
    "synced_gpus without processes": ({"synced_gpus": True}, "process group"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_token(name: str) -> None:
    model, (settings, message) = make_t2mlr("llama"), REFUSED[name]
    seen: list[int] = []
    watch = LogitsProcessorList([record_calls(seen)])
    with pytest.raises(ValueError, match=message):
        model.generate(ROWS[0], logits_processor=watch, **(EXACT | settings))
    assert not seen


def record_calls(seen: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids.shape[1])
        return scores

    return processor


def test_embeddings_as_prompt_where_token_ids_are_needed() -> None:
    model: Any = make_t2mlr("llama")
    embeddings = model.get_input_embeddings()(ROWS[0])
    with pytest.raises(ValueError, match="transformers cuts token ids only"):
        model.generate(inputs_embeds=embeddings, prefill_chunk_size=2, **EXACT)
    settings = EXACT | {"guidance_scale": 2.5}
    with pytest.raises(ValueError, match="with inputs_embeds needs negative_prompt_ids"):
        model.generate(inputs_embeds=embeddings, **settings)
    negative = token_ids(1, 4, seed=24)
    said = model.generate(inputs_embeds=embeddings, negative_prompt_ids=negative, **settings)
    assert torch.equal(said, model.generate(ROWS[0], negative_prompt_ids=negative, **settings)[:, 7:])


@pytest.mark.parametrize("subject", ["t2mlr_llama", "rlt2"])
def test_continuous_batching_is_refused(subject: str) -> None:
    with pytest.raises(ValueError, match="Pad the prompts on the left"):
        SUBJECTS[subject]().generate_batch([[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2))


def test_own_decoding_loops_get_the_state_through_the_cache() -> None:
    """`custom_generate=` with a function of the user's."""
    model: Any = make_t2mlr("llama")

    def greedy(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> Tensor:
        for _ in range(NUM_NEW):
            cache = kwargs.get(CACHE_NAME)
            held = 0 if cache is None else cache.get_seq_length()
            outputs = model(input_ids[:, held:], solver=kwargs["solver"], **{CACHE_NAME: cache})
            input_ids = torch.cat([input_ids, outputs.logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
        return input_ids

    assert torch.equal(model.generate(ROWS[0], custom_generate=greedy, **EXACT), model.generate(ROWS[0], **EXACT))


# ---- token healing ----


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {f"w{index}": index for index in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )


def test_token_healing(words: PreTrainedTokenizerFast) -> None:
    """The tail "w3" may become "w30" to "w39"; each row is healed alone, so a batch is what its rows are."""
    model: Any = make_t2mlr("llama", solver=cc.Sequential())
    texts = ["w9 w20 w3", "w12 w25 w3"]
    batch = words(texts, return_tensors="pt", return_token_type_ids=False)
    settings = EXACT | {"token_healing": True, "tokenizer": words, "solver": None}
    said = model.generate(**batch, **settings)
    assert torch.equal(said, model.generate(**batch, use_cache=False, **settings))
    for index, text in enumerate(texts):
        alone = words(text, return_tensors="pt", return_token_type_ids=False)
        assert torch.equal(model.generate(**alone, **settings)[0], said[index])
    assert not torch.equal(said[:, :4], batch["input_ids"])


def test_healing_knows_no_solver_and_no_mask(words: PreTrainedTokenizerFast) -> None:
    model: Any = make_t2mlr("llama", solver=cc.Sequential())
    batch = words("w9 w20 w3", return_tensors="pt", return_token_type_ids=False)
    settings = EXACT | {"token_healing": True, "tokenizer": words}
    with pytest.raises(ValueError, match="token_healing with a solver"):
        model.generate(**batch, **settings)
    settings["solver"] = None
    with pytest.raises(ValueError, match=r"token_healing with a recurrent_mask.*heal_tokens"):
        model.generate(**batch, prompt_recurrence=False, **settings)
    healed = model.heal_tokens(batch["input_ids"], words)  # <s> has become padding: it is not to steer the healing
    mask = (healed != 0).long()
    by_hand = model.generate(healed, attention_mask=mask, prompt_recurrence=False, **EXACT)
    assert torch.equal(by_hand[:, :4], model.generate(**batch, **settings)[:, :4])


def test_max_time_stops() -> None:
    model = make_t2mlr("llama")
    assert model.generate(ROWS[0], max_time=1e-9, **EXACT).shape == (1, 8)


def test_the_process_that_is_done_first_calls_on_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """synced_gpus=True, as sharded weights need it: its result does not change, nor does anything fail."""
    model: Any = make_t2mlr("llama")
    expected = model.generate(ROWS[0], **EXACT)
    calls = iter(range(NUM_NEW + 4))  # four more than this process needs
    monkeypatch.setattr(model, "_has_unfinished_sequences", lambda *_, **__: next(calls, None) is not None)
    assert torch.equal(model.generate(ROWS[0], synced_gpus=True, **EXACT), expected)
    assert next(calls, None) is None
