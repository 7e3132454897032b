"""transformers' text-generation pipeline, streamers, and going on with a finished generation."""

import copy
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation import BaseStreamer

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import SUBJECTS, cache_of, largest_difference, moved, token_ids
from tests.tiny_base import save_tiny_base

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
PROMPTS = ["What flows against?", "Hi", "A current, they say, "]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved recurrent model, its gates open, beside its tokenizer."""
    base_folder = save_tiny_base(tmp_path_factory.mktemp("base"))
    model = cc.retrofit(AutoModelForCausalLM.from_pretrained(base_folder), 1, 3)
    moved(model.fusion)
    moved(model.carry)
    model.float().generation_config.max_length = None
    folder = tmp_path_factory.mktemp("recurrent")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def pipe(model: Any, tokenizer: Any) -> Any:
    as_generated: Any = {
        "clean_up_tokenization_spaces": False
    }  # older pipelines would take out spaces before full stops
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", **as_generated)


def by_hand(model: Any, tokenizer: Any, text: str, **settings: Any) -> str:
    """What follows the text."""
    batch = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    said = model.generate(**batch, **(GREEDY | settings))
    return tokenizer.decode(said[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def said(answers: list[Any]) -> list[str]:
    return [answer["generated_text"] for answer, *_ in answers]


# ---- the pipeline ----


def test_one_prompt_and_a_batch(pipe: Any, model: Any, tokenizer: Any) -> None:
    expected = [text + by_hand(model, tokenizer, text) for text in PROMPTS]
    assert said([pipe(text, **GREEDY) for text in PROMPTS]) == expected
    assert said(pipe(PROMPTS, batch_size=1, **GREEDY)) == expected
    for batch_size in (2, 3):
        assert said(pipe(PROMPTS, batch_size=batch_size, **GREEDY)) == expected
    assert len(set(expected)) == 3
    new = said(pipe(PROMPTS, batch_size=2, return_full_text=False, **GREEDY))
    assert [text + rest for text, rest in zip(PROMPTS, new, strict=True)] == expected


def test_from_a_saved_folder(folder: Path, pipe: Any) -> None:
    loaded = pipeline("text-generation", model=str(folder), device="cpu")
    assert isinstance(loaded.model, cc.T2MLRForCausalLM)
    ids = {"return_tensors": True, **GREEDY}
    assert loaded(PROMPTS, **ids) == pipe(PROMPTS, **ids)


def test_chats(pipe: Any, model: Any, tokenizer: Any) -> None:
    expected = [by_hand(model, tokenizer, f"Q: {text}\nA: ") for text in PROMPTS]
    for batch_size in (1, 2):
        answers = said(pipe(CHATS, batch_size=batch_size, **GREEDY))
        assert [chat[-1] for chat in answers] == [{"role": "assistant", "content": text} for text in expected]
        assert [chat[:-1] for chat in answers] == CHATS


class StopAfter(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= self.length, device=input_ids.device)


def test_stopping(pipe: Any, model: Any, tokenizer: Any) -> None:
    text = PROMPTS[0]
    new = {"return_full_text": False} | GREEDY
    whole = pipe(text, **new)[0]["generated_text"]
    assert len(whole) == 12 and pipe(text, **(new | {"max_new_tokens": 4}))[0]["generated_text"] == whole[:4]
    end = tokenizer.convert_tokens_to_ids(whole[5])
    first = whole.index(whole[5]) + 1
    assert pipe(text, eos_token_id=end, **new)[0]["generated_text"] == whole[:first]
    assert pipe(text, stop_sequence=whole[5], **new)[0]["generated_text"] == whole[:first]
    stopped = pipe(text, stop_strings=[whole[4:6]], tokenizer=tokenizer, **new)
    assert stopped[0]["generated_text"] == whole[:6]
    criteria = StoppingCriteriaList([StopAfter(len(text) + 3)])
    assert pipe(text, stopping_criteria=criteria, **new)[0]["generated_text"] == whole[:3]
    batched = said(pipe(PROMPTS, batch_size=3, eos_token_id=end, **new))
    assert batched == [by_hand(model, tokenizer, prompt, eos_token_id=end) for prompt in PROMPTS]


def test_solver_and_prompt_recurrence_pass_through(pipe: Any, model: Any, tokenizer: Any) -> None:
    model.config.solver = cc.Jacobi(iterations=1, backward_iterations=1)
    new = {"return_full_text": False, "batch_size": 2} | GREEDY
    found = []
    for settings in ({}, {"solver": cc.Sequential()}, {"prompt_recurrence": False}):
        answers = said(pipe(PROMPTS, **new, **settings))
        assert answers == [by_hand(model, tokenizer, text, **settings) for text in PROMPTS]
        found.append(tuple(answers))
    assert len(set(found)) == 3


def test_sampling_with_several_answers(pipe: Any, model: Any) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(4)
        answers = pipe(PROMPTS, batch_size=2, do_sample=True, num_return_sequences=3, max_new_tokens=6)
        runs.append([answer["generated_text"] for answers_of_one in answers for answer in answers_of_one])
    assert runs[0] == runs[1] and len(set(runs[0])) > 5


def test_a_batch_needs_a_padding_token(model: Any, tokenizer: Any) -> None:
    tokenizer.pad_token = None
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    assert pipe(PROMPTS, **GREEDY) == [pipe(text, **GREEDY) for text in PROMPTS]
    with pytest.raises(ValueError, match="without pad_token cannot do batching"):
        pipe(PROMPTS, batch_size=2, **GREEDY)


# ---- streaming ----


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


def test_streaming(model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    batch = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    expected = by_hand(model, tokenizer, PROMPTS[0])
    model.generate(**batch, streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
    assert capsys.readouterr().out == expected + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**batch, "streamer": streamer, **GREEDY})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == expected
    seen = Recorder()
    whole = model.generate(**batch, streamer=seen, **GREEDY)
    assert [len(put) for put in seen.puts] == [batch["input_ids"].shape[1], *(1,) * 12] and seen.has_ended
    assert [token for put in seen.puts for token in put] == whole[0].tolist()
    with pytest.raises(ValueError, match="beam search"):
        model.generate(**batch, streamer=TextStreamer(tokenizer), num_beams=2, **GREEDY)


def test_streaming_through_the_pipeline(pipe: Any, tokenizer: Any, capsys: Any) -> None:
    answer = pipe(PROMPTS[0], streamer=TextStreamer(tokenizer), **GREEDY)[0]["generated_text"]
    assert capsys.readouterr().out == answer + "\n"


# ---- going on with a finished generation ----

ROWS = [token_ids(1, length, seed=length) for length in (7, 3, 5)]
EXACT: dict[str, Any] = GREEDY | {"max_new_tokens": 5, "pad_token_id": 0, "solver": cc.Sequential()}


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    width = max(row.shape[1] for row in rows)
    pad = torch.nn.functional.pad
    mask = [pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows]
    return {
        "input_ids": torch.cat([pad(row, (width - row.shape[1], 0)) for row in rows]),
        "attention_mask": torch.cat(mask),
    }


@pytest.mark.parametrize("subject", ["t2mlr_llama", "t2mlr_gemma3", "t2mlr_interval", "rlt2"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("prompt_recurrence", [True, False])
def test_going_on_with_a_finished_generation(subject: str, padded: bool, prompt_recurrence: bool) -> None:
    """A second turn: the whole sequence, new tokens at its end, and the cache of the first turn."""
    model = SUBJECTS[subject]()
    batch = left_padded(ROWS) if padded else {"input_ids": ROWS[0], "attention_mask": torch.ones_like(ROWS[0])}
    first = model.generate(**batch, return_dict_in_generate=True, prompt_recurrence=prompt_recurrence, **EXACT)
    num_rows, cache = len(batch["input_ids"]), cache_of(first)
    assert cache.get_seq_length() == first.sequences.shape[1] - 1  # the last token has not been read yet
    turn = token_ids(1, 3, seed=40).expand(num_rows, -1)
    ids = torch.cat([first.sequences, turn], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(num_rows, 8, dtype=torch.int64)], dim=1)
    recurrent = torch.ones_like(ids)
    recurrent[:, : batch["input_ids"].shape[1]] = int(prompt_recurrence)
    settings = EXACT | {"attention_mask": mask, "recurrent_mask": recurrent}
    kept = copy.deepcopy(cache)
    continued = model.generate(ids, **{CACHE_NAME: cache}, **settings)
    assert torch.equal(continued, model.generate(ids, **settings))
    assert torch.equal(continued, model.generate(ids, **{CACHE_NAME: kept}, **settings))
    assert cache.get_seq_length() == continued.shape[1] - 1


def test_going_on_at_once_equals_asking_for_more() -> None:
    """Without new tokens: the cache lacks the last one, so there is one to read."""
    model = SUBJECTS["t2mlr_llama"]()
    first = model.generate(ROWS[0], return_dict_in_generate=True, **EXACT)
    continued = model.generate(first.sequences, **{CACHE_NAME: cache_of(first)}, **EXACT)
    assert torch.equal(continued, model.generate(ROWS[0], **(EXACT | {"max_new_tokens": 10})))


def test_going_on_after_several_sequences() -> None:
    """Sampled sequences have a row each in the cache. Beams do not, so their cache is not handed out."""
    model = SUBJECTS["t2mlr_llama"]()
    wanted = EXACT | {"num_return_sequences": 3, "return_dict_in_generate": True}
    for settings in ({"do_sample": True}, {"num_beams": 3}):
        first = model.generate(ROWS[0], **(wanted | settings))
        assert (cache_of(first) is None) == ("num_beams" in settings)
        ids = torch.cat([first.sequences, token_ids(1, 3, seed=40).expand(3, -1)], dim=1)
        continued = model.generate(ids, **{CACHE_NAME: cache_of(first)}, **EXACT)
        assert torch.equal(continued, model.generate(ids, **EXACT))


def test_scores_of_the_continuation_are_the_models() -> None:
    model = SUBJECTS["t2mlr_llama"]()
    first = model.generate(ROWS[0], return_dict_in_generate=True, **EXACT)
    ids = torch.cat([first.sequences, token_ids(1, 3, seed=40)], dim=1)
    settings = EXACT | {"return_dict_in_generate": True, "output_logits": True, CACHE_NAME: cache_of(first)}
    output = model.generate(ids, **settings)
    with torch.no_grad():
        forced = model(output.sequences, solver=cc.Sequential()).logits[:, -6:-1]
    assert largest_difference(torch.stack(output.logits, dim=1), forced.float()) < 1e-5
