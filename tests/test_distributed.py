"""Two processes, on CPUs with gloo, come to what one process comes to. What they run: tests/distributed_worker.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.distributed_worker import CASES, Case, build, run_trainer, train
from tests.subjects import largest_difference


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left. Starting them takes longest, so all cases share them."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed_worker", str(folder)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        name: largest_difference(found[name], one) / (float(one.abs().max()) + 1e-30) for name, one in expected.items()
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_train_as_one(case: Case, two: Path) -> None:
    """Gradients of the first step, weights after two: data parallel and sharded, with layers that run several times."""
    model = build(case)
    expected = train(model, dict(model.named_parameters()), slice(None))
    found = torch.load(two / f"{case}.pt")
    if case.trains == "fusion":
        gradients = [name for name in found if name.startswith("gradient")]
        assert gradients and all("fusion." in name or "carry." in name for name in gradients)
    tolerance = 1e-12 if case.kept_in == "float64" else 0.05
    differences = relative(found, expected)
    assert max(differences.values()) < tolerance, max(differences.items(), key=lambda item: item[1])
    assert all(bool((found[name] != 0).any()) for name in found if name.startswith("gradient"))


@pytest.mark.parametrize("case", [case for case in CASES if case.wrapper == "fsdp2"], ids=str)
def test_shards_are_saved_as_one_model(case: Case, two: Path) -> None:
    found, ids = torch.load(two / f"{case}.pt"), torch.tensor([[1, 2, 3, 4]])
    loaded: Any = AutoModelForCausalLM.from_pretrained(two / str(case), dtype="auto")
    assert type(loaded).__name__ == "T2MLRLlamaForCausalLM" and bool(torch.isfinite(loaded(ids).logits).all())
    assert loaded.config.architectures == ["T2MLRLlamaForCausalLM"]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, found[name]) and parameter.dtype == found[name].dtype, name


def test_trainer_in_two_processes_comes_to_the_weights_of_one(two: Path, tmp_path: Path) -> None:
    differences = relative(torch.load(two / "trainer.pt"), run_trainer(tmp_path, 1))
    assert max(differences.values()) < 1e-9, max(differences.items(), key=lambda item: item[1])


def test_reentrant_checkpointing_in_two_processes_is_refused(two: Path) -> None:
    assert "use_reentrant=True does not go with several processes" in (two / "refusal").read_text()
