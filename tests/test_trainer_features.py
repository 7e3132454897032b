"""Retrofitted models under transformers' own Trainer: rates, schedules, broken numbers, accumulation, resumption."""

import gc
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import crosscurrent as cc
from crosscurrent.data.labels import PredictableLabels
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.wrapped import recurrent_model
from crosscurrent.recurrence import as_solver
from crosscurrent.training.callbacks import SolverSchedule
from crosscurrent.training.nonfinite import NonFiniteError, StopOnNonFinite
from crosscurrent.training.optimization import fusion_optimizer, optimizer_for
from crosscurrent.training.schedules import Ramp, Steps
from tests.subjects import (
    SIZES,
    VOCAB,
    cache_of,
    exact_solvers,
    gradients,
    largest_difference,
    make_rlt,
    make_t2mlr,
    moved,
    recurrent_parameters,
    token_ids,
)
from tests.tiny_base import save_tiny_base

exact = pytest.mark.usefixtures("exact_arithmetic")

JACOBI = cc.Jacobi(3, 2)


class Rows(Dataset[dict[str, Any]]):
    """Rows of token ids, each of its own length if `lengths` are given, all tokens labelled."""

    def __init__(self, lengths: list[int]):
        self.rows = [token_ids(1, length, seed=index)[0] for index, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def padded(examples: Any, side: str = "right") -> dict[str, Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)

    def filled(tensor: Tensor, value: int) -> Tensor:
        missing = tensor.new_full((longest - len(tensor),), value)
        return torch.cat([tensor, missing] if side == "right" else [missing, tensor])

    return {
        "input_ids": torch.stack([filled(example["input_ids"], 0) for example in examples]),
        "labels": torch.stack([filled(example["labels"], -100) for example in examples]),
        "attention_mask": torch.stack([filled(torch.ones_like(example["labels"]), 0) for example in examples]),
    }


def packed(examples: Any) -> dict[str, Tensor]:
    """One row of all documents."""
    numbered = [torch.full_like(example["labels"], index) for index, example in enumerate(examples)]
    return {
        "input_ids": torch.cat([example["input_ids"] for example in examples])[None],
        "labels": torch.cat([example["labels"] for example in examples])[None],
        "segment_ids": torch.cat(numbered)[None],
    }


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **(settings | changes))


def trained(model: Any, folder: Path, rows: Dataset[Any] | None = None, **changes: Any) -> Any:
    extra = {
        name: changes.pop(name)
        for name in ("callbacks", "data_collator", "optimizer_cls_and_kwargs")
        if name in changes
    }
    resume = changes.pop("resume", None)
    trainer = Trainer(model, arguments(folder, **changes), train_dataset=rows or Rows([6] * 12), **extra)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_buckets_of_lengths_save_columns(tmp_path: Path) -> None:
    """Rows of two lengths by turns: in Trainer's buckets most batches have no padding, and every row comes once."""
    rows, columns = Rows([3, 12] * 80), {}
    for strategy in ("sequential", "group_by_length"):
        settings = {"per_device_train_batch_size": 4, "remove_unused_columns": False}
        args = arguments(tmp_path, train_sampling_strategy=strategy, **settings)
        loader = Trainer(nn.Linear(1, 1), args, train_dataset=rows, data_collator=padded).get_train_dataloader()
        batches = list(loader)
        assert sum(int(batch["attention_mask"].sum()) for batch in batches) == 80 * (3 + 12)
        columns[strategy] = sum(batch["labels"].shape[1] for batch in batches)
    assert columns["sequential"] == 40 * 12
    assert columns["group_by_length"] < 0.75 * columns["sequential"]


# Learning rates


