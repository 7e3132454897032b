"""The demonstrations at a size of seconds, and that what they print is what they measured."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import crosscurrent as cc
from crosscurrent.experiments import saving
from crosscurrent.experiments.checks import fingerprint, max_logit_difference
from crosscurrent.experiments.demo import retrofit, tracking
from crosscurrent.experiments.demo.retrofit import RetrofitSettings, run_retrofit
from crosscurrent.experiments.demo.tracking import ModelResult, TrackingSettings, report, run_tracking
from crosscurrent.experiments.training import train
from crosscurrent.models.checkpoints import CheckpointError
from tests.tiny_base import save_tiny_base

TINY_TRACKING = TrackingSettings(
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    steps=2,
    batch_size=8,
    train_lengths=(3, 6),
    test_lengths=(8, 11),
    num_test_sequences=20,
)


class Oracle(nn.Module):
    """Predicts, from BOS and bits, the parity of the bits so far; or its opposite."""

    def __init__(self, is_right: bool):
        super().__init__()
        self.is_right = is_right

    def forward(self, tokens: Tensor, use_cache: bool) -> Any:
        parities = (tokens * (tokens < 2)).cumsum(dim=1) % 2
        logits = torch.nn.functional.one_hot(parities if self.is_right else 1 - parities, num_classes=3)
        return SimpleNamespace(logits=logits.float())


@pytest.mark.parametrize("is_right", [True, False])
def test_score_counts_final_parities(is_right: bool) -> None:
    assert tracking.score(Oracle(is_right), 11, TINY_TRACKING, "oracle") == float(is_right)  # type: ignore[arg-type]


def test_tracking_saves_what_it_measured(tmp_path: Path) -> None:
    results = run_tracking(tmp_path / "new", seed=1, settings=TINY_TRACKING)
    saved = json.loads((tmp_path / "new" / "tracking.json").read_text())
    assert saved["seed"] == 1 and saved["settings"]["steps"] == 2
    assert list(saved["models"]) == list(results) == ["RLT-1", "Transformer"]
    for name, result in results.items():
        assert saved["models"][name]["num_parameters"] == result.num_parameters > 0
        assert saved["models"][name]["accuracy"] == {str(k): v for k, v in result.accuracy.items()}
        assert set(result.accuracy) == {8, 11}
    assert (tmp_path / "new" / "tracking.png").read_bytes().startswith(b"\x89PNG")


def test_tracking_is_reproducible(tmp_path: Path) -> None:
    def losses(seed: int) -> list[float]:
        return [result.final_loss for result in run_tracking(tmp_path, seed, TINY_TRACKING).values()]

    assert losses(0) == losses(0) != losses(1)


def test_small_rlt_learns_short_parities() -> None:
    torch.manual_seed(0)
    settings = TrackingSettings(hidden_size=32, intermediate_size=64, steps=80, batch_size=64, train_lengths=(3, 6))
    losses = tracking.train_on_parity(tracking.build_rlt(settings), settings, seed=0, name="RLT-1")
    assert min(losses[:5]) > 0.6 and max(losses[-5:]) < 0.4  # guessing gives 0.69


def test_report_states_the_numbers_it_is_given() -> None:
    """Whoever wins: the text must not know the conclusion."""
    settings = TrackingSettings(test_lengths=(40, 256))
    results = {
        "RLT-1": ModelResult(123456, 1.0, 0.7, {40: 0.5, 256: 0.25}),
        "Transformer": ModelResult(654321, 2.0, 0.1, {40: 1.0, 256: 0.875}),
    }
    text = report(settings, results)
    assert "At 256 bits, 6.4 times the longest training length: RLT-1 25.0 %, Transformer 87.5 %." in text
    for figure in ("123,456", "654,321", "50.0", "100.0", "chance 50%"):
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
