"""The average of weights: what it is, what is measured and saved with it, and that it goes on where it was."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import crosscurrent.training.averaging as averaging_module
import crosscurrent.training.trainer as trainer_module
from crosscurrent.evaluation.scoring import predict
from crosscurrent.experiments.run import examples_of, run
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.training.averaging import WeightAverage
from tests.recipes import tiny_recipe

DECAY = 0.7
TRAINING = {"ema_decay": DECAY, "eval_steps": 1, "max_steps": 5}


def test_the_average_is_the_moving_one_of_the_weights_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[dict[str, Tensor]] = []
    averages: list[dict[str, Tensor]] = []
    original = trainer_module.mark_complete

    def noting(folder: Path, step: int) -> None:
        original(folder, step)
        for found, file in ((weights, "model"), (averages, "average")):
            found.append(load_file(folder / f"checkpoint-{step}" / f"{file}.safetensors"))

    monkeypatch.setattr(trainer_module, "mark_complete", noting)
    noisy = {"state_noise": 0.3}  # in training alone
    recipe = tiny_recipe(training=TRAINING, model=noisy)
    result = run(recipe, tmp_path / "averaged")
    assert len(weights) == 5 and result is not None
    saved = load_file(tmp_path / "averaged" / "model" / "model.safetensors")
    assert len(saved) == len(averages[0])
    selected = averages[result["selected_step"] - 1]
    assert all(torch.equal(weight, selected[name]) for name, weight in saved.items() if name in selected)
    untied = set(saved) & set(averages[0])  # of tied weights each file names another one
    assert len(untied) >= len(saved) - 1
    for name in untied:
        expected = weights[0][name]
        for of_step, average in zip(weights, averages, strict=True):
            expected = DECAY * expected + (1 - DECAY) * of_step[name]
            torch.testing.assert_close(average[name], expected, rtol=1e-5, atol=1e-7)
        assert not torch.equal(weights[-1][name], averages[-1][name])
    # What is validated is what is saved.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "averaged" / "model").eval()
    ((_, answers),) = predict(model, examples_of(recipe, "validation"), generates=False)
    assert answers.loss == pytest.approx(result["validation"]["validation_loss"], rel=1e-6)

    # Training itself does not see it.
    monkeypatch.undo()
    run(tiny_recipe(training=TRAINING | {"ema_decay": None}, model=noisy), tmp_path / "plain")
    losses = [
        [row["loss"] for row in RunFolder(tmp_path / name).metrics.rows() if "loss" in row]
        for name in ("averaged", "plain")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("model", ["t2mlr", "lstm", "transformer", "gpt2"])
def test_averages_of_all_models_go_on_bit_for_bit(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights, buffers and the parts of wrapped models among them."""
    recipe = tiny_recipe(model, training={"ema_decay": DECAY})
    run(recipe, tmp_path / "whole")

    class Stopped(BaseException):
        """Stands for a process that ends here."""

    original = trainer_module.mark_complete

    def stopping(folder: Path, step: int) -> None:
        original(folder, step)
        if step == 4:
            raise Stopped

    monkeypatch.setattr(trainer_module, "mark_complete", stopping)
    with pytest.raises(Stopped):
        run(recipe, tmp_path / "parts")
    monkeypatch.undo()
    run(recipe, tmp_path / "parts")
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], weight) for name, weight in parts.items())
    validations = [RunFolder(tmp_path / name).metrics.validations() for name in ("whole", "parts")]
    assert validations[0] == validations[1]


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="no average before training begins"):
        _ = WeightAverage(DECAY).model
    for decay in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="give a number between 0 and 1"):
            WeightAverage(decay)


def test_a_disk_that_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(averaging_module, "save_model", full)
    with pytest.raises(OSError, match=r"average\.safetensors cannot be written: No space left"):
        run(tiny_recipe(training=TRAINING), tmp_path)
    monkeypatch.undo()
    assert run(tiny_recipe(training=TRAINING), tmp_path) is not None