def lora(model: Any) -> Any:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["fusion", "carry"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def frozen(model: Any) -> Any:
    new = recurrent_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    return model


WRAPPED: dict[str, Callable[[Any], Any]] = {"whole": lambda model: model, "lora": lora, "frozen": frozen}


@pytest.mark.parametrize("how", WRAPPED)
def test_the_fusion_learns_at_a_rate_of_its_own(how: str, tmp_path: Path) -> None:
    """Every trainable parameter is in the optimizer once, and decays as transformers would have it, scalars excepted."""
    model = WRAPPED[how](make_t2mlr("llama"))
    args = arguments(tmp_path, weight_decay=0.1)
    groups = optimizer_for(model, args, 0.5).param_groups
    trainable = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sorted(id(parameter) for group in groups for parameter in group["params"]) == sorted(trainable)
    is_ours = lambda name: "fusion." in name or "carry." in name  # noqa: E731
    usual = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    for group in groups:
        for parameter in group["params"]:
            name = trainable[id(parameter)]
            assert group["lr"] == (0.5 if is_ours(name) else 1e-2), name
            decays = name in usual and not name.endswith("_scale")
            assert group["weight_decay"] == (0.1 if decays else 0.0), name
    assert any(is_ours(name) for name in trainable.values())
    assert all(is_ours(name) for name in trainable.values()) == (how == "frozen")


@pytest.mark.parametrize("how", WRAPPED)
def test_both_rates_follow_the_schedule_and_survive_resumption(how: str, tmp_path: Path) -> None:
    def run(folder: str, **changes: Any) -> Any:
        args = arguments(tmp_path / folder)
        return trained(
            WRAPPED[how](make_t2mlr("llama", solver=JACOBI)),
            tmp_path / folder,
            optimizer_cls_and_kwargs=fusion_optimizer(args, 0.5),
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            lr_scheduler_type="linear",
            **changes,
        )

    whole = run("whole", callbacks=[StopAfter(2)])
    rates = sorted({group["lr"] for group in whole.optimizer.param_groups})
    assert rates == pytest.approx([0.25] if how == "frozen" else [0.005, 0.25])
    resumed = run("whole", resume=str(tmp_path / "whole" / "checkpoint-2"))
    uninterrupted = run("other")
    assert largest_difference(weights(resumed.model), weights(uninterrupted.model)) == 0.0
    assert {group["lr"] for group in resumed.optimizer.param_groups} == {0.0}
    assert {group["initial_lr"] for group in resumed.optimizer.param_groups} == (
        {0.5} if how == "frozen" else {0.5, 0.01}
    )


class StopAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


def test_rates_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    model, args = make_t2mlr("llama"), arguments(tmp_path)
    strange: list[Any] = [0, -1.0, float("inf"), float("nan"), 10**400, True, "1e-3", None]
    for rate in strange:
        with pytest.raises(ValueError, match=r"fusion_learning_rate=.* is not allowed"):
            fusion_optimizer(args, rate)
    with pytest.raises(ValueError, match="RLTForCausalLM has no fusion"):
        optimizer_for(make_rlt(), args, 1.0)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no recurrence"):
        optimizer_for(LlamaForCausalLM(LlamaConfig(**SIZES)), args, 1.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="groups parameters itself"):
        galore: Any = staticmethod(lambda args, model: (torch.optim.SGD, {"params": []}))
        patch.setattr(Trainer, "get_optimizer_cls_and_kwargs", galore)
        optimizer_for(model, args, 1.0)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing of the fusion is trainable"):
        optimizer_for(model, args, 1.0)


# Solver schedules


class Seen(TrainerCallback):
    """The solver of each step."""

    def __init__(self) -> None:
        self.solvers: list[tuple[int, int]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        solver: Any = as_solver(recurrent_model(model).config.solver)
        self.solvers.append((solver.iterations, solver.backward_iterations))


@pytest.mark.parametrize("how", ["whole", "lora"])
def test_the_solver_changes_with_the_step_and_a_resumed_run_goes_on(how: str, tmp_path: Path) -> None:
    def run(folder: str, **changes: Any) -> tuple[Any, list[tuple[int, int]]]:
        schedule, seen = SolverSchedule(Steps([(0, 2), (3, 5)]), Ramp(1, 3, 4)), Seen()
        model = WRAPPED[how](make_t2mlr("llama", solver=cc.Jacobi(16, 4, tolerance=1e-9)))
        settings: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2} | changes
        callbacks = [schedule, seen, *settings.pop("more", [])]
        return trained(model, tmp_path / folder, callbacks=callbacks, **settings).model, seen.solvers

    whole, steps = run("whole")
    assert steps == [(2, 1), (2, 2), (2, 2), (5, 2), (5, 3)]
    run("stopped", more=[StopAfter(2)])
    resumed, rest = run("stopped", resume=str(tmp_path / "stopped" / "checkpoint-2"))
    assert rest == steps[2:]
    assert largest_difference(weights(resumed), weights(whole)) == 0.0
    if how == "whole":  # saved with what its last step was trained with; other settings of the solver stay
        loaded = cc.T2MLRForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-5")
        assert as_solver(loaded.config.solver) == cc.Jacobi(5, 3, tolerance=1e-9)


@pytest.mark.parametrize(
    ("iterations", "backward", "message"),
    [
        (2, 3, "from step 0 on: backward_iterations=3"),
        (Steps([(0, 4), (7, 2)]), 3, "from step 7 on: backward_iterations=3"),
        (4, Ramp(1, 9, 8), "from step 4 on: backward_iterations=5"),
        (Ramp(4, 1, 9), Steps([(0, 2), (9, 1)]), "from step 8 on: backward_iterations=2"),
        (Steps([(0, 4), (7, 0)]), 1, "from step 7 on: iterations=0"),
        (Steps([(0, "4")]), 1, "from step 0 on: iterations='4'"),
    ],
)
def test_impossible_solver_schedules_are_refused_at_once(iterations: Any, backward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SolverSchedule(iterations, backward)


def test_a_schedule_needs_a_solver_with_iterations(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"solver is Sequential\(truncate=None, recompute_every=None\)"):
        trained(make_t2mlr("llama", solver=cc.Sequential()), tmp_path, callbacks=[SolverSchedule(2, 1)])
    with pytest.raises(ValueError, match="has no recurrence"):
        trained(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path, callbacks=[SolverSchedule(2, 1)])


def test_a_schedule_that_does_not_suit_the_solver_is_refused_before_training(tmp_path: Path) -> None:
    model = make_t2mlr("llama", solver=cc.Jacobi(16, 4))
    with pytest.raises(ValueError, match="backward_iterations=4 is not allowed"):
        trained(model, tmp_path, callbacks=[SolverSchedule(Steps([(0, 16), (1000, 2)]))])


# Numbers that are not finite


class Spoil(TrainerCallback):
    """Writes a value into a parameter, or into its gradient, in the second step."""

    def __init__(self, name: str, value: float, in_gradient: bool = False):
        self.name, self.value, self.in_gradient = name, value, in_gradient

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            parameter = next(
                one for name, one in model.named_parameters() if name.endswith(self.name) and one.requires_grad
            )
            if self.in_gradient:
                parameter.register_hook(lambda gradient: torch.full_like(gradient, self.value))
            else:
                with torch.no_grad():
                    parameter.copy_(torch.full_like(parameter, self.value))
            self.before = weights(model)


@pytest.mark.parametrize(
    ("name", "value", "in_gradient", "message"),
    [
        ("model.embed_tokens.weight", float("nan"), False, "weights are not finite, model.embed_tokens.weight"),
        ("fusion.recurrent_scale", float("nan"), False, "weights are not finite, fusion.recurrent_scale"),
        (
            "fusion.recurrent_projection.weight",
            1.7e308,
            False,
            "the carried state is not finite from iteration 1 of 3 on",
        ),
        ("lm_head.weight", 1.7e308, False, "logits are not finite, though all weights and states are"),
        ("fusion.current_scale", float("inf"), True, "gradients are not finite, of fusion.current_scale"),
        ("model.layers.0.mlp.up_proj.weight", float("nan"), True, "of model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_number_that_is_not_finite_stops_training_with_its_cause(
    name: str, value: float, in_gradient: bool, message: str, tmp_path: Path
) -> None:
    spoil, model = Spoil(name, value, in_gradient), make_t2mlr("llama", solver=JACOBI)
    with pytest.raises(NonFiniteError, match=rf"^step 2: .*{message}\. The step was not made"):
        trained(model, tmp_path, callbacks=[spoil, StopOnNonFinite()], gradient_accumulation_steps=2)
    after = weights(model)
    assert all(torch.equal(after[key], old) or not torch.isfinite(old).all() for key, old in spoil.before.items())
    model.zero_grad()
    assert not model._forward_hooks, "nothing stays on the model"


def test_weights_are_looked_at_before_the_first_step(tmp_path: Path) -> None:
    model = make_t2mlr("llama")
    with torch.no_grad():
        model.carry.norm.weight[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"before step 1 weights are not finite: carry\.norm\.weight"):
        trained(model, tmp_path, callbacks=[StopOnNonFinite()])


class Fail(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise RuntimeError("something else")


def test_nothing_stays_on_the_model_if_something_else_ends_the_training(tmp_path: Path) -> None:
    model = make_t2mlr("llama", solver=JACOBI)
    with pytest.raises(RuntimeError, match="something else"):
        trained(model, tmp_path, callbacks=[StopOnNonFinite(), Fail()])
    assert not model._forward_hooks
    assert not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())


def test_finite_training_is_left_alone(tmp_path: Path) -> None:
    model, other = make_t2mlr("llama", solver=JACOBI), make_t2mlr("llama", solver=JACOBI)
    trained(model, tmp_path, callbacks=[StopOnNonFinite()])
    trained(other, tmp_path)
    assert largest_difference(weights(model), weights(other)) == 0.0 and not model._forward_hooks


# Accumulation, packed rows, label smoothing


def one_step(folder: Path, rows: Dataset[Any], batch_size: int, collator: Any, **changes: Any) -> dict[str, Tensor]:
    """The gradient of one step of all rows, as plain gradient descent at a rate of 1 shows it."""
    model = make_t2mlr("llama", solver=exact_solvers(16)["jacobi"])
    before = weights(model)
    settings = {
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": len(rows) // batch_size,  # type: ignore[arg-type]
    }
    trained(model, folder, rows, data_collator=collator, **(settings | changes))
    return {name: before[name] - weight for name, weight in weights(model).items()}


LENGTHS = [3, 9, 5, 2, 7, 6, 4, 8]


def in_one_batch(collator: Any = padded) -> dict[str, Tensor]:
    """The mean over all predicted tokens, as the model computes it by itself."""
    model = make_t2mlr("llama", solver=exact_solvers(16)["jacobi"]).train()
    rows = Rows(LENGTHS)
    return gradients(model, model(**collator([rows[index] for index in range(len(rows))])).loss)


@exact
@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_accumulated_gradients_of_ragged_rows_are_those_of_one_batch(
    batch_size: int, side: str, tmp_path: Path
) -> None:
    found = one_step(
        tmp_path, Rows(LENGTHS), batch_size, PredictableLabels(lambda examples: padded(examples, side=side))
    )
    assert largest_difference(found, in_one_batch()) < 1e-13


@exact
@pytest.mark.parametrize("batch_size", [2, 4])
def test_accumulated_gradients_of_packed_rows_are_those_of_one_batch(batch_size: int, tmp_path: Path) -> None:
    found = one_step(tmp_path, Rows(LENGTHS), batch_size, PredictableLabels(packed))
    assert largest_difference(found, in_one_batch()) < 1e-13


@exact
def test_labels_that_trainer_counts_in_vain_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="first tokens of documents, or padding, have labels"):
        found = one_step(tmp_path, Rows(LENGTHS), 4, packed)
    assert largest_difference(found, in_one_batch()) > 1e-4  # too small by that share
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        one_step(tmp_path, Rows(LENGTHS), 4, padded)


def test_predictable_labels_by_mask_documents_or_positions() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    given: dict[str, tuple[list[int], list[int]]] = {
        "attention_mask": ([0, 1, 1, 1, 0], [-100, -100, 7, 8, -100]),
        "segment_ids": ([0, 0, 3, 3, 4], [-100, 6, -100, 8, -100]),
        "position_ids": ([0, 1, 0, 1, 2], [-100, 6, -100, 8, 9]),
    }
    for name, (values, labels) in given.items():
        collator = PredictableLabels(lambda batch: batch[0])
        batch: Any = {"input_ids": ids, "labels": ids.clone(), name: torch.tensor([values])}
        assert collator([batch])["labels"].tolist() == [labels], name
    assert collator([{"input_ids": ids, "labels": ids.clone()}])["labels"].tolist() == [[-100, 6, 7, 8, 9]]


@exact
@pytest.mark.parametrize("how", ["whole", "lora"])
@pytest.mark.parametrize("collator", [padded, packed], ids=["padded", "packed"])
def test_label_smoothing_shifts_the_labels(how: str, collator: Any, tmp_path: Path) -> None:
    """transformers computes that loss itself, and for classes that it does not know it does not shift."""
    model = WRAPPED[how](make_t2mlr("llama", solver=JACOBI))
    trainer = Trainer(model, arguments(tmp_path, label_smoothing_factor=0.25))
    rows = Rows([3, 6, 4])
    batch = PredictableLabels(collator)([rows[index] for index in range(3)])
    found: Any = trainer.compute_loss(model, dict(batch))
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.25
    )
    assert float(abs(found - expected)) < 1e-12
    assert repr(make_t2mlr("llama")).startswith("T2MLRLlamaForCausalLM(\n")


# Gradient checkpointing


@pytest.mark.parametrize("solver", [cc.Jacobi(1, 1), cc.Jacobi(3, 1), cc.Jacobi(3, 2), cc.Jacobi(6, 6)], ids=repr)
@pytest.mark.parametrize("base", ["llama", "gpt2", "gemma3"])
def test_checkpointing_changes_no_bit(base: str, solver: cc.Jacobi) -> None:
    model, ids = make_t2mlr(base, solver=solver).train(), token_ids(2, 6)
    found = []
    for use_reentrant in (None, False, True):
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss = model(ids, labels=ids).loss
        loss.backward()  # the re-entrant kind allows no torch.autograd.grad
        found.append({"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    assert largest_difference(found[0], found[1]) == largest_difference(found[0], found[2]) == 0.0


def test_checkpointing_with_dropout_changes_no_bit() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.2, attn_pdrop=0.1)
    model, ids = moved(cc.retrofit(GPT2LMHeadModel(config), 1, 3, solver=JACOBI)).train(), token_ids(2, 6)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        found.append(gradients(model, model(ids, labels=ids).loss))
    assert largest_difference(*found) == 0.0


def test_checkpointing_in_trainer_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """`use_cache` is at its default, True: the cache is left out without a notice, and with the same weights."""
    found = []
    for checkpointing in (False, True):
        model = make_t2mlr("llama", solver=JACOBI)
        assert model.config.use_cache
        found.append(weights(trained(model, tmp_path, gradient_checkpointing=checkpointing).model))
    assert largest_difference(*found) == 0.0
    assert not [warning for warning in recwarn if "cache" in str(warning.message)]


# Half precision

SMALL = {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 10}


def text_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    base: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)  # type: ignore[arg-type]
    model = cc.retrofit(base, 1, 3, solver=JACOBI)
    with torch.no_grad():
        model.fusion.current_scale.fill_(0.5)
        model.fusion.recurrent_scale.fill_(0.5)
    return model


@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16], ids=["autocast", "bfloat16"])
def test_small_updates_of_the_fusion_survive_half_precision(kept_in: torch.dtype, tmp_path: Path) -> None:
    """Twenty steps at 1e-5, the second ten after resumption: every weight of the fusion has moved, step by step."""
    settings: dict[str, Any] = SMALL | {"bf16": kept_in == torch.float32, "max_steps": 20, "rows": Rows([6, 6])}
    model = text_model(kept_in)
    before = weights(model)
    trained(model, tmp_path, callbacks=[StopAfter(10)], **settings)
    halfway = weights(model)
    resumed = trained(text_model(kept_in), tmp_path, resume=True, **settings)
    after = weights(resumed.model)
    for name in recurrent_parameters(model):
        assert after[name].dtype == torch.float32, name
        for earlier, later in ((before, halfway), (halfway, after)):
            change = (later[name] - earlier[name]).abs()
            assert 5e-5 < float(change.mean()) < 2e-4, name
    assert after["model.layers.0.mlp.up_proj.weight"].dtype == kept_in


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_recurrent_path_stays_in_float32_when_saved_and_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    model = text_model(torch.float32)
    with torch.no_grad():
        model.fusion.recurrent_scale.fill_(0.5 + 2**-20)
    model.save_pretrained(tmp_path / "wide")
    half: Any = cc.T2MLRForCausalLM.from_pretrained(tmp_path / "wide", dtype=dtype)
    half.save_pretrained(tmp_path / "half")
    for loaded in (half, AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")):
        assert loaded.dtype == dtype and loaded.lm_head.weight.dtype == dtype
        for name, parameter in recurrent_parameters(loaded).items():
            assert torch.equal(parameter, dict(model.named_parameters())[name]) and parameter.dtype == torch.float32
    ids = token_ids(2, 7)
    for solver in (cc.Sequential(), cc.Jacobi(7, 7)):
        logits = half(ids, solver=solver).logits
        assert logits.dtype == dtype
        assert largest_difference(logits.float(), model(ids, solver=solver).logits) < 0.03
    assert half.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 10)


