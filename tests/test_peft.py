"""LoRA on the base with the fusion beside it, and the fusion alone, through PEFT and transformers' Trainer."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import crosscurrent as cc
from crosscurrent.data.collation import AnswerRecurrence, PaddingCollator
from crosscurrent.training.adapters import freeze_base, lora_config
from tests.subjects import largest_difference, make_base, make_t2mlr, token_ids

BASES = ["llama", "gpt2"]


def adapted(name: str = "llama", **settings: Any) -> Any:
    """A fresh retrofit in float32 with LoRA and fusion."""
    model = cc.retrofit(make_base(name).float(), 1, 3, solver=cc.Jacobi(3, 2))
    return get_peft_model(model, lora_config(model, r=2, **settings))


def train_some_steps(model: Any, num_steps: int = 4, **inputs: Any) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.05)
    model.train()
    for step in range(num_steps):
        ids = token_ids(2, 7, seed=step)
        model(input_ids=ids, labels=ids, **inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **inputs).logits
    return found


@pytest.mark.parametrize("name", BASES)
def test_lora_and_fusion_are_trained_and_the_base_is_not(name: str) -> None:
    model = adapted(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_some_steps(model)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert changed == trained
    assert all(".lora_" in n or ".fusion.modules_to_save." in n or ".carry.modules_to_save." in n for n in trained)
    assert {n.split(".lora_")[0].split(".modules_to_save")[0].split(".")[2] for n in trained} == {
        "fusion",
        "carry",
        "transformer" if name == "gpt2" else "model",
    }
    assert not any(".lora_" in n and ("fusion" in n or "carry" in n or "lm_head" in n) for n in before)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Jacobi(3, 2)], ids=lambda solver: solver.name)
def test_an_adapter_holds_all_that_was_trained(name: str, solver: Any, tmp_path: Path) -> None:
    """Loaded on a fresh base, retrofitted with the same range, it gives the same weights, bit for bit, and logits. (Those
    may differ in the last bit: small matrix products round by where their weights lie in memory.)"""
    model, ids = train_some_steps(adapted(name)), token_ids(2, 8)
    model.save_pretrained(tmp_path)
    fresh = cc.retrofit(make_base(name).float(), 1, 3, solver=cc.Jacobi(3, 2))
    start = logits(fresh, ids, solver=solver)
    loaded = PeftModel.from_pretrained(fresh, tmp_path).eval()
    expected = dict(model.named_parameters())
    assert expected.keys() == dict(loaded.named_parameters()).keys()
    assert all(torch.equal(parameter, expected[n]) for n, parameter in loaded.named_parameters())
    assert largest_difference(logits(loaded, ids, solver=solver), logits(model, ids, solver=solver)) < 1e-5
    assert largest_difference(start, logits(loaded, ids, solver=solver)) > 1e-3


def test_a_disabled_adapter_gives_the_bases_logits() -> None:
    """The wrapper goes back to the fusion as it was before: at its start, so the base's logits bit for bit."""
    base, ids = make_base("llama").float(), token_ids(2, 8)
    expected = logits(base, ids)
    model = cc.retrofit(base, 1, 3, solver=cc.Jacobi(3, 2))
    model = train_some_steps(get_peft_model(model, lora_config(model, r=2)))
    assert largest_difference(logits(model, ids), expected) > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), expected)
        assert largest_difference(logits(model, ids, solver=cc.Sequential()), expected) < 1e-5
    assert largest_difference(logits(model, ids), expected) > 1e-3


def test_the_active_fusion_is_the_one_that_is_read() -> None:
    """Attributes of the fusion and the carry come from the adapter's, or from the model's own if it is disabled."""
    model = train_some_steps(adapted())
    inner = model.get_base_model()
    trained = inner.fusion.modules_to_save["default"]
    assert inner.fusion.current_scale is trained.current_scale and bool(trained.current_scale != 0)
    assert inner.carry.norm is inner.carry.modules_to_save["default"].norm
    assert inner.start_state(2).register.shape == (2, 16)
    with model.disable_adapter():
        assert inner.fusion.current_scale is inner.fusion.original_module.current_scale
        assert inner.fusion.current_scale.item() == 0.0


def test_the_layer_range_comes_with_a_saved_retrofit(tmp_path: Path) -> None:
    """An adapter does not record the range. If the retrofit is saved first, its configuration does, and PEFT finds it."""
    cc.retrofit(make_base("llama").float(), 1, 3, solver=cc.Jacobi(3, 2)).save_pretrained(tmp_path / "retrofit")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "retrofit")
    adapted_model = train_some_steps(get_peft_model(model, lora_config(model, r=2)))
    adapted_model.save_pretrained(tmp_path / "adapter")
    loaded: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert isinstance(loaded.get_base_model(), cc.T2MLRForCausalLM) and loaded.config.layer_end == 3
    ids = token_ids(2, 8)
    assert largest_difference(logits(loaded, ids), logits(adapted_model, ids)) < 1e-5


