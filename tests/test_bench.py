"""The benchmarks at size "tiny": that every case runs, how ratios are formed, what is kept. Times are never asserted."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from crosscurrent.cli import bench as bench_command
from crosscurrent.cli.main import app
from crosscurrent.experiments.bench import CASES, Case, Conditions, Ratio, Subject, UnavailableError, Workload
from crosscurrent.experiments.bench.case import Dtype, Size
from crosscurrent.experiments.bench.memory import peak_memory
from crosscurrent.experiments.bench.peer import PEER, make_peer
from crosscurrent.experiments.bench.rlt import make_llama, make_rlt
from crosscurrent.experiments.bench.running import run_case
from crosscurrent.experiments.bench.t2mlr import make_base, make_t2mlr
from crosscurrent.experiments.bench.tables import case_tables, target_table
from crosscurrent.experiments.bench.timing import WARM_UPS, paired_rounds
from tests.test_cli import assert_one_line_of_error

TINY = Conditions(size="tiny")
ENVIRONMENT = {"dtype": "float32", "device": "cpu", "threads": 1}
MEBIBYTE = 2**20


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def without_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "RLT", None)


def constant_case(**seconds: list[float]) -> Case:
    """A case whose subjects say that they took the given times, one run after the other, the warm-up included."""

    def subject(name: str, times: list[float]) -> Subject:
        left = iter(times)
        return Subject(name, lambda: Workload(lambda: next(left), nn.Linear(2, 3)))

    return Case(
        name="constant",
        summary="given times",
        unit="step",
        sizes={"tiny": {"width": 3}, "standard": {"width": 3}},
        repeats=3,
        has_memory=False,
        subjects=lambda conditions, figures: [subject(name, times) for name, times in seconds.items()],
        ratios=lambda figures: [Ratio("b", "a", at_most=2.0), Ratio("a", "b", at_least=2.0), Ratio("b", "missing")],
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16-autocast"])
def test_every_case_measures_all_its_subjects(name: str, dtype: Dtype) -> None:
    case, conditions = CASES[name], replace(TINY, dtype=dtype)
    result = run_case(case, conditions, repeats=2, with_memory=False)
    subjects = {subject["name"]: subject for subject in result["subjects"]}
    assert set(subjects) == {subject.name for subject in case.subjects(conditions, case.sizes["tiny"])}
    without = {name for name in subjects if name.endswith(", Triton")}  # these need a GPU
    assert {name for name, subject in subjects.items() if subject["unavailable"]} == without
    for subject in (subject for name, subject in subjects.items() if name not in without):
        assert len(subject["seconds"]) == 2 and all(seconds > 0 for seconds in subject["seconds"])
        assert subject["lower_quartile"] <= subject["median"] <= subject["upper_quartile"]
        assert subject["num_parameters"] > 1000
    for ratio in result["ratios"]:
        assert ratio["over"] in subjects and ratio["under"] in subjects
        if ratio["quantity"] == "seconds" and ratio["over"] not in without:
            assert math.isfinite(ratio["median"]) and ratio["median"] > 0
    assert json.loads(json.dumps(result))["name"] == name


@pytest.mark.parametrize("size", ["tiny", "standard", "large"])
def test_ratios_name_subjects_at_every_size(size: Size) -> None:
    for case in CASES.values():
        figures = case.sizes[size]
        names = [subject.name for subject in case.subjects(Conditions(size=size), figures)]
        assert len(set(names)) == len(names)
        for ratio in case.ratios(figures):
            assert {ratio.over, ratio.under} <= set(names), (case.name, ratio)


def test_every_target_of_the_table_is_judged_by_some_ratio() -> None:
    reaches = {
        (case.name, ratio.quantity, ratio.reach)
        for case in CASES.values()
        for ratio in case.ratios(case.sizes["standard"])
        if ratio.reach
    }
    assert reaches == {
        ("rlt-step", "seconds", "<= 1.30"),
        ("rlt-step", "seconds", "<= 1.12"),
        ("rlt-peer-step", "seconds", ">= 1.80"),
        ("rlt-peer-step", "seconds", ">= 3.50"),
        ("rlt-decode", "seconds", ">= 3.00"),
        ("rlt-prefill", "seconds", ">= 4.00"),
        ("t2mlr-step", "seconds", "<= 1.30"),
        ("t2mlr-step", "memory", "<= 1.15"),
        ("t2mlr-step", "memory", "<= 1.02"),
        ("t2mlr-decode", "seconds", "<= 1.02"),
    }


def test_models_have_the_published_sizes() -> None:
    def count(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    with torch.device("meta"):
        assert count(make_rlt("published", "meta", None)) == 27_938_944
        assert count(make_llama("published", "meta")) == pytest.approx(25.31e6, rel=1e-3)
        assert count(make_base("SmolLM2-135M", "meta")) == 134_515_008
    assert count(make_rlt("tiny", "cpu")) == pytest.approx(count(make_peer("tiny", "cpu")), rel=0.03)
    model = make_t2mlr("tiny", "cpu")
    assert model.fusion.recurrent_scale.tanh() > 0.1 and model.fusion.current_scale.tanh() > 0.1


def test_subjects_take_turns_and_each_round_begins_with_another() -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        def take() -> float:
            order.append(name)
            return float(len(order))

        return take

    times = paired_rounds({name: noting(name) for name in "abc"}, repeats=3, label="turns")
    assert "".join(order) == "abc" + "bca" + "cab" + "abc" and WARM_UPS == 1
    assert times == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}


def test_ratios_are_formed_within_rounds() -> None:
    """The median of the ratios is not the ratio of the medians, and the warm-up round counts for neither."""
    case = constant_case(a=[100.0, 1.0, 10.0, 2.0], b=[1.0, 3.0, 10.0, 4.0])
    result = run_case(case, Conditions())
    a, b = result["subjects"]
    assert (a["seconds"], a["median"], b["median"]) == ([1.0, 10.0, 2.0], 2.0, 4.0)
    assert a["num_parameters"] == 2 * 3 + 3 and a["peak_memory"] is None
    first, second, unknown = result["ratios"]
    assert (first["median"], first["lower_quartile"], first["upper_quartile"]) == (2.0, 1.5, 2.5)
    assert (first["is_reached"], second["is_reached"], unknown["median"]) == (True, False, None)
    unjudged = run_case(constant_case(a=[1.0] * 2, b=[1.0] * 2), TINY, repeats=1)["ratios"][0]
    assert unjudged["median"] == 1.0 and unjudged["is_reached"] is None  # targets are stated for the standard size


def test_tables() -> None:
    result = run_case(constant_case(a=[1.0] * 4, b=[2.0] * 4), Conditions())
    text = case_tables(result, ENVIRONMENT, markdown=False)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "a 1,000 1,000 to 1,000 9" in lines and "b / a time 2.00 2.00 to 2.00 <= 2.00 yes" in lines
    first, second = (line for line in text.splitlines() if line.startswith(("a  ", "b  ")))
    assert first.index("1,000") == second.index("2,000") and all(line == line.rstrip() for line in text.splitlines())
    assert [line.split()[-1] for line in target_table([result], markdown=False).splitlines()] == [
        "reached?",
        "yes",
        "no",
    ]
    rows = target_table([result], markdown=True).splitlines()
    assert rows[1] == "| --- | ---: | ---: | ---: |" and rows[2] == "| constant: b / a | 2.00 | <= 2.00 | yes |"


@pytest.mark.parametrize("name", ["rlt-peer-step", "rlt-decode"])
def test_without_the_peer_its_rows_say_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_peer(monkeypatch)
    finished = run(name, "--size", "tiny", "--repeats", 1, "--no-memory")
    assert finished.exit_code == 0, finished.output
    rows = [line for line in finished.stdout.splitlines() if "not installed: pip install 'crosscurrent[peer]'" in line]
    assert rows and all(row.startswith(PEER) for row in rows)
    result = run_case(CASES[name], TINY, repeats=1, with_memory=False)
    for subject in result["subjects"]:
        assert (subject["seconds"] == []) == (PEER in subject["name"])
    assert {ratio["median"] is None for ratio in result["ratios"] if PEER in ratio["over"]} == {True}
    with pytest.raises(UnavailableError):
        make_peer("tiny", "cpu")


def test_peak_memory_follows_what_is_held() -> None:
    """256 MiB held for a moment, then half of it: the peak is what was held at most, whatever this process held before."""
    program = """
