"""Checkpoints of the T2MLR authors' code: the same numbers as that code computes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import crosscurrent as cc
from tests.subjects import largest_difference

RECURRENT = 2  # of the released code's control flow; 1: not recurrent


@pytest.fixture
def folder() -> Path:
    """A tiny checkpoint that the released code has saved, and what it computes. `.ci/run` says where."""
    if "CROSSCURRENT_TEST_ORACLE" not in os.environ:
        pytest.skip("CROSSCURRENT_TEST_ORACLE is not set")
    return Path(os.environ["CROSSCURRENT_TEST_ORACLE"]) / "t2mlr_released_tiny"


@pytest.fixture
def expected(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "expected.safetensors")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "released", copy_function=shutil.copyfile))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SOLVERS = {"exact": cc.Sequential(), "D4": cc.Jacobi(4, 1), "D20": cc.Jacobi(20, 1)}


@pytest.mark.parametrize("mask", ["all", "partial"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_logits(folder: Path, expected: dict[str, Tensor], mask: str, solver: str) -> None:
    model = cc.T2MLRForCausalLM.from_released(folder)
    recurrent = expected[f"control_flows_{mask}"] == RECURRENT
    logits = model(expected["input_ids"], recurrent_mask=recurrent, solver=SOLVERS[solver]).logits
    assert largest_difference(logits, expected[f"logits_{mask}_{solver}"]) < 1e-5


def test_its_base(folder: Path, expected: dict[str, Tensor]) -> None:
    ids = expected["input_ids"]
    model = cc.T2MLRForCausalLM.from_released(folder)
    assert largest_difference(model(ids, recurrent_mask=torch.zeros_like(ids)).logits, expected["logits_base"]) < 1e-5


def test_generation(folder: Path, expected: dict[str, Tensor]) -> None:
    model = cc.T2MLRForCausalLM.from_released(folder)
    found = model.generate(expected["input_ids"][:1, :6], max_new_tokens=10, do_sample=False)
    assert torch.equal(found, expected["generated_prompt6_new10"])


def test_settings_of_the_released_code_become_configuration(folder: Path) -> None:
    config = cc.T2MLRForCausalLM.from_released(folder).config
    assert (config.layer_start, config.layer_end) == (2, 4)
    assert (config.gates_read, config.state_bound, config.residual_weight) == ("projected_state", 5.0, 1.0)
    assert config.solver["iterations"] == config.solver["backward_iterations"] == 20
    assert config.prompt_recurrence is False


def test_saved_again_it_is_an_ordinary_model(folder: Path, expected: dict[str, Tensor], tmp_path: Path) -> None:
    model = cc.T2MLRForCausalLM.from_released(folder, solver=cc.Sequential(), prompt_recurrence=True)
    model.save_pretrained(tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["model_type"] == "crosscurrent_t2mlr" and saved["prompt_recurrence"] is True
    again = cc.T2MLRForCausalLM.from_pretrained(tmp_path / "ours")
    ids = expected["input_ids"]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert largest_difference(again(ids).logits, expected["logits_all_exact"]) < 1e-5


def test_weighted_and_detached_residual(copied: Path, expected: dict[str, Tensor]) -> None:
    edit(copied, recurrent_residual_to_recurrent_cache_weight=0.5, recurrent_residual_to_recurrent_cache_detach=True)
    model = cc.T2MLRForCausalLM.from_released(copied)
    assert model.config.residual_weight == 0.5 and model.config.detach_residual
    assert model.carry.residual_weight == 0.5 and model.carry.detach_residual
    ids = expected["input_ids"]
    assert largest_difference(model(ids, solver=cc.Sequential()).logits, expected["logits_all_exact"]) > 1e-3


def test_gradient_reaches_every_weight_of_the_fusion(folder: Path, expected: dict[str, Tensor]) -> None:
    model = cc.T2MLRForCausalLM.from_released(folder)
    ids = expected["input_ids"]
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.fusion.parameters())


def test_the_last_iterations_carry_gradient_as_there(copied: Path) -> None:
    """Its backward depth K leaves gradient in K + 1 passes."""
    edit(copied, batch_backward_approximate_depth=3)
    assert cc.T2MLRForCausalLM.from_released(copied).config.solver["backward_iterations"] == 4


def test_its_generation_settings_and_dtype_come_along(copied: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "max_new_tokens": 5}))
    edit(copied, dtype="bfloat16")
    model = cc.T2MLRForCausalLM.from_released(copied)
    assert model.generation_config.eos_token_id == 7 and model.generation_config.max_new_tokens == 5
    assert model.dtype == torch.bfloat16 and model.fusion.current_scale.dtype == torch.float32
    assert cc.T2MLRForCausalLM.from_released(copied, dtype=torch.float32).dtype == torch.float32


def test_the_call_in_its_card_makes_such_a_model(folder: Path) -> None:
    from crosscurrent.models.model_card import model_card

    model = cc.T2MLRForCausalLM.from_released(folder)
    code = str(model_card(model)).split("```python\n")[-1].split("\n```")[0]
    base = type("Base", (), {"config": model.config.base_config})
    made = eval(code, {"crosscurrent": cc, "base": base})
    assert made.config.gates_read == "projected_state" and made.config.solver == model.config.solver


def _shard(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded(copied: Path, expected: dict[str, Tensor]) -> None:
    _shard(copied)
    ids = expected["input_ids"]
    logits = cc.T2MLRForCausalLM.from_released(copied)(ids, solver=cc.Sequential()).logits
    assert largest_difference(logits, expected["logits_all_exact"]) < 1e-5


def _strange_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


def _drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["t2mlr_model.model.layers.2.t2mlr_mixing_module.recurrent_projection.weight"]
    save_file(weights, folder / "model.safetensors")


def _add_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"t2mlr_model.extra.weight": torch.ones(2)}, folder / "model.safetensors")


def _cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _drop_the_fusion(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    plain = {name: weight for name, weight in weights.items() if "mixing_module" not in name}
    save_file(plain, folder / "model.safetensors")


def _drop_a_setting(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    del settings["l_start"]
    (folder / "config.json").write_text(json.dumps(settings))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another kind of mixing": (lambda folder: edit(folder, recurrent_mixing_module_name="mlp"), "no counterpart here"),
    "another option": (lambda folder: edit(folder, concat_recurrent=True), "only concat_recurrent=False"),
    "a scalar per channel": (
        lambda folder: edit(folder, mixing_module_kwargs={"rezero_gamma_scalar": False}),
        "rezero_gamma_scalar",
    ),
    "one of ours": (lambda folder: edit(folder, model_type="crosscurrent_t2mlr"), "from_pretrained"),
    "no fusion": (_drop_the_fusion, "fusion.recurrent_scale"),
    "a setting is missing": (_drop_a_setting, "l_start"),
    "a setting of another kind": (
        lambda folder: edit(folder, batch_forward_approximate_depth=None),
        "approximate_depth",
    ),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "holds a list"),
    "no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "cannot be read"),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
        "no .safetensors file beside it",
    ),
    "no settings": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "weights cut short": (_cut_short, "cannot be read"),
    "a file from elsewhere": (_strange_index, "which is no .safetensors file beside it"),
    "a weight is missing": (_drop_a_weight, "recurrent_projection.weight"),
    "a weight too many": (_add_a_weight, "extra.weight"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_or_different_checkpoints_are_refused(copied: Path, how: str) -> None:
    damage, message = BROKEN[how]
    damage(copied)
    with pytest.raises(ValueError, match=message):
        cc.T2MLRForCausalLM.from_released(copied)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gates_read": "everything"}, "gates_read='everything'"),
        ({"state_dtype": "int8"}, "state_dtype='int8'"),
        ({"state_bound": 0.5}, "state_bound=0.5"),
        ({"state_eps": -1.0}, "state_eps=-1.0"),
        ({"residual_weight": 0.5, "state_bound": None}, "residual_weight=0.5 has no effect"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cc.T2MLRForCausalLM.from_released(folder, **settings)