def test_an_adapter_does_not_name_the_plain_base(tmp_path: Path) -> None:
    """PEFT would load that without a word, and leave out the fusion."""
    make_base("llama").float().save_pretrained(tmp_path / "base")
    model = cc.retrofit(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), 1, 3)
    get_peft_model(model, lora_config(model, r=2)).save_pretrained(tmp_path / "adapter")
    assert not PeftConfig.from_pretrained(str(tmp_path / "adapter")).base_model_name_or_path


@pytest.mark.parametrize("name", BASES)
def test_merging_keeps_the_logits_and_gives_a_plain_model(name: str, tmp_path: Path) -> None:
    model, ids = train_some_steps(adapted(name)), token_ids(2, 8)
    expected = logits(model, ids)
    merged = model.merge_and_unload()
    assert isinstance(merged, cc.T2MLRForCausalLM)
    assert largest_difference(logits(merged, ids), expected) < 1e-5
    names = set(cc.retrofit(make_base(name), 1, 3).state_dict())
    assert set(merged.state_dict()) == names
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), logits(merged, ids))


def test_only_the_fusion_can_be_trained() -> None:
    model = cc.retrofit(make_base("llama"), 1, 3)
    freeze_base(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_some_steps(model)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if n.startswith(("fusion.", "carry."))}
    assert all(p.grad is None for n, p in model.named_parameters() if n not in changed)


def test_adapters_do_not_mix_their_fusions() -> None:
    model, ids = adapted(), token_ids(2, 8)
    model.add_adapter("other", lora_config(model.get_base_model(), r=2))
    found = {}
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        start = logits(model, ids)
        found[adapter] = logits(train_some_steps(model, 3 if adapter == "other" else 5), ids)
        assert largest_difference(start, found[adapter]) > 1e-3
    for adapter, expected in found.items():
        model.set_adapter(adapter)
        assert torch.equal(logits(model, ids), expected)
    assert largest_difference(found["default"], found["other"]) > 1e-3


def test_an_adapter_without_a_fusion_beside_one_with_it() -> None:
    """The fusion of the one is not used by the other: that one runs on the model's own."""
    model, ids = adapted(), token_ids(2, 8)
    expected = logits(model, ids)
    train_some_steps(model)
    model.add_adapter("plain", LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2))
    model.set_adapter("plain")
    assert torch.equal(logits(model, ids), expected)
    with pytest.warns(UserWarning, match="frozen at its start"):
        train_some_steps(model, 1)