import torch
from torch import nn
from crosscurrent.experiments.bench.case import Workload
from crosscurrent.experiments.bench.memory import peak_of

def holding(mebibytes):
    def run():
        torch.ones(mebibytes * 2**18)
        torch.ones(mebibytes * 2**17)
        return 1.0
    return lambda: Workload(run, nn.Identity())

print(peak_of(holding(1), holding(256), "cpu"))
"""
    torch.ones(2**28)  # 1 GiB
    finished = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=os.environ
    )
    assert 250 * MEBIBYTE < int(finished.stdout) < 300 * MEBIBYTE


def test_peak_memory_is_measured_in_a_process_of_its_own() -> None:
    found = peak_memory(CASES["rlt-step"], "RLT-0", TINY)
    assert found is not None and 0 <= found < 64 * MEBIBYTE
    with pytest.raises(ValueError, match="rlt-step, nothing: measuring its memory failed: StopIteration"):
        peak_memory(CASES["rlt-step"], "nothing", TINY)


def test_memory_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    from crosscurrent.experiments.bench import running

    monkeypatch.setattr(running, "peak_memory", lambda case, name, conditions: {"RLT-0": 10, "RLT-1": 15}.get(name, 20))
    result = run_case(CASES["rlt-step"], TINY, repeats=1)
    ratios = {ratio["over"]: ratio["median"] for ratio in result["ratios"] if ratio["quantity"] == "memory"}
    assert ratios == {"RLT-1": 1.5, "RLT-2 (4)": 2.0}


def test_json_and_output_hold_all_that_was_measured(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    options = ("--size", "tiny", "--repeats", 2, "--threads", threads, "--no-memory", "--device", "cpu")
    printed = json.loads(run("rlt-prefill", "t2mlr-prefill", *options, "--json").stdout)
    finished = run("rlt-prefill", "t2mlr-prefill", *options, "--output", tmp_path / "bench.json", "--markdown")
    assert finished.exit_code == 0, finished.output
    written = json.loads((tmp_path / "bench.json").read_text())
    for facts in (printed, written):
        assert list(facts) == ["format", "environment", "cases"] and facts["format"] == 1
        expected = {"threads": threads, "device": "cpu", "dtype": "float32", "size": "tiny", "torch": torch.__version__}
        assert expected.items() <= facts["environment"].items()
        assert {"crosscurrent", "transformers", "python", "cpu", "gpu"} <= set(facts["environment"])
        assert [case["name"] for case in facts["cases"]] == ["rlt-prefill", "t2mlr-prefill"]
        assert {"name", "summary", "unit", "sizes", "rounds", "subjects", "ratios"} == set(facts["cases"][0])
    assert (
        "## rlt-prefill" in finished.stdout
        and "| rlt-prefill: token by token / prefill, Jacobi to 1e-6 |" in finished.stdout
    )


def test_list_names_every_case() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)


def test_all_ends_with_the_table_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "rlt-step", constant_case(a=[1.0] * 9, b=[2.0] * 9))
    for name in list(CASES)[1:]:
        monkeypatch.delitem(CASES, name)
    finished = run("--all", "--repeats", 2)
    assert finished.exit_code == 0, finished.output
    assert finished.stdout.splitlines()[-3].split() == ["what", "ratio", "reach", "reached?"]


def test_profile_names_operations_and_writes_traces(tmp_path: Path) -> None:
    finished = run("rlt-prefill", "--size", "tiny", "--device", "cpu", "--profile", "--output", tmp_path / "p.json")
    assert finished.exit_code == 0, finished.output
    assert "rlt-prefill: prefill, Sequential\n" in finished.stdout and "aten::mm" in finished.stdout
    traces = sorted(path.name for path in tmp_path.iterdir())
    assert traces == [
        "p-rlt-prefill-prefill-jacobi-to-1e-6.json",
        "p-rlt-prefill-prefill-sequential.json",
        "p-rlt-prefill-token-by-token.json",
    ]
    assert json.loads((tmp_path / traces[0]).read_text())["traceEvents"]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    misspelt = run("rlt-stpe")
    assert (
        misspelt.exit_code == 2 and "Did you mean 'rlt-step'?" in misspelt.stderr and "t2mlr-decode" in misspelt.stderr
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_one_line_of_error(run("rlt-step", "--device", "cuda"), "no GPU")
    usage: list[tuple[object, ...]] = [
        (),
        ("rlt-step", "--all"),
        ("rlt-step", "--json", "--markdown"),
        ("rlt-step", "--profile", "--json"),
        ("rlt-step", "--profile", "--repeats", 2),
        ("rlt-step", "--output", tmp_path / "bench.txt"),
        ("rlt-step", "--output", tmp_path / "nowhere" / "bench.json"),
        ("rlt-step", "--repeats", 0),
        ("rlt-step", "--dtype", "float16"),
    ]
    for arguments in usage:
        finished = run(*arguments)
        assert finished.exit_code == 2 and finished.stdout == "", arguments


def test_interruption_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(conditions: Conditions, figures: Any) -> list[Subject]:
        raise KeyboardInterrupt

    monkeypatch.setitem(CASES, "rlt-prefill", replace(CASES["rlt-prefill"], subjects=interrupted))
    output = tmp_path / "bench.json"
    finished = run("t2mlr-prefill", "rlt-prefill", "--size", "tiny", "--repeats", 1, "--output", output)
    assert finished.exit_code == bench_command.INTERRUPTED and "t2mlr-prefill" in finished.stdout
    assert "Training" not in finished.stderr and len(json.loads(output.read_text())["cases"]) == 1


def test_help_teaches_by_example() -> None:
    text = run("--help").stdout
    assert "Example: crosscurrent bench" in text and "[default: float32]" in text


@pytest.mark.parametrize("broken", [False, True])
def test_gpu_script(broken: bool, tmp_path: Path) -> None:
    """With an interpreter that only notes how it is called: every part runs, and one that fails stops no other."""
    python = tmp_path / "python"
    failing = '[ "$4" = rlt-decode ] && { echo out of memory >&2; exit 1; }' if broken else ""
    python.write_text(f'#!/bin/sh\n{failing}\necho "| $* |"\n')
    python.chmod(0o755)
    script = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"
    environment = os.environ | {"PYTHON": str(python), "DEVICE": "cpu", "SIZE": "tiny"}
    finished = subprocess.run(
        ["bash", str(script), str(tmp_path / "out")], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == int(broken), finished.stderr
    tables = sorted((tmp_path / "out").glob("*.md"))
    cases = {table.read_text().split()[4] for table in tables if table.read_text()}
    assert cases == set(CASES) - ({"rlt-decode"} if broken else set())
    assert ("Not measured: rlt-decode." in finished.stdout) == broken and ("out of memory" in finished.stdout) == broken
    limits = [int(line.split()[2]) for line in script.read_text().splitlines() if line.startswith("part ")]
    assert len(limits) == len(tables) and sum(limits) <= 600
