"""Saving, sharing and loading: what is on disk, what loads, and what is refused."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Trainer,
    TrainingArguments,
)

import crosscurrent as cc
from crosscurrent.models import loading
from crosscurrent.models.base import shareable_name
from crosscurrent.models.model_card import model_card
from crosscurrent.models.t2mlr.bases import base_class_of
from crosscurrent.models.weight_names import unwrap_names
from tests.subjects import (
    SIZES,
    T2MLR_BASES,
    largest_difference,
    make_base,
    make_rlt,
    make_t2mlr,
    moved,
    token_ids,
)

MAKERS: dict[str, Callable[[], Any]] = {
    "t2mlr": lambda: make_t2mlr("llama"),
    "t2mlr_tied": lambda: make_t2mlr("gemma3"),
    "rlt": make_rlt,
    "rlt_tied": lambda: make_rlt(tie_encoder_decoder=True),
    "rlt0": lambda: make_rlt(feedback_interval=None),
    "lstm": lambda: moved(cc.LSTMForCausalLM(cc.LSTMConfig(vocab_size=43, hidden_size=16))),
}
each_model = pytest.mark.parametrize("name", MAKERS)
WRAPPERS = ["_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.", "base_model.model."]


def weights_on_disk(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: weight for part in parts for name, weight in part.items()}


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    copies = {name: weight.clone() for name, weight in weights.items()}  # tied weights are one tensor
    save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def assert_same_weights(left: Any, right: Any) -> None:
    one, other = left.state_dict(), right.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def base_folder(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaConfig:
    torch.manual_seed(0)
    base: Any = LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))
    base.to(dtype).save_pretrained(folder)
    return base.config


def t2mlr_config(base_config: Any) -> cc.T2MLRConfig:
    return cc.T2MLRConfig(base_config=base_config, layer_start=1, layer_end=3)


# Files


@each_model
@pytest.mark.parametrize("max_shard_size", ["50GB", "4KB"])
def test_each_weight_is_on_disk_once(name: str, max_shard_size: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors", ".json", ".md"}
    assert (max_shard_size == "4KB") == (tmp_path / "model.safetensors.index.json").exists()
    stored = weights_on_disk(tmp_path)
    assert stored.keys() == {name for name, _ in model.named_parameters()}
    loaded = load(tmp_path)
    assert_same_weights(model, loaded)
    assert {n for n, _ in loaded.named_parameters()} == stored.keys()  # tied again


@pytest.mark.parametrize("name", ["t2mlr_tied", "rlt_tied"])
def test_trainer_saves_each_weight_once(name: str, tmp_path: Path) -> None:
    model, ids = MAKERS[name]().float(), token_ids(1, 5)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=1
        ),
        train_dataset=[{"input_ids": ids[0], "labels": ids[0]}],
    )
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    assert weights_on_disk(folder).keys() == {name for name, _ in model.named_parameters()}
    assert_same_weights(model, load(folder))
    assert (folder / "README.md").exists()


def test_an_earlier_save_is_not_read_again(tmp_path: Path) -> None:
    """transformers leaves model.safetensors lying beside the parts of a later save, and would read it first."""
    first, second = make_t2mlr("llama"), make_t2mlr("llama")
    with torch.no_grad():
        second.lm_head.weight.add_(1.0)
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path, max_shard_size="4KB")
    assert_same_weights(second, load(tmp_path))
    first.save_pretrained(tmp_path)
    assert_same_weights(first, load(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors*"))) == 1


@pytest.mark.parametrize("name", ["t2mlr", "rlt"])
def test_a_save_that_fails_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    from transformers import modeling_utils

    written: list[str] = []
    whole = modeling_utils.safe_save_file

    def disk_full(weights: Any, path: str, **kwargs: Any) -> None:
        if len(written) == 2:
            Path(path).write_bytes(b"half")
            raise OSError("No space left on device")
        written.append(path)
        whole(weights, path, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", disk_full)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(written) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_places_and_formats_that_are_refused(tmp_path: Path) -> None:
    model = make_t2mlr("llama")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="safe_serialization=False is not supported"):
        model.save_pretrained(tmp_path / "model", safe_serialization=False)
    assert not (tmp_path / "model").exists()
    model.save_pretrained(tmp_path / "model", safe_serialization=True)
    with pytest.raises(ValueError, match="use_safetensors=False is not supported"):
        load(tmp_path / "model", use_safetensors=False)


@pytest.mark.parametrize("name", ["t2mlr", "rlt_tied"])
def test_pickled_weights_are_refused_and_can_be_converted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, which can run code") as refused:
        load(tmp_path)
    assert loading.CONVERT in str(refused.value)
    monkeypatch.chdir(tmp_path)
    exec(loading.CONVERT, {})
    assert_same_weights(model, load(tmp_path))


# Names of weights


@pytest.mark.parametrize("name", ["t2mlr_tied", "rlt_tied", "lstm"])
@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrapped_checkpoints_load_and_are_saved_without_prefixes(name: str, prefix: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    names = weights_on_disk(tmp_path).keys()
    write_weights(tmp_path, {prefix + n: weight for n, weight in model.state_dict().items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(tmp_path)
    assert_same_weights(model, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert weights_on_disk(tmp_path / "again").keys() == names
    model.save_pretrained(tmp_path / "given", state_dict={prefix + n: w for n, w in model.state_dict().items()})
    assert weights_on_disk(tmp_path / "given").keys() == names
    assert_same_weights(model, load(tmp_path / "given"))


def test_compiled_models(tmp_path: Path) -> None:
    from accelerate import Accelerator

    model, accelerator = make_t2mlr("llama"), Accelerator(cpu=True)
    names = model.state_dict().keys()
    compiled: Any = torch.compile(model, backend="eager")
    compiled.save_pretrained(tmp_path / "own")
    assert weights_on_disk(tmp_path / "own").keys() == names
    accelerator.save_model(compiled, tmp_path / "accelerate")
    assert all(name.startswith("_orig_mod.") for name in weights_on_disk(tmp_path / "accelerate"))  # not ours to write
    model.config.save_pretrained(tmp_path / "accelerate")
    assert_same_weights(model, load(tmp_path / "accelerate"))
    model.save_pretrained(tmp_path / "state", state_dict=accelerator.get_state_dict(compiled))
    assert weights_on_disk(tmp_path / "state").keys() == names
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    assert any("mlp._orig_mod." in name for name in model.state_dict())
    model.save_pretrained(tmp_path / "part")
    assert weights_on_disk(tmp_path / "part").keys() == names
    write_weights(tmp_path / "part", model.state_dict())
    assert_same_weights(load(tmp_path / "part"), load(tmp_path / "own"))


def test_merged_adapters(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model, ids = make_t2mlr("llama"), token_ids(2, 6)
    adapted: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"weights are missing: .*q_proj\.weight.* save model\.merge_and_unload"):
        load(tmp_path)
    merged = adapted.eval().merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert weights_on_disk(tmp_path).keys() == make_t2mlr("llama").state_dict().keys()
    loaded = load(tmp_path).double()
    assert torch.equal(loaded(ids).logits, merged.double()(ids).logits)


def test_two_weights_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"both module\.a and a"):
        unwrap_names({"a": 1, "module.a": 2, "b": 3})


@each_model
def test_a_checkpoint_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    MAKERS[name]().save_pretrained(tmp_path)
    write_weights(tmp_path, {"encoder.weight": torch.zeros(2), "encoder.bias": torch.zeros(2)})
    with pytest.raises(
        ValueError, match=r"none of the weights .* It holds encoder\.bias, encoder\.weight; the model needs"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", ["t2mlr", "rlt"])
def test_weights_without_a_place_are_named(name: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    write_weights(tmp_path, model.state_dict() | {"v_head.weight": torch.zeros(3)})
    with pytest.warns(UserWarning, match=r"no place for these weights, which are left out: v_head\.weight\."):
        loaded = load(tmp_path)
    assert_same_weights(model, loaded)


# Devices


@pytest.mark.parametrize("name", ["t2mlr", "t2mlr_tied", "rlt", "rlt_tied", "rlt0"])
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_maps(name: str, device_map: Any, tmp_path: Path) -> None:
    model, ids = MAKERS[name]().float(), token_ids(2, 7)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, device_map=device_map)
    assert torch.equal(loaded(ids).logits, load(tmp_path)(ids).logits)


@pytest.mark.parametrize("name", ["t2mlr", "t2mlr_tied", "rlt", "rlt0"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_layers_offloaded_to_disk(name: str, share: float, tmp_path: Path) -> None:
    """The part of the model that fits into memory stays there; the recurrence's own weights always do."""
    model, ids = MAKERS[name]().float(), token_ids(2, 7)
    model.save_pretrained(tmp_path)
    size = sum(p.numel() for p in model.parameters()) * 4
    loaded = load(tmp_path, device_map="auto", max_memory={"cpu": int(share * size)}, offload_folder=tmp_path / "out")
    on_disk = {name for name, p in loaded.named_parameters() if p.device.type == "meta"}
    assert "disk" in loaded.hf_device_map.values() and (on_disk or share > 0.5)
    assert not any(name.startswith(loaded.resident_modules) for name in on_disk)
    whole = load(tmp_path)
    # An RLT's steps share weights only if these stay where they are: then they round differently.
    tolerance = 1e-5 if name == "rlt" else 0.0
    assert largest_difference(loaded(ids).logits, whole(ids).logits) <= tolerance
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **settings), whole.generate(ids, **settings))


