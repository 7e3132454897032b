"""Set-up of every test: offline, seeded, and with uninitialised memory poisoned."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

from crosscurrent.models.base import load_tokenizer
from tests.float64 import KeepFloat64
from tests.smollm2 import unpack

torch.set_num_threads(1)  # tests run in parallel processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail the run if a test was skipped")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _seeded_and_poisoned() -> Iterator[None]:
    """With deterministic algorithms torch fills memory from `torch.empty` with NaN, so that reading it shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def exact_arithmetic() -> Iterator[None]:
    with KeepFloat64():
        yield


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct and its tokenizer, made once for all processes of a run. Not to be written into."""
    temporary = tmp_path_factory.getbasetemp()
    folder = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / "smollm2"
    unpack(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Any:
    """Not to be changed."""
    return load_tokenizer(str(smollm2_folder))


@pytest.fixture
def record_figures(record_property: Callable[[str, object], None]) -> Callable[[str, dict[str, float]], None]:
    """Keep measured figures for the summary at the end of the run."""

    def record(what: str, figures: dict[str, float]) -> None:
        record_property(what, ", ".join(f"{name} {value:.1e}" for name, value in figures.items()))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [line for report in terminalreporter.getreports("passed") for line in report.user_properties]
    if lines:
        terminalreporter.section("largest differences measured")
    for what, figures in sorted(lines):
        terminalreporter.line(f"{what}: {figures}")