def test_a_new_retrofit_of_a_half_precision_base_is_the_base() -> None:
    base: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    base.to(torch.bfloat16)
    model, ids = cc.retrofit(base, 1, 3), token_ids(2, 7)
    assert model.fusion.current_scale.dtype == torch.float32
    for solver in (cc.Sequential(), JACOBI):
        assert torch.equal(model(ids, solver=solver).logits, base(ids).logits)


# State across calls


@exact
def test_gradients_flow_through_the_cache_or_not_as_the_caller_likes() -> None:
    """Kept: those of one long call. Detached: those of a first part made without gradient."""
    model, ids = make_t2mlr("llama").train(), token_ids(2, 9)
    labels = torch.where(torch.arange(9) < 5, -100, ids)  # of the second part only: all of it back-propagates

    def through(detach: bool, solver: Any) -> dict[str, Tensor]:
        cache = cache_of(model(ids[:, :4], solver=solver, use_cache=True))
        cache = cache.detach() if detach else cache
        return gradients(model, model(ids[:, 4:], labels=labels[:, 4:], solver=solver, **{CACHE_NAME: cache}).loss)

    for name, solver in exact_solvers(9).items():
        whole = gradients(model, model(ids, labels=labels, solver=solver).loss)
        assert largest_difference(through(False, solver), whole) < 1e-13, name
        assert largest_difference(through(True, solver), without_prefix(model, ids, labels)) < 1e-13, name
        assert largest_difference(through(True, solver), whole) > 1e-5


