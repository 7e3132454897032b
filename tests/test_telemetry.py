"""Telemetry of the recurrence: against the equations written out, and through the Trainer into every log."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import crosscurrent as cc
from crosscurrent.evaluation.gap import train_decode_gap
from crosscurrent.evaluation.telemetry import (
    effective_memory,
    gate_openings,
    lens_logits,
    measure_recurrence,
    trace,
)
from crosscurrent.training.monitoring import Monitor, RecurrenceTelemetry, TrainDecodeGap
from tests.subjects import T2MLR_BASES, largest_difference, make_base, make_rlt, make_t2mlr, moved, token_ids

START, END = 1, 3


def hidden_states(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The streams entering and leaving the recurrent range."""
    states = model(ids, solver=cc.Sequential(), output_hidden_states=True, **inputs).hidden_states
    return states[START], states[END]


def states_by_hand(model: Any, leaving: Tensor) -> Tensor:
    """R_t = RMSNorm(h_t + R_{t-1})."""
    register, found = torch.zeros_like(leaving[:, 0]), []
    for column in range(leaving.shape[1]):
        register = model.carry.norm(leaving[:, column] + register)
        found.append(register)
    return torch.stack(found, dim=1)


@torch.no_grad()
def test_trace_is_what_the_equations_say(exact_arithmetic: None) -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, 7)
    found = trace(model, ids)
    entering, leaving = hidden_states(model, ids)
    states = states_by_hand(model, leaving)
    read = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    fusion = model.fusion
    expected = {
        "current_gate": torch.sigmoid(fusion.current_gate(fusion.current_gate.from_stream(entering), read)).mean(-1),
        "recurrent_gate": torch.sigmoid(fusion.recurrent_gate(fusion.recurrent_gate.from_stream(entering), read)).mean(
            -1
        ),
        "stream_norm": entering.norm(dim=-1),
        "state_norm": read.norm(dim=-1),
        "change": (fusion(entering, read) - entering).norm(dim=-1) / entering.norm(dim=-1),
        "states": states,
        "logits": model(ids, solver=cc.Sequential()).logits,
    }
    for name, value in expected.items():
        assert largest_difference(getattr(found, name), value) < 1e-12, name
    assert found.fused.all() and (found.documents == 0).all() and found.change.min() > 0


@torch.no_grad()
def test_trace_of_padding_documents_and_tokens_that_are_not_recurrent(exact_arithmetic: None) -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    segments = torch.tensor([[0] * 9, [0] * 5 + [1] * 4])
    recurrent = torch.ones(2, 9, dtype=torch.bool)
    recurrent[1, :3] = False
    inputs = {"attention_mask": mask, "segment_ids": segments, "recurrent_mask": recurrent}
    found = trace(model, {"input_ids": ids, **inputs, "labels": ids})
    assert torch.equal(found.fused, (mask == 1) & recurrent)
    for name in ("current_gate", "recurrent_gate", "stream_norm", "state_norm", "change"):
        assert torch.equal(getattr(found, name).isnan(), ~found.fused), name
    assert torch.equal(found.state_norm == 0, torch.tensor([[c == 2 for c in range(9)], [c == 5 for c in range(9)]]))
    alone = trace(model, ids[:1, 2:])
    second = trace(model, ids[1:, 5:])
    for name in ("current_gate", "state_norm", "change", "states"):
        assert largest_difference(getattr(found, name)[:1, 2:], getattr(alone, name)) < 1e-12, name
        assert largest_difference(getattr(found, name)[1:, 5:], getattr(second, name)) < 1e-12, name


@torch.no_grad()
def test_models_of_the_authors_kind_can_be_traced(exact_arithmetic: None) -> None:
    base: Any = make_base("llama")
    settings: dict[str, Any] = {"gates_read": "projected_state", "state_bound": 5.0, "state_eps": 1e-6}
    config = cc.T2MLRConfig(base_config=base.config, layer_start=1, layer_end=3, **settings)
    model = moved(cc.T2MLRForCausalLM(config))
    found = trace(model, token_ids(2, 7))
    assert found.states.isfinite().all() and found.change.min() > 0
    assert effective_memory(model, token_ids(2, 9), 3).remaining[0] == pytest.approx(1.0)


