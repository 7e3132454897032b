"""Positions that a task gives: several tokens at one, what reads them, and what they leave alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent as cc
from crosscurrent.data.generated import collate, inputs_for
from crosscurrent.evaluation.gap import train_decode_gap
from crosscurrent.evaluation.interventions import model_with_feedback
from crosscurrent.evaluation.scoring import Examples, predict
from crosscurrent.evaluation.segments import segment_logits
from crosscurrent.experiments.run import build_model, run
from crosscurrent.tasks import IGNORED, Task, get_task, register_task
from crosscurrent.tasks.addition import AdditionPlaces
from tests.recipes import tiny_recipe
from tests.text_runs import tiny_text_recipe

PLACES = get_task("addition_places")
TASK = {"name": "addition_places", "train_lengths": [3], "validation_lengths": [3], "test_lengths": [4, 9]}
WINDOWS = {"encoder_sliding_window": 1, "sliding_window": 1}


def model_of(name: str = "rlt-1", **changes: Any) -> Any:
    """In float64, with parameters off their initial values."""
    own = {} if name == "transformer" else {"given_positions": True}
    model = build_model(tiny_recipe(name, task=TASK, model=own | changes)).double().eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def batch_of(length: int = 5, count: int = 4, split: str = "train") -> dict[str, Tensor]:
    return collate([PLACES.example(split, length, index) for index in range(count)])  # type: ignore[arg-type]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_digits_that_are_added_share_a_position(split: Any) -> None:
    for index in range(200):
        example = PLACES.example(split, 6, index)
        symbols, positions = PLACES.decode(example.tokens), example.positions
        assert positions is not None and len(positions) == len(symbols) and max(positions) <= 64
        plus, equals = symbols.index("+"), symbols.index("=")
        a, b, asked = positions[1:plus], positions[plus + 1 : equals], positions[equals:]
        assert positions[0] == positions[plus] == 0
        places = max(a, b, asked, key=len)
        assert all(low < high for low, high in pairwise((0, *places)))
        assert all(part == places[: len(part)] for part in (a, b, asked))
        if split != "train" or max(places) == len(places):
            assert places == tuple(range(1, len(places) + 1))
    assert PLACES.example(split, 6, 3) == PLACES.example(split, 6, 3)


def test_half_of_the_training_examples_are_spread_out() -> None:
    ends = [max(PLACES.example("train", 6, index).positions or ()) for index in range(400)]
    assert 150 < sum(end > 8 for end in ends) < 250  # six digits, one more in the answer, and its end
    assert len({PLACES.example("train", 6, index).positions for index in range(400)}) > 150


def test_sums_are_those_of_addition() -> None:
    example = PLACES.example("test", 9, 1)
    text = "".join(PLACES.decode(example.tokens)[1:])
    numbers, answer = text.split("=")
    a, b = (int(number[::-1]) for number in numbers.split("+"))
    assert answer[::-1] == str(a + b) and len(numbers) == 19


def test_the_longest_sums_have_places() -> None:
    assert max(PLACES.example("test", 62, 0).positions or ()) <= 64
    with pytest.raises(ValueError, match="at most 62"):
        PLACES.example("test", 63, 0)


@pytest.mark.parametrize("name", ["rlt-1", "rlt-2", "rlt-0"])
def test_counted_positions_may_be_given(name: str) -> None:
    model, ids = model_of(name), torch.randint(14, (3, 11))
    counted = cc.RLTForCausalLM(cc.RLTConfig(**(model.config.to_dict() | {"given_positions": False}))).double().eval()
    counted.load_state_dict(model.state_dict())
    given = model(ids, position_ids=torch.arange(11)[None]).logits
    torch.testing.assert_close(given, counted(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["rlt-1", "rlt-2", "rlt-0", "transformer"])
def test_only_differences_of_positions_matter(name: str) -> None:
    model, batch = model_of(name), inputs_for(model_of(name), batch_of())
    moved = batch | {"position_ids": batch["position_ids"] + 17}
    other = batch | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None].expand_as(batch["input_ids"])}
    logits = model(**batch).logits
    real = batch["attention_mask"].bool()
    # Frequencies are float32 in transformers' Llama, and double in the RLT's.
    torch.testing.assert_close(
        logits[real], model(**moved).logits[real], rtol=0, atol=1e-4 if name == "transformer" else 1e-11
    )
    assert (logits - model(**other).logits)[real].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["rlt-1", "rlt-0", "transformer"])
def test_positions_that_go_back_open_no_document(name: str) -> None:
    model, batch = model_of(name), inputs_for(model_of(name), batch_of(count=1, split="test"))
    assert bool((batch["position_ids"].diff() < 0).any())
    changed = batch["input_ids"].clone()
    changed[0, 1] = (changed[0, 1] + 1) % 10
    first, second = (
        model(**(batch | {"input_ids": ids}), use_cache=False).logits for ids in (batch["input_ids"], changed)
    )
    assert (first - second)[0, 0].abs().max() == 0 and (first - second)[0, -1].abs().max() > 1e-6
    if name != "transformer":  # whose batches always have a mask, for that reason
        bare = {key: values for key, values in batch.items() if key != "attention_mask"}
        assert torch.equal(model(**bare, use_cache=False).logits, first)


@pytest.mark.parametrize(
    ("name", "windows"), [("rlt-1", {}), ("rlt-1", WINDOWS), ("rlt-2", {}), ("rlt-0", WINDOWS), ("transformer", {})]
)
def test_pieces_are_the_whole(name: str, windows: dict[str, int]) -> None:
    model, batch = model_of(name, **windows), inputs_for(model_of(name), batch_of(length=7, split="test"))
    whole = model(**batch).logits
    for length in (1, 3):
        parts = torch.cat([logits for _, logits in segment_logits(model, batch, length)], dim=1)
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(parts[real], whole[real], rtol=0, atol=1e-6 if name == "transformer" else 1e-11)


@pytest.mark.parametrize("name", ["rlt-1", "transformer"])
def test_answers_are_generated_at_their_places(name: str) -> None:
    model = model_of(name, **({} if name == "transformer" else WINDOWS))
    ((_, said),) = predict(model, Examples(PLACES, "test", (9,), 5, seed=3), generates=True)
    assert said.generated is not None
    for index in range(5):
        one = PLACES.example("test", 9, index, 3)
        start = next(place for place, target in enumerate(one.targets) if target != IGNORED)
        ids, positions = list(one.tokens[: start + 1]), torch.tensor([one.positions])
        for target, generated in zip(one.targets[start:], said.generated[index].tolist(), strict=False):
            known = torch.tensor([ids])
            logits = model(known, attention_mask=torch.ones_like(known), position_ids=positions[:, : len(ids)]).logits
            token = int(logits[0, -1].argmax())
            assert generated == token and target != IGNORED
            ids.append(token)


def test_a_run_with_places(tmp_path: Path) -> None:
    recipe = tiny_recipe(task=TASK, model={"given_positions": True}, training={"microbatch_size": 4})
    assert run(recipe, tmp_path) is not None
    reloaded = cc.RLTForCausalLM.from_pretrained(next(tmp_path.rglob("config.json")).parent)
    assert reloaded.config.given_positions


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("rlt-1", {"task": TASK}, "addition_places says where its tokens stand"),
        ("lstm", {"task": TASK}, "addition_places says where its tokens stand"),
        ("t2mlr", {"task": TASK}, "addition_places says where its tokens stand"),
        ("transformer", {"task": TASK, "model": {"positions": "none"}}, "architecture=transformer with positions=rope"),
        ("rlt-1", {"model": {"given_positions": True}}, "given_positions has no effect: parity"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(model: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_recipe(model, **changes)


def test_text_has_no_positions_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text says nothing of where its tokens stand"):
        tiny_text_recipe(tmp_path, "rlt", model={"given_positions": True})


def test_calls_that_do_not_fit_are_refused() -> None:
    model, ids = model_of(), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs position_ids"):
        model(ids)
    with pytest.raises(ValueError, match="generate needs position_ids"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="guidance_scale=2 is not supported with"):
        model.generate(ids, position_ids=torch.zeros_like(ids), guidance_scale=2, max_new_tokens=2)
    with pytest.raises(ValueError, match="prompts say nothing of where"):
        model_with_feedback(model)
    counted = build_model(tiny_recipe("rlt-1"))
    for shape in ((2, 4), (3, 5), (1, 6), (1, 1, 5), (5,), ()):
        for built, given in ((model, ids), (counted, ids)):
            with pytest.raises(ValueError, match="position_ids has shape"):
                built(given, position_ids=torch.zeros(shape, dtype=torch.int64))
    for dtype in (torch.bool, torch.float32, torch.complex64):
        with pytest.raises(ValueError, match="position_ids has dtype"):
            model(ids, position_ids=torch.zeros_like(ids, dtype=dtype))


def test_the_gap_is_measured_at_the_given_positions() -> None:
    model, batch = model_of(), batch_of(split="test")
    gap = train_decode_gap(model, batch, cc.Jacobi(40, 1))
    assert gap.num_tokens > 0 and gap.max_difference < 1e-9
    spread = train_decode_gap(model, batch | {"position_ids": batch["position_ids"] * 2}, cc.Jacobi(40, 1))
    assert abs(spread.loss - gap.loss) > 1e-6


def test_an_assistant_that_counts_its_positions() -> None:
    model, counted = model_of(), build_model(tiny_recipe("rlt-1", task=TASK | {"name": "addition"})).double().eval()
    one = PLACES.example("test", 9, 1)
    ids = torch.tensor([one.tokens[:20]])
    prompt = {"position_ids": torch.tensor([one.positions])[:, :20], "attention_mask": torch.ones_like(ids)}
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(ids, **prompt, **settings)
    assert torch.equal(model.generate(ids, **prompt, **settings, assistant_model=counted), alone)


class Leaping(AdditionPlaces):
    """Its answers do not stand one after the other."""

    name = "leaping"

    def positions(self, numbers: Any, payload: Any, split: Any) -> tuple[int, ...]:
        return tuple(2 * place for place in super().positions(numbers, payload, split))


def test_answers_that_leap_are_not_generated() -> None:
    with pytest.raises(ValueError, match="must rise by 1"):
        list(predict(model_of(), Examples(Leaping(), "test", (4,), 2, seed=3), generates=True))


def test_tasks_that_contradict_themselves_are_refused() -> None:
    class Silent(Leaping):
        has_positions = False

    class Short(Leaping):
        def positions(self, *given: Any) -> tuple[int, ...]:
            return super().positions(*given)[1:]

    class Mute(AdditionPlaces):
        positions = Task.positions  # type: ignore[assignment]

    for task in (Silent(), Mute()):
        with pytest.raises(ValueError, match="both or neither of has_positions"):
            register_task(task)
    with pytest.raises(ValueError, match="leaping gives 8 positions for 8 symbols and BOS"):
        Short().example("test", 2, 0)
