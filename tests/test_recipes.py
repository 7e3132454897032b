"""Recipes and studies: what is filled in, what is refused and how it is said, and that all shipped ones are whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

import crosscurrent as cc
from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.experiments.kinds import load_recipe
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run import build_model
from crosscurrent.experiments.settings import merge, overrides, read_yaml, validated, write_yaml
from crosscurrent.experiments.study import (
    find_recipe,
    find_study,
    load_study,
    recipe_names,
    shipped_studies,
)
from crosscurrent.experiments.text_recipe import TextRecipe
from crosscurrent.tasks import get_task
from tests.recipes import MODELS, study_defaults, tiny_recipe, tiny_values


def refused(change: str) -> str:
    model = "gpt2" if "model_type" in change else "rlt-1"  # the keys of a model depend on its architecture
    with pytest.raises(ValueError) as caught:
        validated(Recipe, merge(tiny_values(model), overrides([change])), "my.yaml")
    text = str(caught.value)
    assert text.startswith("my.yaml: ") and "function-" not in text and "for Recipe" not in text
    return text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("task.name=partiy", ["task: ", "'partiy'", "'parity'"]),
        ("training.max_step=3", ["training", "'max_step'", "'max_steps'"]),
        ("trainig.max_steps=3", ["'trainig'", "'training'"]),
        ("model.feedback_intervall=3", ["model", "'feedback_interval'"]),
        ("training.max_steps=two", ["training.max_steps", "'two'"]),
        ("model.solver={name: jacobi, tolerance: 1e-12}", ["tolerance='1e-12'", "positive number"]),
        ("model.solver={name: [jacobi]}", ["['jacobi']"]),
        ("model.feedback_interval=99999999999999999999", ["model.feedback_interval"]),
        ("model.hidden_size=99999999999999999999", ["model.hidden_size"]),
        ("model.feedback_scale=true", ["feedback_scale=True"]),
        ("curriculum.feedback_interval={steps: [[0, -3]]}", ["feedback_interval", "-3"]),
        ("curriculum.max_length={ramp: [5, 0], num_steps: 3}", ["max_length", "0"]),
        ("curriculum.feedback_scale={ramp: [1e308, -1e308], num_steps: 3}", ["finite"]),
        ("task.train_lengths=[99999999999999999999]", ["at most"]),
        ("seed=4294967296", ["seed"]),
        ("training.max_steps=true", ["training: max_steps=True"]),
        ("training.max_steps=2.5", ["training.max_steps", "2.5"]),
        ("task.prefix_supervision=1", ["task.prefix_supervision", "1"]),
        ("task.tset_lengths=null", ["'tset_lengths'", "'test_lengths'"]),
        ("task.name=3", ["task.name", "3"]),
        ("model.hidden_size=15", ["hidden_size=15"]),
        ("training.max_steps=0", ["training.max_steps", "greater than or equal to 1", "0"]),
        ("training.precision=fp8", ["training.precision", "'bf16'", "'fp8'"]),
        ("training.learning_rate=nan", ["training.learning_rate", "finite"]),
        ("training.microbatch_size=3", ["batch_size=8", "microbatch_size=3"]),
        ("training.min_learning_rate=1", ["min_learning_rate=1.0", "learning_rate=0.01"]),
        ("model.architecture=rtl", ["model", "'rtl'", "Did you mean 'rlt'?", "lstm"]),
        ("model.num_decoder_layers=2", ["num_decoder_layers=2", "num_hidden_layers=2"]),
        ("model=3", ["model"]),
        ("task.test_lengths=[4, 9]", ["length=4", "parity", "at least 8"]),
        ("task.test_lengths=[9, 9]", ["test_lengths=[9, 9]", "once"]),
        ("task.train_lengths=[]", ["train_lengths=[]"]),
        ("seed=-1", ["seed", "-1"]),
        ("seed=null", ["seed", "None"]),
        ("model.vocab_size=2", ["model.vocab_size=2", "at least 3"]),
        ("curriculum.max_length=3", ["curriculum.max_length"]),
        ("curriculum.max_length={steps: [[1, 2]]}", ["curriculum.max_length", "[1]", "start at 0"]),
        ("curriculum.max_length={ramp: [1, 2]}", ["curriculum.max_length", "num_steps"]),
        ("curriculum.max_length={ramp: [1, 2], num_step: 3}", ["'num_step'", "'num_steps'"]),
        ("evaluation.solver={name: jacoby}", ["jacoby", "jacobi"]),
        ("model={model_type: gpt2, settings: {n_headd: 3}}", ["'n_headd'", "'n_head'"]),
        ("model={model_type: gpt2, settings: {n_head: 3}}", ["n_head is given"]),
        ("model={model_type: gpt2, settings: {activation_function: nope}}", ["nope"]),
        ("model={model_type: gpt2, settings: {use_cache: no-string}}", ["use_cache"]),
        ("model={model_type: gpt2, settings: {n_positions: 15}}", ["15 tokens", "41"]),
        ("model={model_type: xlnet}", ["make a model"]),
        ("model.model_type=gpt3", ["model.model_type", "'gpt3'", "'gpt2'"]),
        ("model.solver={name: jacobi, iterations: 0}", ["iterations"]),
    ],
)
def test_what_is_wrong_is_named(change: str, words: list[str]) -> None:
    text = refused(change)
    for word in words:
        assert word in text, text


def test_settings_that_would_have_no_effect_are_refused() -> None:
    rlt0, transformer = tiny_values("rlt-0"), tiny_values("transformer")
    for values, change, word in (
        (rlt0, "curriculum.feedback_interval={steps: [[0, 4]]}", "feedback_interval"),
        (transformer, "curriculum.feedback_scale={steps: [[0, 4]]}", "feedback_scale"),
        (transformer, "evaluation.solver={name: sequential}", "evaluation.solver"),
        (tiny_values("lstm"), "training.mup_base_width=8", "mup_base_width"),
    ):
        with pytest.raises(ValueError, match=word):
            validated(Recipe, merge(values, overrides([change])), "x")


def test_the_resolved_recipe_says_everything_and_reads_back(tmp_path: Path) -> None:
    recipe = tiny_recipe("rlt-2", curriculum={"max_length": {"ramp": [4, 32], "num_steps": 3}})
    text = write_yaml(recipe)
    (tmp_path / "recipe.yaml").write_text(text)
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    values = yaml.safe_load(text)
    assert values["task"]["train_lengths"] == list(get_task("parity").lengths.train)
    assert values["task"]["prefix_supervision"] is False and values["data_seeds"]["test"] == 20260916


def test_overrides_reach_any_value(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tiny_values()))
    name, recipe = find_recipe(
        str(tmp_path / "my.yaml"), overrides(["training.max_steps=3", "model.feedback_interval=null", "seed=9"])
    )
    assert name == "my" and recipe.training.max_steps == 3 and recipe.seed == 9
    assert recipe.model.feedback_interval is None  # type: ignore[union-attr]
    for wrong in (["training.max_steps"], ["=3"], ["training..max_steps=3"], ["seed={"], ["seed={a: 1, a: 2}"]):
        with pytest.raises(ValueError, match=r"training|YAML"):
            overrides(wrong)
    for twice in (["training=5", "training.max_steps=2"], ["seed=1", "seed=2"]):
        with pytest.raises(ValueError, match="given twice"):
            overrides(twice)


@pytest.mark.parametrize("text", ["- a\n", "a: [1\n", "a: " + 2000 * "[", "seed: 1\nseed: 2\n", "", "3", "\xff"])
def test_files_that_are_no_recipes_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"bad\.yaml"):
        load_recipe(tmp_path / "bad.yaml")


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text("task: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match=r"evil\.yaml"):
        read_yaml(tmp_path / "evil.yaml")


@pytest.mark.parametrize("model", MODELS)
def test_one_way_of_giving_a_size(model: str) -> None:
    built = build_model(tiny_recipe(model))
    assert built.config.hidden_size == 16 and built.config.num_hidden_layers == 2
    assert built.config.vocab_size == 3


def study(**changes: Any) -> dict[str, Any]:
    values = {
        "description": "two cells",
        "seeds": [1, 2],
        "defaults": study_defaults("transformer"),
        "tasks": {"parity": {}, "swaps": {"task": {"name": "s5_swaps"}}},
        "models": {"a": {}, "b": {"model": {"hidden_size": 8}}},
    }
    return values | changes


def load(tmp_path: Path, values: dict[str, Any]) -> Any:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    return load_study(tmp_path / "study.yaml")


def test_a_study_plans_its_grid(tmp_path: Path) -> None:
    found = load(tmp_path, study())
    names = [run.name for run in found.plan("s")]
    cells = ["parity/a", "parity/b", "swaps/a", "swaps/b"]
    assert names == [f"{cell}/seed-{seed}" for seed in (1, 2) for cell in cells]
    (run,) = found.plan("s", ["swaps"], ["b"], [2], {"training": {"max_steps": 1}})
    assert run.recipe.model.hidden_size == 8 and run.recipe.seed == 2 and run.recipe.training.max_steps == 1
    cells_only = load(
        tmp_path, study(cells=[{"tasks": ["parity"], "models": ["b"], "changes": {"model": {"hidden_size": 4}}}])
    )
    assert [run.name for run in cells_only.plan("s")] == ["parity/b/seed-1", "parity/b/seed-2"]
    assert cells_only.plan("s")[0].recipe.model.hidden_size == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": [1, 1]}, ["seeds=[1, 1]", "once"]),
        ({"seeds": []}, ["seeds=[]"]),
        ({"sedes": [1]}, ["'sedes'", "'seeds'"]),
        ({"cells": [{"tasks": ["partiy"], "models": ["a"]}]}, ["cells[0]", "'partiy'", "'parity'"]),
        ({"cells": [{"tasks": ["parity", "parity"], "models": ["a"]}]}, ["a on parity", "twice"]),
        ({"tasks": {"../evil": {}}}, ["../evil"]),
        ({"tasks": {}}, ["needs tasks"]),
        ({"cells": [{"tasks": [], "models": ["a"]}]}, ["needs tasks"]),
        ({"defaults": {"seed": 3}}, ["seed", "`seeds`"]),
    ],
)
def test_wrong_studies_are_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load(tmp_path, study(**changes))
    assert "study.yaml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_wrong_parts_of_a_plan_are_refused(tmp_path: Path) -> None:
    found = load(tmp_path, study())
    for arguments, word in (
        ({"tasks": ["swap"]}, "'swaps'"),
        ({"models": ["c"]}, "Allowed: a, b"),
        ({"seeds": [3]}, r"some of \[1, 2\]"),
        ({"seeds": [1, 1]}, "once"),
        ({"changes": {"seed": 5}}, "cannot be changed"),
    ):
        with pytest.raises(ValueError, match=word):
            found.plan("s", **arguments)
    broken = load(tmp_path, study(models={"a": {"model": {"hidden_sise": 8}}}))
    with pytest.raises(ValueError, match=r"s, parity/a: model.*'hidden_size'"):
        broken.plan("s")


def test_names_of_shipped_ones_are_suggested() -> None:
    with pytest.raises(ValueError, match="rlt/mini"):
        find_study("rlt", "minni")
    with pytest.raises(ValueError, match="rlt/mini/parity/rlt-1"):
        find_recipe("rlt/mini/parity/rlt1", {})
    with pytest.raises(ValueError, match="--scale mini or --scale paper"):
        find_study("rlt")
    with pytest.raises(ValueError, match="no effect"):
        find_study("my.yaml", "mini")
    with pytest.raises(OSError, match=r"absent\.yaml"):
        find_recipe("absent.yaml", {})


def test_names_of_shipped_ones_may_have_hyphens() -> None:
    for name, scale, found in (
        ("rlt-beyond", None, "rlt/beyond/mini"),
        ("rlt/beyond", "mini", "rlt/beyond/mini"),
        ("rlt-beyond-mini", None, "rlt/beyond/mini"),
        ("rlt-mini", None, "rlt/mini"),
        ("s5-retrieval", "paper", "s5_retrieval/paper"),
    ):
        assert find_study(name, scale)[0] == found


@pytest.mark.parametrize("name", shipped_studies())
def test_shipped_studies_are_whole(name: str) -> None:
    _, found = find_study(name)
    runs = found.plan(name)
    assert found.seeds == (42, 43, 44)
    assert {f"{name}/{run.task}/{run.model}" for run in runs} <= set(recipe_names())
    for prefix, kind in (("text/", TextRecipe), ("reasoning/", FinetuneRecipe)):
        if name.startswith(prefix):
            assert all(isinstance(run.recipe, kind) for run in runs)
            return
    retrieval = {"s5_retrieval", "s5_retrieval_state"}
    tracking = {"parity", "s5_standard", "s5_swaps", "mod5_flat", "mod5_brackets", "addition"}
    names = {run.recipe.task.name.removesuffix("_places") for run in runs}
    assert names >= (retrieval if name.startswith("s5_retrieval/") else tracking)
    assert all(run.recipe.data_seeds.train == 20260914 for run in runs)


def test_the_paper_recipes_have_the_published_sizes() -> None:
    millions = {"rlt-1-4+4": 28.73, "rlt-1-5+3": 28.20, "rlt-1-6+2": 27.68, "rlt-1-7+1": 27.15, "rlt-1-8+0": 26.10}
    for model, size in (*millions.items(), ("transformer", 25.31)):
        _, recipe = find_recipe(f"rlt/paper/parity/{model}", {})
        assert round(build_model(recipe).num_parameters() / 1e6, 2) == pytest.approx(size, abs=0.006), model
    _, recipe = find_recipe("rlt/paper/parity/rlt-0", {})
    assert build_model(recipe).num_parameters() == 27_938_944
    training = recipe.training
    assert (training.batch_size, training.microbatch_size, training.max_steps) == (512, 32, 2000)
    assert (training.learning_rate, training.min_learning_rate, training.warmup_steps) == (1e-4, 5e-6, 200)
    assert find_recipe("rlt/paper/mod5_flat/rlt-0", {})[1].training.max_steps == 5000
    assert isinstance(build_model(find_recipe("rlt/mini/parity/transformer", {})[1]), LlamaForCausalLM)
    assert isinstance(build_model(find_recipe("rlt/mini/parity/t2mlr", {})[1]), cc.T2MLRForCausalLM)


@pytest.mark.parametrize("model", ["transformer", "t2mlr"])
@pytest.mark.parametrize("positions", ["none", "rope"])
def test_without_positions_the_order_of_the_context_makes_no_difference(model: str, positions: str) -> None:
    """To one layer of attention. In a T2MLR the context is a prompt, since the order of recurrent tokens counts."""
    sizes = {"num_hidden_layers": 1, "positions": positions}
    recipe = tiny_recipe(model, model=sizes | ({"layer_start": 0, "layer_end": 1} if model == "t2mlr" else {}))
    built = build_model(recipe).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(5.0)
    ids = torch.tensor([[2, 0, 0, 1, 1, 0, 1], [1, 0, 2, 0, 1, 0, 1]])
    mask = {"recurrent_mask": (torch.arange(7) >= 6).expand_as(ids)} if model == "t2mlr" else {}
    one, other = built(ids, **mask, use_cache=False).logits[:, -1]
    assert torch.allclose(one, other, atol=1e-5) == (positions == "none")


def test_a_t2mlr_without_positions_is_solved_saved_and_generates_as_any(tmp_path: Path) -> None:
    built = build_model(tiny_recipe("t2mlr", model={"positions": "none"})).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.mul_(3.0).add_(0.3 if "_scale" in name else 0.0)
    built.save_pretrained(tmp_path)
    loaded = cc.T2MLRForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[2, 0, 1, 1, 0, 1]])
    exact = built(ids, solver=cc.Sequential(), use_cache=False).logits
    assert torch.equal(loaded(ids, solver=cc.Sequential(), use_cache=False).logits, exact)
    iterated = built(ids, solver=cc.Jacobi(iterations=6, backward_iterations=6), use_cache=False).logits
    assert torch.allclose(iterated, exact, atol=1e-5)
    written = loaded.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for stop in range(6, 10):
        logits = built(written[:, :stop], solver=cc.Sequential(), use_cache=False).logits
        assert int(logits[0, -1].argmax()) == int(written[0, stop])


@pytest.mark.parametrize("scale", ["mini", "paper"])
def test_models_of_s5_retrieval_are_of_equal_size(scale: str) -> None:
    sizes = {}
    for model in ("t2mlr", "transformer", "lstm"):
        _, recipe = find_recipe(f"s5_retrieval/{scale}/s5_retrieval/{model}")
        with torch.device("meta"):
            built = recipe.model.build(recipe.vocab_size)
        sizes[model] = built.num_parameters()
        if model != "lstm":
            assert not any(layer.self_attn.use_rope for layer in built.model.layers)
    assert max(sizes.values()) < 1.05 * min(sizes.values()), sizes


def test_the_s5_retrieval_recipe_is_the_published_one() -> None:
    _, recipe = find_recipe("s5_retrieval/paper/s5_retrieval/t2mlr")
    assert (recipe.training.batch_size, recipe.training.max_steps, recipe.training.learning_rate) == (64, 150_000, 1e-3)
    assert (recipe.model.hidden_size, recipe.model.num_hidden_layers) == (384, 4)
    assert (recipe.model.layer_start, recipe.model.layer_end) == (0, 4)  # all layers are recurrent
    assert recipe.task.train_lengths == tuple(range(1, 33)) and max(recipe.task.test_lengths) == 48


@pytest.mark.parametrize(("shape", "layers"), [("135m", "12-18"), ("360m", "13-19"), ("1b", "6-9")])
def test_the_pretraining_recipes_are_the_published_ones(shape: str, layers: str) -> None:
    """Hyperparameters as the T2MLR paper gives them, and a baseline with as many parameters."""
    sizes = {}
    for model in ("baseline", "baseline-matched", f"t2mlr-{layers}"):
        _, recipe = find_recipe(f"text/{shape}/fineweb_edu/{model}")
        training = recipe.training
        assert recipe.data.sequence_length * training.batch_size * training.max_steps == pytest.approx(10e9, rel=1e-4)
        assert (training.learning_rate, training.adam_beta2, training.weight_decay) == (6e-4, 0.98, 0.01)
        assert training.min_learning_rate == pytest.approx(1e-3 * training.learning_rate)
        assert training.warmup_steps == pytest.approx(0.05 * training.max_steps, rel=1e-3)
        with torch.device("meta"):
            sizes[model] = recipe.model.build(recipe.model.vocab_size).num_parameters()
    assert sizes["baseline-matched"] == pytest.approx(sizes[f"t2mlr-{layers}"], rel=1e-3)
    assert recipe.model.solver == {"name": "jacobi", "iterations": 16, "backward_iterations": 4}


@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gemma", "mamba"])
def test_other_models_of_transformers_join_by_their_type(model_type: str) -> None:
    model = build_model(tiny_recipe("gpt2", model={"model_type": model_type}))
    assert model.config.model_type == model_type and model.config.num_hidden_layers == 2


def test_older_names_of_sizes_are_known() -> None:
    assert build_model(tiny_recipe("gpt2")).config.n_inner == 24


def test_studies_and_recipes_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study()))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_values()))
    with pytest.raises(ValueError, match="crosscurrent reproduce"):
        load_recipe(tmp_path / "study.yaml")
    with pytest.raises(ValueError, match="crosscurrent train"):
        load_study(tmp_path / "recipe.yaml")


def test_a_misspelt_task_is_all_that_is_complained_about() -> None:
    assert "Field required" not in refused("task.name=partiy")


def test_anchors_of_yaml_work(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: &base {a: 1, b: 2}\ny: {<<: *base, b: 3}\n")
    assert read_yaml(tmp_path / "a.yaml")["y"] == {"a": 1, "b": 3}


def test_the_study_in_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "study.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (text,) = [block for block in blocks if "cells:" in block]
    (tmp_path / "my-study.yaml").write_text(text)
    assert len(load_study(tmp_path / "my-study.yaml").plan("my-study")) == 9
    (recipe,) = [block for block in blocks if "cells:" not in block]
    (tmp_path / "my.yaml").write_text(recipe)
    found = load_recipe(tmp_path / "my.yaml")
    assert not isinstance(found, FinetuneRecipe) and found.curriculum.feedback_interval is not None