@torch.no_grad()
def test_effective_memory_with_closed_gates_is_the_norm_alone(exact_arithmetic: None) -> None:
    """Nothing but R_t = RMSNorm(h_t + R_{t-1}) carries the perturbation, and h_t is known."""
    model, ids, position = make_t2mlr("llama"), token_ids(1, 12), 4
    model.fusion.current_scale.zero_()
    model.fusion.recurrent_scale.zero_()
    _, leaving = hidden_states(model, ids)
    clean = states_by_hand(model, leaving)
    start = clean[:, position - 1]
    direction = torch.randn(3, 16, generator=torch.Generator().manual_seed(7)).double()
    state = start + 0.05 * start.norm() * direction / direction.norm(dim=-1, keepdim=True)
    expected = [1.0]
    for column in range(position, 12):
        state = model.carry.norm(leaving[:, column] + state)
        difference = (state - clean[:, column]).norm(dim=-1) / clean[:, column].norm(dim=-1)
        expected.append(difference.mean().item() / 0.05)
    memory = effective_memory(model, ids, position, num_directions=3, seed=7)
    assert memory.remaining == pytest.approx(expected, abs=1e-12)
    assert memory.remaining_clean == pytest.approx(expected, abs=1e-12)
    assert memory.tokens == next((n for n, left in enumerate(expected) if left <= 0.1), None)


@torch.no_grad()
def test_effective_memory_through_the_whole_model(exact_arithmetic: None) -> None:
    """With one token more a state is carried on by the keys and values too; the first one sees only the state."""
    model, ids = make_t2mlr("llama"), token_ids(2, 10)
    memory = effective_memory(model, ids, position=3)
    assert len(memory.remaining) == len(memory.remaining_clean) == 8
    assert memory.remaining[1] == pytest.approx(memory.remaining_clean[1], abs=1e-12)
    assert memory.remaining[2] != pytest.approx(memory.remaining_clean[2], abs=1e-6)
    assert effective_memory(model, ids, position=3, horizon=2).remaining == pytest.approx(memory.remaining[:3])
    halves = [effective_memory(model, ids, 3, size=size, num_directions=1).remaining[-1] for size in (0.05, 0.025)]
    assert halves[0] == pytest.approx(halves[1], rel=0.2)  # a share of the perturbation, whatever its size


@torch.no_grad()
def test_effective_memory_passes_over_padding_and_stops_with_the_document(exact_arithmetic: None) -> None:
    model, ids = make_t2mlr("llama"), token_ids(1, 10)
    alone = effective_memory(model, ids[:, :7], position=3)
    right = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 7 + [0] * 3])}
    hole = torch.cat([ids[:, :5], ids[:, :1], ids[:, 5:7]], dim=1)
    inside = {"input_ids": hole, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 1, 1]])}
    packed = {"input_ids": ids, "position_ids": torch.tensor([[*range(7), *range(3)]])}
    beside = torch.cat([ids, token_ids(1, 10, seed=8)])
    late = {"input_ids": beside, "attention_mask": torch.tensor([[1] * 7 + [0] * 3, [0] * 5 + [1] * 5])}
    for batch in (right, inside, packed, late):
        memory = effective_memory(model, batch, position=3)
        assert memory.remaining == pytest.approx(alone.remaining, abs=1e-12)
        assert memory.remaining_clean == pytest.approx(alone.remaining_clean, abs=1e-12)


def test_telemetry_gathers_the_measurements() -> None:
    model = make_t2mlr("llama", solver=cc.Jacobi(3, 1))
    ids = token_ids(2, 9)
    found, measured = trace(model, ids), measure_recurrence(model, ids, horizon=3)
    assert measured.current_gate == pytest.approx(found.current_gate.mean().item())
    assert measured.recurrent_gate == pytest.approx(found.recurrent_gate.mean().item())
    assert measured.state_norm == pytest.approx(found.state_norm[:, 1:].mean().item())
    assert measured.stream_norm == pytest.approx(found.stream_norm[:, 1:].mean().item())
    assert (measured.current_opening, measured.recurrent_opening) == gate_openings(model)
    assert gate_openings(model)[1] == pytest.approx(model.fusion.recurrent_scale.tanh().item())
    assert measured.residuals == tuple(model(ids).solver_report.residuals.tolist()) and len(measured.residuals) == 3
    assert measured.memory == effective_memory(model, ids, horizon=3)
    names = measured.named()
    assert names["residual_3"] == measured.residuals[2] and names["change"] == measured.change
    assert ("effective_memory" in names) == (measured.memory.tokens is not None)
    assert all(isinstance(value, float) for value in names.values())


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = make_t2mlr("llama").train()
    model.fusion.eval()
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    measure_recurrence(model, token_ids(1, 6))
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert largest_difference(weights, dict(model.state_dict())) == 0
    assert not any(module._forward_hooks for module in model.modules())


