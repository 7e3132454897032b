"""The Triton kernels: equal to the plain code (in Triton's interpreter), compiled for GPUs, used when asked for."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.recurrence import GatedFusion, NormalizedSum, kernels
from crosscurrent.recurrence.kernels import triton_for, use_triton
from tests.triton_worker import COMPARISONS

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_worker(task: str, folder: Path, **environment: str) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.triton_worker", task],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_CACHE_DIR": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_worker("interpret", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("name", COMPARISONS)
def test_outputs_and_every_gradient_are_those_of_the_plain_code(name: str, interpreted: dict[str, Any]) -> None:
    """Odd sizes, broadcast states, strided tensors, NaN where nothing may be read, and memory that was filled with NaN."""
    found = interpreted[name]
    rounding = {"bfloat16": 3e-2, "autocast": 3e-2, "narrow": 3e-2, "float16": 1e-2, "model": 1e-5}
    tolerance = next((value for key, value in rounding.items() if key in name), 2e-6)
    assert len(found["errors"]) >= 3
    for what, (error, error_of_plain) in found["errors"].items():
        assert error < max(tolerance, 3 * error_of_plain), (what, error, error_of_plain)
    assert found["dtypes"] == [] and found["repeats"]
    wanted = {"merge"} if "merge" in name or "rlt" in name else {"gated_fusion"} if "fusion" in name else set()
    wanted = {"gated_fusion", "normalized_sum"} if "model-t2mlr" in name else wanted or {"normalized_sum"}
    assert set(found["calls"]) == wanted


@needs_triton
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    sizes = run_worker("compile", tmp_path)
    assert len({key.split()[0] for key in sizes}) == 6 and len(sizes) == 6 * 3 and min(sizes.values()) > 1000


@needs_triton
def test_on_a_cpu_the_plain_code_runs() -> None:
    fuse, x, r = GatedFusion(8), torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    with use_triton():
        assert triton_for(x, r) is None
        assert torch.equal(fuse(x, r), x)
        fused = torch.ones(2, 3, 1, dtype=torch.bool)
        assert type(NormalizedSum(8)(x, r, fused).grad_fn).__name__ != "_NormalizedSumBackward"


def test_off_unless_asked_for_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert not kernels._is_on
    with pytest.raises(KeyError), use_triton():
        assert kernels._is_on
        with use_triton(False):
            assert not kernels._is_on
        assert kernels._is_on
        raise KeyError
    assert not kernels._is_on


def test_without_triton_asking_for_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'crosscurrent\[gpu\]'"), use_triton():
        pass
    with use_triton(False):
        assert triton_for(torch.ones(1, 1, 1)) is None
    monkeypatch.setenv("CROSSCURRENT_TRITON", "1")
    with pytest.raises(ValueError, match="triton is not installed"):
        kernels._from_environment()


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), (None, False)])
def test_the_environment_decides_for_a_process(value: str | None, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    if value is None:
        monkeypatch.delenv("CROSSCURRENT_TRITON", raising=False)
    else:
        monkeypatch.setenv("CROSSCURRENT_TRITON", value)
    assert kernels._from_environment() is is_on


def test_other_values_in_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSCURRENT_TRITON", "yes")
    with pytest.raises(ValueError, match="CROSSCURRENT_TRITON='yes' is not allowed: give 1"):
        kernels._from_environment()