def without_prefix(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of the second part alone: the first one's keys, values and state are constants."""
    with torch.no_grad():
        cache = cache_of(model(ids[:, :4], solver=cc.Sequential(), use_cache=True))
    return gradients(model, model(ids[:, 4:], labels=labels[:, 4:], solver=cc.Sequential(), **{CACHE_NAME: cache}).loss)


def test_a_detached_cache_is_another_one() -> None:
    model, ids = make_t2mlr("llama").train(), token_ids(2, 4)
    cache = cache_of(model(ids, use_cache=True))
    detached = cache.detach()
    model(ids, **{CACHE_NAME: detached})
    assert cache.get_seq_length() == 4 and detached.get_seq_length() == 8
    assert cache.state.register.requires_grad and cache.layers[3].keys.requires_grad
    assert not model.new_cache().detach().state


@pytest.mark.parametrize("solver", [cc.Sequential(), JACOBI], ids=lambda solver: solver.name)
def test_training_goes_on_from_a_detached_cache_and_keeps_nothing(solver: Any) -> None:
    """50 steps through one text: no graph is kept, the number of live tensors does not grow."""
    model, ids = make_t2mlr("llama").train(), token_ids(1, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    cache, live = model.new_cache(), []
    gc.collect()
    gc.freeze()  # what was there before is left out
    for step in range(50):
        piece = ids[:, 2 * step : 2 * step + 2]
        output = model(piece, labels=piece, solver=solver, use_cache=True, **{CACHE_NAME: cache.detach()})
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cache = cache_of(output)
        del output
        gc.collect()
        live.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    gc.unfreeze()
    assert cache.get_seq_length() == 100 and len(set(live[2:])) == 1 and live[2] > 10

    first = model(ids[:, :2], labels=ids[:, :2], solver=solver, use_cache=True)
    first.loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        model(ids[:, 2:4], labels=ids[:, 2:4], **{CACHE_NAME: cache_of(first)}).loss.backward()


# Labels and logits


@exact
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("solver", [cc.Sequential(), JACOBI], ids=lambda solver: solver.name)
def test_logits_to_keep_are_slices(train: bool, solver: Any) -> None:
    model, ids = make_t2mlr("llama").train(train), token_ids(2, 7)
    whole = model(ids, solver=solver).logits
    for keep, columns in ((1, slice(6, 7)), (3, slice(4, 7)), (torch.tensor([0, 5]), [0, 5])):
        assert largest_difference(model(ids, solver=solver, logits_to_keep=keep).logits, whole[:, columns]) < 1e-13
    with pytest.raises(ValueError, match="leave logits_to_keep at 0"):
        model(ids, labels=ids, logits_to_keep=3)


@exact
def test_a_row_without_labels_adds_nothing_and_is_told() -> None:
    model, ids = make_t2mlr("llama", solver=JACOBI).train(), token_ids(2, 6)
    alone = model(ids[:1], labels=ids[:1])
    labels = torch.stack([ids[0], torch.full_like(ids[1], -100)])
    with pytest.warns(UserWarning, match="a row has no label that counts"):
        both = model(ids, labels=labels)
    assert largest_difference(gradients(model, both.loss), gradients(model, alone.loss)) < 1e-14
    for num_items in (None, torch.tensor(0), torch.tensor(5)):
        with pytest.warns(UserWarning, match="a row has no label that counts"):
            none = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=num_items)
        assert none.loss.item() == 0.0
        assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients(model, none.loss).values())
    mask = torch.tensor([[1] * 6, [0] * 6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=labels, attention_mask=mask)  # a row of padding is none that was cut off


def test_a_row_without_labels_is_told_once(tmp_path: Path) -> None:
    collator = lambda batch: padded(batch) | {"labels": torch.full((len(batch), 6), -100)}  # noqa: E731
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trained(make_t2mlr("llama", solver=JACOBI), tmp_path, data_collator=collator, max_steps=6)
    assert sum("a row has no label" in str(warning.message) for warning in caught) == 1


# Stopping and going on


def test_a_resumed_run_comes_to_the_same_weights(tmp_path: Path) -> None:
    """Dropout and shuffling included, stopped in the middle of an epoch: bit by bit."""

    def run(folder: str, **changes: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=4, n_head=2, n_positions=64, resid_pdrop=0.2)
        model = moved(cc.retrofit(GPT2LMHeadModel(config), 1, 3, solver=JACOBI))
        settings: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 7, "warmup_steps": 2}
        settings |= {"gradient_accumulation_steps": 2, "data_collator": padded} | changes
        return weights(trained(model, tmp_path / folder, Rows([3, 9, 5, 2, 7, 6, 4, 8] * 3), **settings).model)

    whole = run("whole")
    run("stopped", callbacks=[StopAfter(7)])
    resumed = run("stopped", resume=str(tmp_path / "stopped" / "checkpoint-7"))
    assert largest_difference(whole, resumed) == 0.0
    assert largest_difference(whole, run("other", seed=7)) > 1e-4  # there is something to be drawn