def test_layers_are_not_divided_among_devices() -> None:
    base: Any = make_base("llama")
    parts = {"LlamaDecoderLayer", "GatedFusion", "NormalizedSum"}
    assert cc.retrofit(base, 1, 3)._no_split_modules == parts and base._no_split_modules == {"LlamaDecoderLayer"}
    assert make_rlt()._no_split_modules == {"EncoderLayer", "DecoderLayer"}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_layers_that_share_weights_are_not_divided(share: float) -> None:
    from accelerate import infer_auto_device_map

    model = make_rlt(tie_encoder_decoder=True)
    memory = {0: int(share * sum(p.numel() for p in model.parameters()) * 8), "cpu": 10**9}
    placed = infer_auto_device_map(model, memory, no_split_module_classes=list(model._no_split_modules or ()))
    assert "cpu" in placed.values() and len({device for name, device in placed.items() if "coder" in name}) <= 1


# Processes that have not imported crosscurrent


def test_without_crosscurrent_one_message_names_it(tmp_path: Path) -> None:
    """Nothing but the name of the architecture reaches that message; code from a checkpoint is never run."""
    make_t2mlr("llama").save_pretrained(tmp_path)
    code = (
        "import transformers\n"
        "for trust in (False, True):\n"
        "    try:\n"
        f"        transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=trust)\n"
        "    except ValueError as error:\n"
        "        print(error.args[0].splitlines()[0])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    start = (
        "The checkpoint you are trying to load has model type `crosscurrent_t2mlr` but Transformers does not recognize"
    )
    assert len(said) == 2 and all(line.startswith(start) for line in said)
    assert "pip install crosscurrent" in (tmp_path / "README.md").read_text()
    assert "auto_map" not in (tmp_path / "config.json").read_text()


