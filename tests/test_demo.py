"""The demonstrations at a size of seconds, and that what they print is what they measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import crosscurrent as cc
from crosscurrent.experiments import saving
from crosscurrent.experiments.checks import fingerprint, max_logit_difference
from crosscurrent.experiments.demo import retrofit
from crosscurrent.experiments.demo.retrofit import RetrofitSettings, run_retrofit
from crosscurrent.experiments.demo.tracking import report, run_tracking
from crosscurrent.experiments.training import train
from crosscurrent.models.checkpoints import CheckpointError
from tests.tiny_base import save_tiny_base

TINY = {
    "model": {"hidden_size": 16, "intermediate_size": 16},
    "training": {"max_steps": 2, "batch_size": 8},
    "task": {"num_test": 20, "num_validation": 8, "test_lengths": [8, 11]},
}


def test_tracking_saves_what_it_measured(tmp_path: Path) -> None:
    collection = run_tracking(tmp_path / "new", seed=1, changes=TINY)
    saved = json.loads((tmp_path / "new" / "tracking.json").read_text())
    assert [run.model for run in collection.finished] == ["rlt-1-encoder-window-8", "transformer"]
    assert {row["length"] for row in saved} == {8, 11}
    for row, run in zip(saved[::2], collection.finished, strict=True):
        assert row["model"] == run.model and run.result is not None and run.seed == 1
        assert row["mean_percent"] == pytest.approx(100 * run.result["test"]["8"]["final"])
    assert (tmp_path / "new" / "tracking.png").read_bytes().startswith(b"\x89PNG")
    assert run_tracking(tmp_path / "new", seed=1, changes=TINY) == collection  # nothing is done again


def test_report_states_the_numbers_it_is_given(tmp_path: Path) -> None:
    """Whoever wins: the text must not know the conclusion."""
    collection = run_tracking(tmp_path, changes=TINY)
    shares = {"rlt-1-encoder-window-8": {8: 0.5, 11: 0.25}, "transformer": {8: 1.0, 11: 0.875}}
    changed = []
    for run in collection.runs:
        assert run.result is not None
        test = {str(length): {"final": share} for length, share in shares[run.model].items()}
        changed.append(replace(run, result=run.result | {"test": test, "num_parameters": 123456}))
    text = report(replace(collection, runs=tuple(changed)))
    assert (
        "At 11 bits, 0.3 times the longest training length: rlt-1-encoder-window-8 25.0 %, transformer 87.5 %." in text
    )
    for figure in ("123,456", "50.0", "100.0", "chance 50%"):
        assert figure in text


def test_training_stops_at_a_loss_that_is_not_finite() -> None:
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    groups = [{"params": list(model.parameters()), "lr": 1.0}]
    with pytest.raises(ValueError, match="step 1"):
        list(train(model, groups, lambda step: model(torch.full((1, 1), torch.inf)).sum(), steps=3, warm_up_steps=1))
    assert torch.equal(model.weight, before)


def tiny_retrofit(base: Path) -> RetrofitSettings:
    return RetrofitSettings(
        base=str(base),
        layer_start=1,
        layer_end=3,
        steps=4,
        batch_size=2,
        report_every=2,
        learning_rate=1e-3,
        num_test_problems=3,
    )


def test_retrofit_demo_saves_a_model_that_a_new_process_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_retrofit(save_tiny_base(tmp_path / "base"))
    result = run_retrofit(tmp_path / "demo", seed=0, settings=settings)
    assert result.difference_to_base == 0.0
    assert result.difference_after_reload == 0.0
    assert len(result.losses) == 4 and all(gate != 0.0 for gate in result.gates)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "retrofitted")
    assert isinstance(model, cc.T2MLRForCausalLM)
    assert retrofit.gate_openings(model) == result.gates
    printed = capsys.readouterr().out
    assert "Largest logit difference to the base: 0.0" in printed
    assert printed.count("mean loss") == 2 and f"{result.gates[1]:+.4f}" in printed
    assert repr(result.answer) in printed and repr(result.expected_answer) in printed


def test_retrofit_demo_fails_if_the_saved_weights_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_another(model: Any, tokenizer: Any, folder: Path, overwrite: bool) -> None:
        saving.save_model(model, tokenizer, folder, overwrite)
        with torch.no_grad():
            model.fusion.recurrent_scale.add_(1e-6)

    monkeypatch.setattr(retrofit, "save_model", save_another)
    settings = tiny_retrofit(save_tiny_base(tmp_path / "base"))
    with pytest.raises(CheckpointError, match="not those that were saved"):
        run_retrofit(tmp_path / "demo", seed=0, settings=settings)


def test_checks_see_the_smallest_difference(tmp_path: Path) -> None:
    folder = save_tiny_base(tmp_path)
    first, second = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    ids = torch.arange(10)[None]
    assert max_logit_difference(first, second, ids) == 0.0 and fingerprint(first) == fingerprint(second)
    weight = second.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    assert fingerprint(first) != fingerprint(second)
    with torch.no_grad():
        weight.add_(0.1)
    assert max_logit_difference(first, second, ids) > 0.0
