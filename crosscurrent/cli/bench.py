"""`crosscurrent bench`"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from crosscurrent.cli.errors import INTERRUPTED


class Dtype(StrEnum):
    float32 = "float32"
    autocast = "bfloat16-autocast"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Size(StrEnum):
    tiny = "tiny"
    standard = "standard"
    large = "large"


def bench(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="CASE", help="What to measure: names that --list shows.")
    ] = None,
    run_all: Annotated[
        bool, typer.Option("--all", help="Measure everything, and judge it by what is to be reached.")
    ] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="Only say which cases there are.")] = False,
    repeats: Annotated[
        int | None, typer.Option(min=1, show_default="the case's", help="Rounds to measure, beside one that warms up.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, show_default="PyTorch's", help="Threads on the CPU.")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="float32 weights either way. rlt-peer-step always measures both.")
    ] = Dtype.float32,
    device: Annotated[Device, typer.Option(help="auto: the GPU if there is one.")] = Device.auto,
    size: Annotated[
        Size, typer.Option(help="standard: the published sizes; tiny: to see that it works; large: for a GPU.")
    ] = Size.standard,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, in a process for each subject.")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", show_default="none", help="A .json file for all that was measured.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Instead, profile a run of each subject; with --output also write traces."),
    ] = False,
) -> None:
    """Measure what recurrence costs on this machine.

    The subjects of a case take turns, round by round, so that what else the machine does meets all of them; a ratio is
    formed within each round, and the median and quartiles over the rounds are shown. Seconds are this machine's;
    ratios carry over better. All cases take 10 to 15 minutes on two CPU cores. Peak memory is that of a process of
    its own, weights included. rlt-peer-step and rlt-decode also measure the package rlt-pytorch, if it is
    installed (pip install 'crosscurrent[peer]').

    \b
    Example: crosscurrent bench --list
             crosscurrent bench rlt-step --threads 2
             crosscurrent bench t2mlr-step t2mlr-decode --no-memory --repeats 3
             crosscurrent bench --all --output bench.json
             crosscurrent bench t2mlr-step --profile --output profile.json
    """
    _refuse_contradictions(cases, run_all, list_cases, repeats, profile, as_json, markdown, output)

    from crosscurrent.experiments.bench import CASES, Conditions, find_case

    if list_cases:
        width = max(map(len, CASES))
        typer.echo("\n".join(f"{name:<{width}}  {case.summary}" for name, case in CASES.items()))
        return
    try:
        chosen = list(CASES.values()) if run_all else [find_case(name) for name in cases or []]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    conditions = Conditions(size.value, dtype.value, _device(device), threads)
    try:
        if profile:
            _profile(chosen, conditions, output)
        else:
            _measure(chosen, conditions, repeats, memory, output, as_json, markdown)
    except KeyboardInterrupt:
        typer.echo("stopped: cases that were finished are shown above.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _refuse_contradictions(
    cases: list[str] | None,
    run_all: bool,
    list_cases: bool,
    repeats: int | None,
    profile: bool,
    as_json: bool,
    markdown: bool,
    output: Path | None,
) -> None:
    if [bool(cases), run_all, list_cases].count(True) != 1:
        raise typer.BadParameter("give names of cases, or --all, or --list.")
    if as_json and markdown:
        raise typer.BadParameter("give either --json or --markdown.")
    if profile and (as_json or markdown or repeats is not None):
        raise typer.BadParameter(
            "--profile runs once and prints its own tables: leave out --repeats, --json and --markdown."
        )
    if output is not None and (output.suffix != ".json" or not output.parent.is_dir()):
        raise typer.BadParameter(f"--output {output}: give a name that ends in .json, in a folder that exists.")


def _device(device: Device) -> str:
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here. Use --device cpu.")
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def _measure(
    chosen: list[Any],
    conditions: Any,
    repeats: int | None,
    memory: bool,
    output: Path | None,
    as_json: bool,
    markdown: bool,
) -> None:
    from crosscurrent.experiments.bench import environment, run_case
    from crosscurrent.experiments.bench.tables import case_tables, target_table

    results: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for case in chosen:
        results.append(run_case(case, conditions, repeats=repeats, with_memory=memory))
        facts = {"format": 1, "environment": environment(conditions), "cases": results}
        if output is not None:  # after each case, so that little is lost
            output.write_text(json.dumps(facts, indent=2) + "\n")
        if not as_json:
            typer.echo(case_tables(results[-1], facts["environment"], markdown) + "\n")
    typer.echo(json.dumps(facts, indent=2) if as_json else target_table(results, markdown))


def _profile(chosen: list[Any], conditions: Any, output: Path | None) -> None:
    from crosscurrent.experiments.bench.profiling import profile_case

    for case in chosen:
        for table in profile_case(case, conditions, output):
            typer.echo(table + "\n")