# Vocabularies


@pytest.mark.parametrize("kind", ["t2mlr", "rlt"])
@pytest.mark.parametrize("tied", [False, True])
def test_resized_vocabularies(kind: str, tied: bool, tmp_path: Path) -> None:
    if kind == "rlt":
        model: Any = make_rlt(tie_word_embeddings=tied)
    else:
        torch.manual_seed(0)
        base: Any = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()
        model = cc.retrofit(base, 1, 3)
        moved(model.fusion), moved(model.carry)
    model.float()
    embedding, head = model.get_input_embeddings().weight.clone(), model.lm_head.weight.clone()
    model.resize_token_embeddings(45)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.config.vocab_size == loaded.config.get_text_config().vocab_size == 45
    assert torch.equal(loaded.get_input_embeddings().weight[:43], embedding)
    assert torch.equal(loaded.lm_head.weight[:43], head) and loaded.lm_head.weight.shape[0] == 45
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    new = torch.tensor([[43, 44, 1]])
    assert torch.equal(loaded(new, labels=new).logits, model(new).logits)
    assert loaded.generate(new, max_new_tokens=3, do_sample=False).shape == (1, 6)


# Base checkpoints in our class


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", ["auto", torch.float32, torch.bfloat16, torch.float16, None], ids=str)
def test_a_base_checkpoint_lacks_the_recurrence_only(stored: torch.dtype, asked: Any, tmp_path: Path) -> None:
    """In the memory of the test's run, which is filled with NaN: weights that stay uninitialised show."""
    config = t2mlr_config(base_folder(tmp_path, stored, hidden_size=32, initializer_range=0.05))
    settings = {} if asked is None else {"dtype": asked}
    result: Any = cc.T2MLRForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True, **settings)
    model, info = result
    assert set(info["missing_keys"]) == model.new_weight_names() == names_of(model, "fusion.", "carry.")
    assert not info["unexpected_keys"]
    assert model.dtype == (stored if asked in ("auto", None) else asked)
    recurrent = model.new_weight_names()
    assert {p.dtype for name, p in model.named_parameters() if name not in recurrent} == {model.dtype}
    assert {p.dtype for name, p in model.named_parameters() if name in recurrent} == {torch.float32}
    fusion = model.fusion
    assert fusion.current_scale == fusion.recurrent_scale == 0 and bool((model.carry.norm.weight == 1).all())
    for gate in (fusion.current_gate, fusion.recurrent_gate):
        assert bool((gate.from_state.bias == 0).all())
    for matrix in (p for p in fusion.parameters() if p.dim() == 2):
        assert matrix.float().std().item() == pytest.approx(0.05, rel=0.15)
    ids = token_ids(2, 6)
    assert torch.equal(model(ids).logits, load(tmp_path, dtype=model.dtype)(ids).logits)


