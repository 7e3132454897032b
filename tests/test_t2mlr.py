"""What is particular to the retrofit: the base's names, its own code around the range, sharing, pickling."""

import copy
import gc
import pickle
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import crosscurrent as cc
from crosscurrent.models.t2mlr.layer_range import LayerRange
from tests.subjects import (
    SIZES,
    T2MLR_BASES,
    cache_of,
    gradients,
    largest_difference,
    make_base,
    make_t2mlr,
    moved,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

for_each_base = pytest.mark.parametrize("base_name", T2MLR_BASES)


@for_each_base
def test_base_parameter_names_are_unchanged(base_name: str) -> None:
    base = make_base(base_name)
    names = set(base.state_dict())
    model = cc.retrofit(copy.deepcopy(base), 1, 3)
    new = set(model.state_dict()) - names
    assert names <= set(model.state_dict())
    assert all(name.startswith(("fusion.", "carry.")) for name in new)
    assert sum(model.state_dict()[name].numel() for name in new) == 5 * 16 * 16 + 3 * 16 + 2
    assert isinstance(model, type(base)) and isinstance(model, cc.T2MLRForCausalLM)


@for_each_base
@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Jacobi(3, 2)], ids=lambda solver: solver.name)
def test_prefix_and_suffix_run_once(base_name: str, solver: Any) -> None:
    model, ids, runs = make_t2mlr(base_name), token_ids(2, 6), Counter[int]()
    for index, layer in enumerate(model.layers._modules.values()):
        layer.register_forward_hook(lambda *_, index=index: runs.update([index]))
    model(ids, solver=solver)
    assert runs[0] == runs[3] == 1
    assert runs[1] == runs[2] == (6 if solver.name == "sequential" else 1 + 3)


def test_base_and_retrofit_share_weights_and_the_base_goes_on_working() -> None:
    base, ids = make_base("llama"), token_ids(2, 5)
    before = base(ids).logits
    model = cc.retrofit(base, 1, 3)
    moved(model.fusion)
    recurrent = model(ids).logits
    assert torch.equal(base(ids).logits, before) and not torch.equal(recurrent, before)
    assert model.lm_head.weight is base.lm_head.weight
    assert [type(layer).__name__ for layer in base.model.layers] == ["LlamaDecoderLayer"] * 4
    assert len(base.model.layers[1:]) == 3


def test_a_base_can_be_used_while_a_retrofit_runs() -> None:
    """The stand-ins exist for one call of one model only, also if it fails."""
    base, ids = make_base("llama"), token_ids(1, 5)
    model = cc.retrofit(base, 1, 3)
    with pytest.raises(ValueError, match="vocabulary"):
        model(torch.tensor([[99]]))
    inner: list[torch.Tensor] = []
    other = make_base("llama")
    base.model.layers[3].register_forward_hook(lambda *_: inner.append(other(ids).logits))
    model(ids)
    assert torch.equal(inner[0], other(ids).logits)


@for_each_base
@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Jacobi(3, 2)], ids=lambda solver: solver.name)
def test_hidden_states_have_one_entry_per_layer(base_name: str, solver: Any) -> None:
    base, ids = make_base(base_name), token_ids(2, 6)
    expected = base(ids, output_hidden_states=True).hidden_states
    for start, end in ((1, 3), (0, 2), (2, 4)):
        got = cc.retrofit(base, start, end)(ids, output_hidden_states=True, solver=solver).hidden_states
        assert len(got) == len(expected) == 5
        assert largest_difference(got, expected) < 1e-11