def test_a_forgotten_fusion_is_told() -> None:
    plain = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    model = get_peft_model(cc.retrofit(make_base("llama").float(), 1, 3), plain)
    with pytest.warns(UserWarning, match=r"frozen at its start.*lora_config"):
        train_some_steps(model, 1)
    model.get_base_model().fusion.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"would lose it.*modules_to_save"):
        train_some_steps(model, 1)
    trained_before = get_peft_model(make_t2mlr("llama").float(), copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train_some_steps(trained_before, 1)
        train_some_steps(adapted(), 1)
        train_some_steps(adapted().merge_and_unload(), 1)


def test_settings_are_loras_own() -> None:
    model = cc.retrofit(make_base("llama"), 1, 3)
    config = lora_config(model, r=3, lora_alpha=5, target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert (config.r, config.lora_alpha, config.target_modules) == (3, 5, {"q_proj"})
    assert config.modules_to_save == ["fusion", "carry", "lm_head"]
    for wrong in (make_base("llama"), get_peft_model(model, config)):
        with pytest.raises(ValueError, match="retrofitted"):
            lora_config(wrong)
        with pytest.raises(ValueError, match="retrofitted"):
            freeze_base(wrong)


@pytest.mark.parametrize("trained", ["lora and fusion", "fusion alone"])
def test_gradient_checkpointing_gives_the_same_gradients(trained: str) -> None:
    if trained == "fusion alone":
        model: Any = make_t2mlr("llama", solver=cc.Jacobi(3, 2)).float().train()
        freeze_base(model)
    else:
        model = train_some_steps(adapted()).train()
    ids, found = token_ids(2, 7), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    assert largest_difference(*found) == 0.0
    assert all(bool(gradient.abs().sum() > 0) for gradient in found[0].values())


@pytest.mark.parametrize(
    ("settings", "acts"),
    [
        ({}, False),
        ({"prompt_recurrence": False}, True),
        ({"solver": cc.Sequential()}, True),
        ({"recurrent_mask": torch.tensor([[0, 0, 0, 1, 1], [1, 0, 1, 0, 1]])}, True),
    ],
    ids=["plain", "prompt_recurrence", "solver", "recurrent_mask"],
)
def test_generate_through_the_wrapper(settings: dict[str, Any], acts: bool) -> None:
    """Equal to the merged model's, with each of our own arguments, and these act."""
    model, ids = train_some_steps(adapted()), token_ids(2, 5)
    arguments: dict[str, Any] = {
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "solver": cc.Jacobi(1, 1),
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    found = model.generate(input_ids=ids, **(arguments | settings))
    without = model.generate(input_ids=ids, **arguments)
    assert (largest_difference(found.logits[0], without.logits[0]) > 1e-3) == acts
    expected = model.merge_and_unload().generate(ids, **(arguments | settings))
    assert torch.equal(found.sequences, expected.sequences)
    assert largest_difference(found.logits, expected.logits) < 1e-4


# Columns that transformers' Trainer must not drop


EXAMPLES = [
    {"input_ids": [3, 4, 5, 6, 7, 8], "recurrent_mask": [0, 0, 1, 1, 1, 1], "segment_ids": [0, 0, 0, 1, 1, 1]},
    {"input_ids": [9, 10, 11, 12], "recurrent_mask": [0, 1, 0, 1], "segment_ids": [0, 0, 2, 2]},
]


def trainer_of(model: Any, folder: Path, columns: tuple[str, ...], side: Any = "right", **arguments: Any) -> Any:
    from datasets import Dataset

    examples = [{"input_ids": e["input_ids"], **{c: e[c] for c in columns}, "text": "dropped"} for e in EXAMPLES]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, **arguments
    )
    collator = PaddingCollator(pad_token_id=0, padding_side=side, required=columns)
    return Trainer(model, args, data_collator=collator, train_dataset=Dataset.from_list(examples))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("columns", [("recurrent_mask",), ("segment_ids",), ("recurrent_mask", "segment_ids")])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_columns_survive_the_trainer_and_act(
    side: Any, columns: tuple[str, ...], wrapped: bool, tmp_path: Path
) -> None:
    model: Any = make_t2mlr("llama", solver=cc.Sequential()).float()
    if wrapped:
        model = get_peft_model(model, lora_config(model, r=2))
    trainer = trainer_of(model, tmp_path, columns, side)
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "attention_mask", *columns}
    loss = trainer.compute_loss(trainer.model, dict(batch)).item()
    without = {name: value for name, value in batch.items() if name not in columns}
    assert abs(model(**without).loss.item() - loss) > 1e-3

    rows = []
    for example in EXAMPLES:
        row = {name: torch.tensor([example[name]]) for name in ("input_ids", *columns)}
        counted = len(example["input_ids"]) - (2 if "segment_ids" in columns else 1)
        rows.append((model(**row, labels=row["input_ids"]).loss.item() * counted, counted))
    expected = sum(total for total, _ in rows) / sum(count for _, count in rows)
    assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_a_trainer_run_with_columns_and_checkpointing(wrapped: bool, tmp_path: Path) -> None:
    """A whole run, with gradient checkpointing switched on by the Trainer: the fusion moves."""
    model: Any = make_t2mlr("llama", solver=cc.Jacobi(4, 2)).float()
    if wrapped:
        model = get_peft_model(model, lora_config(model, r=2))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    arguments: Any = {"max_steps": 2, "learning_rate": 0.01, "gradient_checkpointing": True, "save_strategy": "no"}
    trainer_of(model, tmp_path, ("recurrent_mask", "segment_ids"), **arguments).train()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


def test_collator_says_what_is_wrong() -> None:
    collator = PaddingCollator(pad_token_id=0, required=("recurrent_mask",))
    with pytest.raises(ValueError, match=r"recurrent_mask.*remove_unused_columns=False"):
        collator([{"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match=r"example 1.*segment_ids"):
        PaddingCollator(0)([{"input_ids": [1], "segment_ids": [0]}, {"input_ids": [1]}])
    with pytest.raises(ValueError, match="one value per token"):
        PaddingCollator(0)([{"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(ValueError, match="at least one example"):
        PaddingCollator(0)([])
    with pytest.raises(ValueError, match="give integers"):
        PaddingCollator(0)([{"input_ids": [1.5, 2.0]}])
    with pytest.raises(ValueError, match="no input_ids"):
        PaddingCollator(0)([{"text": "x"}])
    with pytest.raises(ValueError, match="'middle'"):
        PaddingCollator(0, padding_side="middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs labels and no recurrent_mask"):
        AnswerRecurrence(PaddingCollator(0))([{"input_ids": [1], "recurrent_mask": [1]}])


def test_collator_pads_on_either_side() -> None:
    examples = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "segment_ids": torch.tensor([0, 0, 1]), "text": "left out"},
        {"input_ids": [8], "labels": [8], "segment_ids": [3]},
    ]
    right, left = (PaddingCollator(2, side)(examples) for side in ("right", "left"))  # type: ignore[arg-type]
    assert set(right) == {"input_ids", "labels", "attention_mask", "segment_ids"}
    assert right["input_ids"].tolist() == [[5, 6, 7], [8, 2, 2]] and left["input_ids"].tolist()[1] == [2, 2, 8]
    assert right["labels"].tolist()[1] == [8, -100, -100] and left["labels"].tolist()[1] == [-100, -100, 8]
    assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]] and left["attention_mask"].tolist()[1] == [
        0,
        0,
        1,
    ]
    assert left["segment_ids"].tolist() == [[0, 0, 1], [0, 0, 3]]
    assert all(value.dtype == torch.int64 for value in right.values())