def names_of(model: PreTrainedModel, *prefixes: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}


RENAMED_ON_DISK: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8
    ),
}


@pytest.mark.parametrize("name", [*T2MLR_BASES, *RENAMED_ON_DISK])
def test_each_base_checkpoint_lacks_the_recurrence_only(name: str, tmp_path: Path) -> None:
    """Also where weights have other names on disk, or are divided otherwise: Pythia's output matrix, experts."""
    config, ids = (RENAMED_ON_DISK | T2MLR_BASES)[name](), token_ids(2, 6)
    torch.manual_seed(0)
    base_class_of(config)(config).save_pretrained(tmp_path / "base")
    base = load(tmp_path / "base")
    expected, names = base(ids).logits, weights_on_disk(tmp_path / "base").keys()
    given = cc.T2MLRForCausalLM.from_pretrained(tmp_path / "base", config=t2mlr_config(config))
    for step, model in enumerate((given, cc.retrofit(base, 1, 3), cc.retrofit(base_class_of(config)(config), 1, 3))):
        if step < 2:
            assert torch.equal(model(ids).logits, expected)
        model.save_pretrained(tmp_path / f"{step}")
        assert weights_on_disk(tmp_path / f"{step}").keys() - names == model.new_weight_names()
        loaded = load(tmp_path / f"{step}")
        assert_same_weights(model, loaded)
        loaded.save_pretrained(tmp_path / f"{step} again")
        assert_same_weights(model, load(tmp_path / f"{step} again"))


def test_a_base_checkpoint_with_half_of_the_recurrence_is_refused(tmp_path: Path) -> None:
    config = t2mlr_config(base_folder(tmp_path))
    weights = load_file(tmp_path / "model.safetensors") | {"carry.norm.weight": torch.ones(16)}
    write_weights(tmp_path, weights)
    with pytest.raises(ValueError, match=r"weights are missing: fusion\.current_gate"):
        cc.T2MLRForCausalLM.from_pretrained(tmp_path, config=config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["t2mlr", "rlt"])
def test_moved_weights_come_back_in_every_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = MAKERS[name]().to(dtype)
    model.save_pretrained(tmp_path)
    assert_same_weights(model, load(tmp_path))
    loaded = load(tmp_path, dtype="auto", device_map="cpu")
    assert_same_weights(model, loaded)
    assert loaded.dtype == dtype


def test_on_the_meta_device(tmp_path: Path) -> None:
    model = make_t2mlr("llama")
    with torch.device("meta"):
        empty = cc.T2MLRForCausalLM(model.config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_same_weights(model, empty)


# Quantised bases


def bits(count: int) -> BitsAndBytesConfig:
    if count == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def quantised_layers(model: PreTrainedModel) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ in ("Linear8bitLt", "Linear4bit")}


WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}