def test_what_has_nothing_to_look_at_is_refused() -> None:
    ids = token_ids(1, 6)
    for model, batch, words in (
        (make_base("llama"), ids, "no recurrence"),
        (make_rlt(), ids, "T2MLR models only"),
        (make_t2mlr("llama", feedback_interval=None), ids, "feedback_interval=None"),
        (make_t2mlr("llama"), {"input_ids": ids, "recurrent_mask": torch.zeros(1, 6)}, "no token of the batch"),
        (make_t2mlr("llama"), ids[:, :1], "at least two tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            measure_recurrence(model, batch)
    model = make_t2mlr("llama")
    settings: list[tuple[dict[str, Any], str]] = [
        ({"position": 6}, "position=6"),
        ({"position": 0}, "position=0"),
        ({"horizon": 0}, "horizon=0"),
        ({"size": 0.0}, "size=0.0"),
        ({"num_directions": 0}, "num_directions=0"),
    ]
    for given, words in settings:
        with pytest.raises(ValueError, match=words):
            effective_memory(model, ids, **given)
    packed = {"input_ids": ids, "segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1]])}
    with pytest.raises(ValueError, match="after column 3"):
        effective_memory(model, packed, position=3)


@pytest.mark.parametrize("name", T2MLR_BASES)
@torch.no_grad()
def test_lens_reads_the_last_layers_output_as_the_model_does(name: str, exact_arithmetic: None) -> None:
    model, ids = make_t2mlr(name), token_ids(1, 5)
    last: list[Tensor] = []
    handle = model.layers[-1].register_forward_hook(lambda module, args, output: last.append(output))
    logits = model(ids).logits
    handle.remove()
    assert largest_difference(lens_logits(model, last[-1]), logits) < 1e-12


def with_adapter(model: Any) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["fusion", "carry"], init_lora_weights=False)
    return get_peft_model(model, config)


def test_wrapped_models_are_measured_as_they_compute() -> None:
    ids = token_ids(2, 6)
    wrapped = with_adapter(make_t2mlr("llama"))
    with torch.no_grad():
        wrapped.base_model.model.fusion.recurrent_scale.fill_(0.9)  # of the copy that is trained
    found = trace(wrapped, ids)
    assert torch.equal(found.logits, wrapped(ids, solver=cc.Sequential()).logits)
    assert measure_recurrence(wrapped, ids).recurrent_opening == pytest.approx(torch.tensor(0.9).tanh().item())
    with wrapped.disable_adapter():
        assert trace(wrapped, ids).logits.equal(make_t2mlr("llama")(ids, solver=cc.Sequential()).logits)
    merged = wrapped.merge_and_unload()
    assert largest_difference(trace(merged, ids).change, found.change) < 1e-6 and found.change.isfinite().all()


def test_data_parallel_and_compiled_models_are_unwrapped() -> None:
    ids, model = token_ids(2, 6), make_t2mlr("llama")
    expected, gap = measure_recurrence(model, ids), train_decode_gap(model, ids, cc.Jacobi(2, 1))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for wrapped in (nn.parallel.DistributedDataParallel(model), torch.compile(model)):
            assert measure_recurrence(wrapped, ids) == expected
            assert train_decode_gap(wrapped, ids, cc.Jacobi(2, 1)) == gap
    finally:
        torch.distributed.destroy_process_group()


EXAMPLES = [{"input_ids": ids, "labels": ids} for ids in token_ids(8, 6)]
PROBE = {"input_ids": token_ids(2, 8, seed=9), "attention_mask": torch.tensor([[1] * 8, [0] * 2 + [1] * 6])}


def trainer_of(model: Any, folder: Path, callbacks: list[TrainerCallback] | None = None, **settings: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return Trainer(
        model=model, args=TrainingArguments(**(arguments | settings)), train_dataset=EXAMPLES, callbacks=callbacks
    )


def small_model() -> Any:
    return make_t2mlr("llama", solver=cc.Jacobi(2, 1)).float()


NAMES = {
    "recurrence/current_gate",
    "recurrence/recurrent_gate",
    "recurrence/current_opening",
    "recurrence/recurrent_opening",
    "recurrence/state_norm",
    "recurrence/stream_norm",
    "recurrence/change",
    "recurrence/residual_1",
    "recurrence/residual_2",
    "gap/loss",
    "gap/training_loss",
    "gap/exact_loss",
    "gap/token_agreement",
    "gap/mean_difference",
    "gap/max_difference",
    "gap/residual_1",
    "gap/residual_2",
}


def test_values_reach_history_console_and_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trainer_of(small_model(), tmp_path, report_to="tensorboard")
    RecurrenceTelemetry(PROBE, horizon=4).attach_to(trainer)
    TrainDecodeGap([PROBE, token_ids(1, 5)]).attach_to(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 4 and all(row.keys() >= NAMES for row in rows)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for name in NAMES:
        written = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert written == {row["step"]: pytest.approx(row[name], rel=1e-6, abs=1e-12) for row in rows}, name
    printed = capsys.readouterr().out
    assert printed.count("recurrence/state_norm") == printed.count("gap/token_agreement") == 4
    assert rows[0]["recurrence/recurrent_opening"] != rows[-1]["recurrence/recurrent_opening"]
    assert "gap/loss" not in trainer.state.log_history[-1]  # the summary
    model = trainer.model
    assert rows[-1]["gap/training_loss"] == train_decode_gap(model, [PROBE, token_ids(1, 5)]).loss
    assert rows[-1]["recurrence/change"] == measure_recurrence(model, PROBE, horizon=4).change


def test_monitored_training_is_the_same_training(tmp_path: Path) -> None:
    weights = []
    for is_monitored in (False, True):
        torch.manual_seed(0)
        model = make_t2mlr("gpt2", solver=cc.Jacobi(2, 1)).float()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        trainer = trainer_of(model, tmp_path)
        if is_monitored:
            RecurrenceTelemetry(PROBE, horizon=3).attach_to(trainer)
            TrainDecodeGap(PROBE).attach_to(trainer)
        trainer.train()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_every_so_many_logs_also_after_a_restart(tmp_path: Path) -> None:
    def steps(trainer: Trainer) -> list[float]:
        return [row["step"] for row in trainer.state.log_history if "gap/loss" in row]

    settings: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    whole = trainer_of(small_model(), tmp_path, **settings)
    TrainDecodeGap(PROBE, every=3).attach_to(whole).attach_to(whole)
    whole.train()
    assert steps(whole) == [1, 4, 7]
    resumed = trainer_of(small_model(), tmp_path, **settings)
    TrainDecodeGap(PROBE, every=3).attach_to(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert steps(resumed) == [1, 4, 7]
    assert whole.state.log_history[6] == resumed.state.log_history[6]


def test_values_of_an_adapter_are_logged(tmp_path: Path) -> None:
    trainer = trainer_of(with_adapter(small_model()), tmp_path, label_names=["labels"])
    RecurrenceTelemetry(PROBE, horizon=3).attach_to(trainer)
    TrainDecodeGap(PROBE).attach_to(trainer)
    trainer.train()
    openings = [row["recurrence/recurrent_opening"] for row in trainer.state.log_history if "loss" in row]
    assert len(set(openings)) == 4  # the copy that PEFT trains, not the original


def test_a_monitor_passed_as_a_callback_says_what_it_misses(tmp_path: Path) -> None:
    trainer = trainer_of(small_model(), tmp_path, callbacks=[TrainDecodeGap(PROBE)], max_steps=1)
    with pytest.warns(UserWarning, match=r"attach_to\(trainer\)"):
        trainer.train()
    assert "gap/loss" in trainer.state.log_history[0]


def test_monitors_refuse_what_they_cannot_measure(tmp_path: Path) -> None:
    plain = trainer_of(make_base("llama").float(), tmp_path)
    monitors: list[Monitor] = [RecurrenceTelemetry(PROBE), TrainDecodeGap(PROBE)]
    for monitor in monitors:
        with pytest.raises(ValueError, match="no recurrence"):
            monitor.attach_to(plain)
        assert monitor not in plain.callback_handler.callbacks
    with pytest.raises(ValueError, match="T2MLR"):
        RecurrenceTelemetry(PROBE).attach_to(trainer_of(make_rlt().float(), tmp_path))
    model = trainer_of(small_model(), tmp_path)
    strange = {"input_ids": torch.tensor([[1, 99]])}
    for monitor in (RecurrenceTelemetry(strange), TrainDecodeGap([PROBE, strange])):
        with pytest.raises(ValueError, match="input_ids holds 99"):  # now, not at the first log
            monitor.attach_to(model)
    with pytest.raises(ValueError, match="every=0"):
        RecurrenceTelemetry(PROBE, every=0)
    with pytest.raises(ValueError, match="no examples"):
        TrainDecodeGap([])