def test_attentions_come_from_the_last_pass() -> None:
    base, ids = make_base("llama"), token_ids(2, 6)
    base.set_attn_implementation("eager")
    expected = base(ids, output_attentions=True).attentions
    model = cc.retrofit(base, 1, 3)
    assert largest_difference(model(ids, output_attentions=True).attentions, expected) == 0.0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_attentions_of_ranges_that_ran_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, and behind a prompt that is not recurrent, also past a sliding window and after an earlier call."""
    model, ids = make_t2mlr(name), token_ids(2, 11)
    model.set_attn_implementation("eager")
    recurrent = torch.ones_like(ids)
    recurrent[0, :7], recurrent[1, :6] = 0, 0
    for past in (0, 5):
        found: list[Any] = []
        for is_split, solver in ((True, cc.Jacobi(20)), (True, cc.Sequential()), (False, cc.Jacobi(20))):
            monkeypatch.setattr(LayerRange, "can_be_split", is_split)
            cache = None if past == 0 else cache_of(model(ids[:, :past], recurrent_mask=recurrent[:, :past]))
            settings: Any = {"cache": cache, "solver": solver, "output_attentions": True}
            found.append(model(ids[:, past:], recurrent_mask=recurrent[:, past:], **settings).attentions)
        assert len(found[0]) == 4
        assert largest_difference(found[0], found[2]) < 1e-11 and largest_difference(found[1], found[2]) < 1e-11


def test_packed_rows_with_padding_in_eager_and_sdpa_agree() -> None:
    ids, mask = token_ids(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :2] = 0
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 2, 2, 2, 3]])
    model = make_t2mlr("qwen3")
    outputs = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        outputs.append(model(ids, attention_mask=mask, segment_ids=segments).logits)
    assert largest_difference(outputs[0][mask == 1], outputs[1][mask == 1]) < 1e-11


def test_detached_residual_changes_gradients_only() -> None:
    whole, cut = make_t2mlr("llama"), make_t2mlr("llama", detach_residual=True)
    ids = token_ids(1, 6)
    outputs = [model(ids, labels=ids, solver=cc.Sequential(), use_cache=False) for model in (whole, cut)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    found = [gradients(model, output.loss) for model, output in zip((whole, cut), outputs, strict=True)]
    assert largest_difference(*found) > 1e-8


def test_settings_of_the_layers_are_shared_and_hooks_on_the_model_are_not() -> None:
    base, fired = make_base("llama"), []
    cc.retrofit(base, 1, 3).register_forward_hook(lambda *_: fired.append(1))
    base(token_ids(1, 3))
    assert not fired


@pytest.mark.parametrize("base_name", ["llama", "gpt2"])
def test_epsilon_is_the_bases(base_name: str) -> None:
    model = make_t2mlr(base_name)
    text = model.config.get_text_config()
    assert model.carry.norm.eps == (text.layer_norm_epsilon if base_name == "gpt2" else text.rms_norm_eps)


def test_gradients_exist_without_a_recurrent_token_and_under_autocast() -> None:
    model, ids = make_t2mlr("gpt2").float(), token_ids(2, 6)
    model(ids, labels=ids, recurrent_mask=torch.zeros_like(ids), use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in model.fusion.parameters())
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids, solver=cc.Jacobi(4, 1), use_cache=False).loss.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.layers[2].parameters() if p.dim() > 1)


def test_base_settings_are_the_bases(tmp_path: Any) -> None:
    """There is one use_cache, one attention_dropout: set on either configuration, saved, and in effect."""
    base = LlamaConfig(**SIZES)
    settings: Any = {"use_cache": False, "attention_dropout": 0.5}
    config = cc.T2MLRConfig(base_config=base, layer_start=1, layer_end=3, **settings)
    model: Any = cc.T2MLRForCausalLM(config)
    assert model.layers[0].self_attn.attention_dropout == 0.5 and base.use_cache is False
    model.config.pad_token_id = 7
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attention_dropout=0.25)
    assert loaded.config.use_cache is False and loaded.config.base_config.pad_token_id == 7
    assert loaded.layers[0].self_attn.attention_dropout == 0.25
    model.config.output_hidden_states = True
    assert len(model(token_ids(1, 3)).hidden_states) == 5


def test_dropout_is_the_same_in_every_pass() -> None:
    """Otherwise the iteration has no fixed point, and a report of exactness would be untrue."""
    config = GPT2Config(vocab_size=43, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.3)
    model = cc.retrofit(GPT2LMHeadModel(config).double(), 1, 3).train()
    with torch.no_grad():
        model.fusion.recurrent_scale.fill_(0.5)
    ids = token_ids(1, 12)
    report = model(ids, solver=cc.Jacobi(12, 12)).solver_report
    assert report.exact and report.residuals[-1] < 1e-12
    assert not torch.equal(model(ids).logits, model(ids).logits)  # calls differ from one another


def test_a_base_used_by_a_hook_inside_the_retrofits_own_call() -> None:
    base, ids, inner = make_base("llama"), token_ids(1, 5), []
    expected = base(ids).logits
    model = cc.retrofit(base, 1, 3)
    pending = [True]

    def use_base(*_: Any) -> None:
        if pending:
            pending.clear()
            inner.append(base(ids).logits)

    base.model.layers[2].register_forward_hook(use_base)
    model(ids)
    assert torch.equal(inner[0], expected)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, ids = make_t2mlr("gpt2").train(), token_ids(2, 6)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        found.append(gradients(model, model(ids, labels=ids, solver=cc.Jacobi(3, 2)).loss))
    assert largest_difference(*found) == 0.0


def test_no_cache_by_default_in_training() -> None:
    model, ids = make_t2mlr("llama"), token_ids(1, 4)
    assert cache_of(model(ids)) is not None
    assert cache_of(model.train()(ids)) is None


def test_copies_and_pickles() -> None:
    model, ids = make_t2mlr("llama"), token_ids(1, 5)
    expected = model(ids).logits
    clone = copy.deepcopy(model)
    assert torch.equal(clone(ids).logits, expected)
    with torch.no_grad():
        clone.fusion.recurrent_scale.zero_()
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, expected)
    name = "T2MLRQwen2ForCausalLM"  # a class that this process need not have made before
    from crosscurrent.models.t2mlr import modeling_t2mlr

    assert getattr(modeling_t2mlr, name).__name__ == name


def test_a_base_checkpoint_loads_with_a_fresh_recurrent_path(tmp_path: Any) -> None:
    """Missing are exactly our parameters; they start at the identity, finite, also in bfloat16."""
    base, ids = make_base("llama"), token_ids(1, 5)
    base.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        plain = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        config = cc.T2MLRConfig(base_config=copy.deepcopy(plain.config), layer_start=1, layer_end=3)
        model = cc.T2MLRForCausalLM.from_pretrained(tmp_path, config=config, dtype=dtype)
        assert model.fusion.current_scale.item() == 0.0 and model.dtype == dtype
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.fusion.parameters())
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_vocabulary_can_grow(tmp_path: Any) -> None:
    model, ids = make_t2mlr("llama"), token_ids(1, 5)
    before = model(ids).logits
    model.resize_token_embeddings(45)
    assert largest_difference(model(ids).logits[..., :43], before) < 1e-12
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).double()
    assert torch.equal(loaded(torch.tensor([[44, 3]])).logits, model(torch.tensor([[44, 3]])).logits)


def test_nothing_of_a_call_outlives_it() -> None:
    """Without waiting for Python's collector of cycles: tensors are large, and it does not know."""
    model, ids = make_t2mlr("llama"), token_ids(1, 6)
    seen: list[Any] = []
    hook = model.fusion.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    gc.disable()
    try:
        for solver in (cc.Sequential(), cc.Jacobi(3, 2)):
            output = model(ids, labels=ids, solver=solver)
            output.loss.backward()
            del output
        assert seen and all(reference() is None for reference in seen)
    finally:
        gc.enable()
        hook.remove()