@pytest.mark.parametrize("count", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:the recurrent path is trained", "ignore:MatMul8bitLt")
def test_quantised_bases(count: int, dtype: torch.dtype, tmp_path: Path) -> None:
    base_folder(tmp_path / "base", **WIDE)
    base = load(tmp_path / "base", quantization_config=bits(count), device_map="cpu", dtype=dtype)
    layers, ids = quantised_layers(base), token_ids(2, 6)
    assert len(layers) == 4 * 7
    model = cc.retrofit(base, 1, 3)
    assert {p.dtype for m in (model.fusion, model.carry) for p in m.parameters()} == {torch.float32}
    model.requires_grad_(False)
    trained = [*model.fusion.parameters(), *model.carry.parameters()]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.3 * torch.randn_like(parameter)).requires_grad_(True)
    model.train()(ids, labels=ids).loss.backward()
    assert all(bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in trained)  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        expected = model(ids).logits
        model.save_pretrained(tmp_path / "model")
        loaded = load(tmp_path / "model")
        assert quantised_layers(loaded) == layers
        assert {p.dtype for m in (loaded.fusion, loaded.carry) for p in m.parameters()} == {torch.float32}
        assert bool(expected.isfinite().all()) and torch.equal(loaded(ids).logits, expected)
    assert_same_weights(model.fusion, loaded.fusion)


@pytest.mark.parametrize("count", [8, 4])
@pytest.mark.parametrize("skip", [None, ["lm_head"]], ids=str)
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_quantising_leaves_the_recurrence_out(count: int, skip: list[str] | None, tmp_path: Path) -> None:
    config = base_folder(tmp_path / "base", **WIDE)
    moved(cc.retrofit(load(tmp_path / "base"), 1, 3)).half().save_pretrained(tmp_path / "model")
    make_rlt(hidden_size=64, intermediate_size=64).float().save_pretrained(tmp_path / "rlt")
    for folder, settings in (
        (tmp_path / "model", {"dtype": torch.float16}),
        (tmp_path / "base", {"dtype": torch.float16, "config": t2mlr_config(config)}),
        (tmp_path / "rlt", {"dtype": torch.bfloat16}),
    ):
        how = bits(count)
        how.llm_int8_skip_modules = skip
        loader: Any = cc.RLTForCausalLM if folder.name == "rlt" else cc.T2MLRForCausalLM
        model = loader.from_pretrained(folder, quantization_config=how, device_map="cpu", **settings)
        layers = quantised_layers(model)
        assert layers and not any(name.startswith(("fusion", "carry", "model.merge", "lm_head")) for name in layers)
        recurrent = model.new_weight_names()
        floating = {p.dtype for name, p in model.named_parameters() if p.is_floating_point() and name not in recurrent}
        assert floating == {settings["dtype"]}
        assert {p.dtype for name, p in model.named_parameters() if name in recurrent} <= {torch.float32}
        with torch.no_grad():
            assert bool(model(token_ids(2, 6)).logits.isfinite().all())


# The model card


def test_what_the_card_of_a_retrofitted_model_says(tmp_path: Path) -> None:
    base = make_base("gemma2")
    base.config._name_or_path = "google/gemma-2-2b"
    model = cc.retrofit(base, 1, 3, solver=cc.Sequential(truncate=8), feedback_interval=4, prompt_recurrence=False)
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "crosscurrent" and card.data.pipeline_tag == "text-generation"
    assert card.data.base_model == "google/gemma-2-2b" and card.data.tags == ["crosscurrent", "t2mlr"]
    new = 5 * 16**2 + 2 * 16 + 2 + 16
    for text in (
        "# google/gemma-2-2b with temporal recurrence",
        "| base model | google/gemma-2-2b |",
        "| recurrent layers | [1, 3) of 4, from 0 |",
        "| feedback interval | 4 |",
        "| prompt recurrence | False |",
        "| solver | `Sequential(truncate=8, recompute_every=None)` |",
        f"| of them for the recurrence | {new:,} |",
        f"crosscurrent {cc.__version__}",
        "pip install crosscurrent",
        "import crosscurrent",
        "crosscurrent.retrofit(base, layer_start=1, layer_end=3, feedback_interval=4, prompt_recurrence=False, "
        "solver=crosscurrent.Sequential(truncate=8, recompute_every=None))",
    ):
        assert text in card.text, text
    again = load(tmp_path)  # the base is known after loading, too
    assert model_card(again).content == card.content