# TRL


def test_sft_with_lora_a_rate_a_schedule_and_a_stop(tmp_path: Path) -> None:
    """TRL wraps the model in an adapter itself, so the optimizer is made after that; the callbacks find the model in it."""
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    model = cc.retrofit(AutoModelForCausalLM.from_pretrained(save_tiny_base(tmp_path / "base")), 1, 3, solver=JACOBI)
    args = SFTConfig(
        str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    seen = Seen()
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=Table.from_dict({"input_ids": [token_ids(1, length)[0].tolist() for length in (7, 3, 9, 5)]}),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "base", eos_token="<pad>"),
        peft_config=peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["fusion", "carry"]),
        optimizer_cls_and_kwargs=fusion_optimizer(args, 0.5),
        callbacks=[
            SolverSchedule(Steps([(0, 2), (2, 4)]), 1),
            seen,
            StopOnNonFinite(),
            Spoil("lora_A.default.weight", math.nan),
        ],
    )
    with pytest.raises(NonFiniteError, match=r"^step 2: the loss is nan: weights are not finite, .*lora_A"):
        trainer.train()
    assert seen.solvers == [(2, 1)] and trainer.optimizer is not None
    named = {id(parameter): name for name, parameter in trainer.model.named_parameters()}  # type: ignore[union-attr]
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            assert group["lr"] == (1e-3 if "lora" in named[id(parameter)] else 0.5)
