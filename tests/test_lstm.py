"""The LSTM baseline under the interface of a transformers model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME


@pytest.fixture
def model() -> cc.LSTMForCausalLM:
    return cc.LSTMForCausalLM(cc.LSTMConfig(vocab_size=11, hidden_size=12, num_hidden_layers=2)).eval()


def test_padding_on_the_right_changes_nothing(model: cc.LSTMForCausalLM) -> None:
    ids = torch.randint(0, 11, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    together = model(ids, attention_mask=mask, labels=ids)
    alone = model(ids[1:, :4], labels=ids[1:, :4])
    assert torch.allclose(together.logits[1, :4], alone.logits[0], atol=1e-6)
    first = model(ids[:1], labels=ids[:1])
    assert together.loss.item() == pytest.approx((6 * first.loss.item() + 3 * alone.loss.item()) / 9, rel=1e-5)
    with pytest.raises(ValueError, match="right only"):
        model(ids, attention_mask=mask.flip(1))


def test_round_trip_and_generation(model: cc.LSTMForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 11, (1, 5))
    assert isinstance(again, cc.LSTMForCausalLM) and torch.equal(again(ids).logits, model(ids).logits)
    assert again.lm_head.weight is again.embed_tokens.weight
    written = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(written, ids)


def test_wrong_input_is_refused(model: cc.LSTMForCausalLM) -> None:
    for kwargs, word in (
        ({"input_ids": torch.tensor([[99]])}, "99"),
        ({"input_ids": torch.tensor([[1]]), "recurrent_mask": torch.ones(1, 1)}, "recurrent_mask"),
        ({}, "input_ids"),
    ):
        with pytest.raises(ValueError, match=word):
            model(**kwargs)
    with pytest.raises(ValueError, match="hidden_size=0"):
        cc.LSTMConfig(hidden_size=0)


def test_a_state_is_continued(model: cc.LSTMForCausalLM) -> None:
    ids = torch.randint(0, 11, (2, 7))
    first = model(ids[:, :4], use_cache=True)
    second = model(ids[:, 4:], **{CACHE_NAME: first[CACHE_NAME]})
    assert torch.allclose(torch.cat([first.logits, second.logits], dim=1), model(ids).logits, atol=1e-6)
    assert CACHE_NAME not in second
    for kwargs, word in (
        ({CACHE_NAME: DynamicCache()}, "LSTMState"),
        ({CACHE_NAME: model(ids[:1], use_cache=True)[CACHE_NAME]}, "of 1 rows, the call of 2"),
        ({"use_cache": True, "attention_mask": torch.tensor([[1] * 7, [1] * 6 + [0]])}, "after padding"),
    ):
        with pytest.raises(ValueError, match=word):
            model(ids, **kwargs)


def test_generate_reads_all_again_whether_or_not_it_asks_for_a_cache(model: cc.LSTMForCausalLM) -> None:
    ids = torch.randint(0, 11, (2, 5))
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(ids, use_cache=True, **settings), model.generate(ids, use_cache=False, **settings)
    )