def test_the_call_in_the_card_makes_such_a_model() -> None:
    for name in ("t2mlr", "rlt_tied", "lstm"):
        model = MAKERS[name]()
        call = model_card(model).text.split("```python\n")[-1].split("\n```")[0]
        made = eval(call, {"crosscurrent": cc, "base": make_base("llama")})
        assert type(made) is type(model) and made.config.to_dict().keys() == model.config.to_dict().keys()
        assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_no_local_path_is_saved(tmp_path: Path) -> None:
    home = tmp_path / "home" / "ann" / "my|<b>base</b>"
    base_folder(home)
    model = cc.retrofit(load(home), 1, 3)
    model.save_pretrained(tmp_path / "model")
    files = [(tmp_path / "model" / name).read_text() for name in ("README.md", "config.json")]
    assert not any("ann" in text or str(tmp_path) in text for text in files)
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert "| base model | b_ |" in card.text and card.data.base_model is None  # the folder's name ends with "/b>"
    assert load(tmp_path / "model").name_or_path == str(tmp_path / "model")
    assert shareable_name(r"C:\models\mine") == "mine"


def test_a_local_base_is_not_taken_for_one_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its relative path looks like an id, and is seen for what it is only where it was loaded."""
    base_folder(tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    model = cc.retrofit(load(Path("models", "mine")), 1, 3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model.save_pretrained("saved")
    load(Path("saved")).save_pretrained("again")
    for folder in ("saved", "again"):
        assert ModelCard.load(f"{folder}/README.md").data.base_model is None
        assert json.loads(Path(folder, "config.json").read_text())["base_config"]["_name_or_path"] == "mine"


@pytest.mark.parametrize("name", ["t2mlr", "rlt", "lstm"])
def test_a_card_of_the_user_stays(name: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    MAKERS[name]().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


# The hub, in place of which is a folder


class Hub:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.calls = folder, []  # type: tuple[Path, list[dict[str, Any]]]
        folder.mkdir()
        monkeypatch.setattr(HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(HfApi, "file_exists", lambda api, repo_id, name, **kwargs: (folder / name).exists())
        monkeypatch.setattr(HfApi, "upload_folder", self.upload_folder)

    def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
        self.calls.append({"repo_id": repo_id} | kwargs)
        return type("Url", (), {"repo_id": f"me/{repo_id}"})

    def upload_folder(self, *, folder_path: Path, allow_patterns: list[str], **kwargs: Any) -> str:
        self.calls.append(kwargs)
        for name in allow_patterns:
            (self.folder / name).write_bytes((folder_path / name).read_bytes())
        return "commit"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path / "hub", monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["t2mlr", "rlt_tied", "lstm"])
def test_push_to_hub_uploads_what_is_saved(name: str, hub: Hub, tmp_path: Path) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path / "here", max_shard_size="4KB")
    assert model.push_to_hub("mine", max_shard_size="4KB", private=True, commit_message="first") == "commit"
    assert contents(hub.folder) == contents(tmp_path / "here")
    assert hub.calls[0]["repo_id"] == "mine" and hub.calls[0]["private"] is True
    assert hub.calls[1]["repo_id"] == "me/mine" and hub.calls[1]["commit_message"] == "first"
    assert_same_weights(model, load(hub.folder))


def test_save_and_push_at_once(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("not for the hub")
    make_t2mlr("llama").save_pretrained(tmp_path / "model", push_to_hub=True, tags="mine")
    uploaded = contents(hub.folder)
    assert uploaded.keys() == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert uploaded.items() <= contents(tmp_path / "model").items()
    assert hub.calls[0]["repo_id"] == "model"
    assert ModelCard.load(hub.folder / "README.md").data.tags == ["crosscurrent", "t2mlr", "mine"]


def test_a_card_on_the_hub_stays(hub: Hub) -> None:
    (hub.folder / "README.md").write_text("written there")
    make_t2mlr("llama").push_to_hub("mine")
    assert (hub.folder / "README.md").read_text() == "written there"


def test_the_users_own_card_goes_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("mine")
    make_t2mlr("llama").save_pretrained(tmp_path / "model", push_to_hub=True)
    assert (hub.folder / "README.md").read_text() == "mine"
