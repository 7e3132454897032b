"""Wrong input is answered at once by a `ValueError` that says what was given and what is allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import crosscurrent as cc
from crosscurrent.models.compat import CACHE_NAME
from tests.subjects import RLT_SIZES, SIZES, cache_of, make_base, make_rlt, make_t2mlr, token_ids

BAD_RANGES = [(2, 2), (3, 1), (-1, 2), (0, 5), (4, 5)]
BAD_RLT_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"feedback_interval": 0}, "feedback_interval=0"),
    ({"feedback_interval": -2}, "feedback_interval=-2"),
    ({"feedback_interval": 1.5}, "feedback_interval=1.5"),
    ({"feedback_interval": True}, "feedback_interval=True"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"num_attention_heads": 3}, "does not divide"),
    ({"num_attention_heads": 16}, "even width"),
    ({"num_encoder_layers": 0}, "num_encoder_layers=0"),
    ({"num_decoder_layers": -1}, "num_decoder_layers=-1"),
    ({"num_memory_groups": 3}, "num_memory_groups=3"),
    ({"num_memory_groups": 2, "num_decoder_layers": 0}, "num_memory_groups=2"),
    ({"tie_encoder_decoder": True, "num_encoder_layers": 3}, "as many decoder as encoder"),
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"feedback_intervall": 4}, "Did you mean 'feedback_interval'"),
    ({"solver": {"name": "jacoby"}}, "Did you mean 'jacobi'"),
    ({"solver": {"name": "jacobi", "iteration": 3}}, "Did you mean 'iterations'"),
    ({"solver": {"name": "jacobi", "iterations": 0}}, "iterations=0"),
]


@pytest.mark.parametrize(("start", "end"), BAD_RANGES)
def test_layer_range(start: int, end: int) -> None:
    base = make_base("llama")
    with pytest.raises(ValueError, match=rf"layer_start={start}, layer_end={end}.*<= 4"):
        cc.retrofit(base, start, end)
    assert "fusion" not in base._modules  # nothing half-done
    with pytest.raises(ValueError, match="is not a range"):
        cc.T2MLRConfig(base_config=base.config, layer_start=start, layer_end=end)


@pytest.mark.parametrize(("settings", "message"), BAD_RLT_SETTINGS, ids=str)
def test_rlt_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cc.RLTConfig(**(RLT_SIZES | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"feedback_interval": 0}, "feedback_interval=0"), ({"promt_recurrence": False}, "prompt_recurrence")],
    ids=str,
)
def test_t2mlr_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cc.T2MLRConfig(base_config=LlamaConfig(**SIZES), layer_start=1, layer_end=3, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0}, "iterations=0"),
        ({"iterations": 2, "backward_iterations": 3}, "backward_iterations=3"),
        ({"backward_iterations": 0}, "backward_iterations=0"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"on_nonconvergence": "shout"}, "'shout'"),
        ({"on_nonconvergence": "warn"}, "needs a tolerance"),
        ({"guess": "zeros"}, "guess='zeros'"),
        ({"gradient": "implicit"}, "gradient='implicit'"),
        ({"gradient": cc.LastPasses(5), "iterations": 4}, "backward_iterations=5"),
        ({"gradient": cc.LastPasses(2), "backward_iterations": 3}, "leave one of them out"),
        ({"gradient": cc.Implicit(2), "backward_iterations": 4}, "leave one of them out"),
    ],
    ids=str,
)
def test_jacobi_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cc.Jacobi(**settings)


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (cc.Implicit, {"iterations": -1}, "iterations=-1.*at least 0"),
        (cc.Implicit, {"tolerance": -1.0}, "tolerance=-1.0"),
        (cc.LastPasses, {"passes": 0}, "passes=0"),
    ],
    ids=str,
)
def test_gradient_rule_settings(rule: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**settings)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ({"name": "implict"}, "gradient name 'implict' is not known.*'implicit'"),
        ({"name": "implicit", "iteration": 2}, "implicit has no setting 'iteration'.*iterations"),
        ({"iterations": 2}, "gradient name None"),
    ],
    ids=str,
)
def test_stored_gradient_rules(gradient: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cc.RLTConfig(**RLT_SIZES, solver={"name": "jacobi", "gradient": gradient})


def test_sequential_settings() -> None:
    with pytest.raises(ValueError, match="truncate=0"):
        cc.Sequential(truncate=0)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64)


BAD_CALLS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"input_ids": torch.tensor([[1, 43]])}, "holds 43: allowed are 0 to 42"),
    (lambda: {"input_ids": torch.tensor([[-1, 3]])}, "holds -1"),
    (lambda: {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "at least one"),
    (lambda: {"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, "at least one"),
    (lambda: {"input_ids": torch.tensor([1, 2])}, "2 dimensions"),
    (lambda: {"input_ids": torch.tensor([[0.5]])}, "integer dtype"),
    (lambda: {}, "exactly one"),
    (lambda: {"input_ids": ones(1, 2), "inputs_embeds": torch.zeros(1, 2, 16)}, "exactly one"),
    (
        lambda: {"input_ids": ones(1, 4), "segment_ids": torch.tensor([[0, 1, 0, 0]])},
        "goes backwards in row 0: 0 at token 2",
    ),
    (lambda: {"input_ids": ones(1, 2), "segment_ids": torch.tensor([[-1, 0]])}, "negative"),
    (lambda: {"input_ids": ones(1, 2), "segment_ids": ones(1, 3)}, "segment_ids has shape"),
    (lambda: {"input_ids": ones(1, 2), "segment_ids": torch.ones(1, 2)}, "dtype torch.float32"),
    (lambda: {"input_ids": ones(2, 3), "recurrent_mask": ones(2, 2)}, "recurrent_mask has shape"),
    (lambda: {"input_ids": ones(2, 3), "recurrent_mask": ones(3)}, "recurrent_mask has shape"),
    (lambda: {"input_ids": ones(2, 3), "attention_mask": ones(2, 4)}, "attention_mask has shape"),
    (lambda: {"input_ids": ones(2, 3), "attention_mask": ones(2, 1, 3, 3)}, "attention_mask has shape"),
    (lambda: {"input_ids": ones(2, 3), "labels": ones(2, 2)}, "labels has shape"),
    (lambda: {"input_ids": ones(2, 3), "labels": ones(2, 3), "logits_to_keep": 1}, "labels has shape"),
]


@pytest.mark.parametrize("make", [make_rlt, lambda: make_t2mlr("llama")], ids=["rlt", "t2mlr"])
@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_calls(make: Callable[[], Any], arguments: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(**arguments())


@pytest.mark.parametrize("make", [make_rlt, lambda: make_t2mlr("llama")], ids=["rlt", "t2mlr"])
def test_segments_may_not_go_back_across_calls(make: Callable[[], Any]) -> None:
    model = make()
    cache = cache_of(model(ones(1, 2), segment_ids=torch.tensor([[3, 4]]), use_cache=True))
    with pytest.raises(ValueError, match="goes backwards"):
        model(ones(1, 1), segment_ids=torch.tensor([[3]]), cache=cache)


@pytest.mark.parametrize("make", [make_rlt, lambda: make_t2mlr("llama")], ids=["rlt", "t2mlr"])
def test_prompts(make: Callable[[], Any]) -> None:
    model, mask = make(), torch.tensor([[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="row 0 of the prompts is all padding"):
        model.generate(ones(2, 2), attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=2)


def test_all_labels_masked_is_a_zero_loss() -> None:
    for model in (make_rlt(), make_t2mlr("llama")):
        output = model(ones(2, 3), labels=torch.full((2, 3), -100))
        assert output.loss.item() == 0.0
        output.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients and all(bool((gradient == 0).all()) for gradient in gradients)


def test_unsupported_bases() -> None:
    tiny = LlamaConfig(**SIZES)
    mamba = Mamba2Config(
        vocab_size=43, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=4, n_groups=1
    )
    t5 = T5Config(vocab_size=43, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    cases: list[tuple[Any, str]] = [
        (LlamaForSequenceClassification(tiny), "not the causal language model"),
        (LlamaModel(tiny), "not the causal language model"),
        (Mamba2ForCausalLM(mamba), "none of the known places"),
        (T5ForConditionalGeneration(t5), "encoder-decoder"),
        (torch.nn.Linear(2, 2), "transformers causal language model"),
        (make_t2mlr("llama"), "retrofitted model already"),
    ]
    for base, message in cases:
        with pytest.raises(ValueError, match=message):
            cc.retrofit(base, 0, 1)


def test_layers_without_a_cache_or_a_mask_are_refused() -> None:
    base = make_base("llama")

    class Odd(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return hidden

    base.model.layers = torch.nn.ModuleList(Odd() for _ in range(4))
    with pytest.raises(ValueError, match="attention_mask and a cache of keys and values are missing"):
        cc.retrofit(base, 1, 3)


def saved(folder: Path) -> Path:
    make_t2mlr("llama").save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    "load", [AutoModelForCausalLM.from_pretrained, cc.T2MLRForCausalLM.from_pretrained, cc.load_base]
)
def test_broken_checkpoints(load: Callable[[Path], Any], tmp_path: Path) -> None:
    weights = saved(tmp_path)
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut short|damaged"):
        load(str(tmp_path))  # type: ignore[arg-type]
    weights.unlink()
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(str(tmp_path))  # type: ignore[arg-type]
    weights.write_bytes(whole)
    tensors = load_file(weights)
    tensors["fusion.current_scale"] = torch.tensor([float("nan")], dtype=torch.float64)
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"fusion\.current_scale holds NaN"):
        load(str(tmp_path))  # type: ignore[arg-type]


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    weights = saved(tmp_path)
    tensors = load_file(weights)
    del tensors["carry.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"carry\.norm\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_base_with_nan_weights_is_refused() -> None:
    base = make_base("llama")
    with torch.no_grad():
        base.lm_head.weight[3, 2] = float("nan")
    with pytest.raises(ValueError, match=r"lm_head\.weight holds NaN"):
        cc.retrofit(base, 1, 3)


@pytest.mark.parametrize("name", ["no/such-model-here", "/no/such/folder"])
def test_models_that_do_not_exist(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        cc.load_base(name)


def test_checkpointing_with_token_by_token_solving_is_refused() -> None:
    model = make_t2mlr("llama").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(token_ids(1, 5), solver=cc.Sequential())
    cache = cache_of(model.eval()(token_ids(1, 5), use_cache=True))
    for solver in (cc.Sequential(), cc.Jacobi(2, 1)):
        with pytest.raises(ValueError, match="continue from a cache"):
            model.train()(token_ids(1, 1), cache=cache, solver=solver)
    with pytest.warns(UserWarning, match="no cache is kept"):
        output = model(token_ids(1, 5), use_cache=True, solver=cc.Jacobi(2, 1))
    assert cache_of(output) is None


def test_settings_without_effect_are_told() -> None:
    with pytest.warns(UserWarning, match="num_layers"):
        cc.RLTConfig(**(RLT_SIZES | {"num_layers": 8}))
    with pytest.raises(TypeError, match="iterations"):
        cc.retrofit(make_base("llama"), 1, 3, iterations=8)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="tolerance"):
        cc.Jacobi(on_nonconvergence="raise")
    with pytest.raises(ValueError, match="either"):
        make_rlt().generate(ones(1, 2), recurrent_mask=ones(1, 2), prompt_recurrence=False)
    for model in (make_rlt(), make_t2mlr("llama")):
        with pytest.raises(ValueError, match="Did you mean 'recurrent_mask'"):
            model(ones(1, 2), recurent_mask=ones(1, 2))
    with pytest.raises(ValueError, match="token_type_ids"):
        make_rlt()(ones(1, 2), token_type_ids=ones(1, 2))


def test_a_mask_that_contradicts_the_cache_is_refused() -> None:
    model, mask = make_t2mlr("llama"), torch.tensor([[0, 1, 1]])
    cache = cache_of(model(ones(1, 2), use_cache=True))
    with pytest.raises(ValueError, match="something else of token 0 in row 0"):
        model(ones(1, 1), attention_mask=mask, cache=cache)


def test_return_dict_as_transformers_reads_it() -> None:
    for model in (make_rlt(), make_t2mlr("llama")):
        assert model(ones(1, 2), return_dict=None).logits.shape == (1, 2, 43)
        assert isinstance(model(ones(1, 2), return_dict=False), tuple)


def test_bases_whose_layers_do_not_hand_on_the_stream() -> None:
    sizes: Any = {"vocab_size": 43, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    bloom = BloomForCausalLM(BloomConfig(vocab_size=43, hidden_size=16, n_layer=4, n_head=2))
    falcon = FalconForCausalLM(FalconConfig(**sizes))
    for base in (bloom, falcon):
        for start, end in ((1, 3), (0, 2), (0, 4)):
            with pytest.raises(ValueError, match="hands on a"):
                cc.retrofit(base, start, end)(ones(1, 3))
    with pytest.raises(ValueError, match="sliding_window=1"):
        cc.retrofit(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=1)), 1, 3)


def test_balancing_losses_are_not_dropped_unnoticed() -> None:
    model = make_t2mlr("llama")
    with pytest.raises(ValueError, match="output_router_logits"):
        model(ones(1, 2), output_router_logits=True)


def test_settings_changed_after_construction() -> None:
    rlt = make_rlt(feedback_interval=None)
    rlt.config.feedback_interval = 1
    with pytest.raises(ValueError, match="changed to 1 after"):
        rlt(ones(1, 2))
    model = make_t2mlr("llama")
    model.config.layer_end = 9
    with pytest.raises(ValueError, match="layer_end=9"):
        model(ones(1, 2))


@pytest.mark.parametrize(
    "solver", [cc.Jacobi, "jacobi", {"iterations": 3}, {"name": "jacobi", "iterations": 2.5}, 3], ids=str
)
def test_solvers_in_the_wrong_form(solver: Any) -> None:
    with pytest.raises(ValueError, match=r"solver|iterations"):
        make_rlt()(ones(1, 2), solver=solver)


def test_solvers_in_either_form() -> None:
    model = make_t2mlr("llama")
    model.config.solver = cc.Sequential()
    assert model(ones(1, 3)).solver_report.solver == "sequential"
    two: Any = {"name": "jacobi", "iterations": 2, "backward_iterations": 1}
    assert model(ones(1, 3), solver=two).solver_report.exact is False


def test_prompts_and_caches_that_do_not_fit() -> None:
    for model in (make_rlt(), make_t2mlr("llama")):
        for mask in (ones(2, 3), ones(2, 9)):
            with pytest.raises(ValueError, match="recurrent_mask has shape"):
                model.generate(token_ids(2, 6), recurrent_mask=mask, max_new_tokens=2)
        cache = cache_of(model(token_ids(1, 5), use_cache=True))
        with pytest.raises(ValueError, match="cache holds 5 already"):
            model.generate(token_ids(1, 5), max_new_tokens=2, **{CACHE_NAME: cache})
        with pytest.raises(ValueError, match="row 0 of the prompts"):
            model.generate(torch.tensor([[0, 0, 0], [1, 2, 3]]), pad_token_id=0, max_new_tokens=2)
        with pytest.raises(ValueError, match="segment_ids cannot"):
            model.generate(token_ids(1, 3), segment_ids=torch.zeros(1, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match="labels holds 43"):
            model(ones(1, 2), labels=torch.tensor([[0, 43]]))


def test_training_gates_in_low_precision_warns() -> None:
    base: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model: Any = cc.retrofit(base, 1, 3)
    model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="rounded away"):
        model.train()(ones(1, 3))
