"""`crosscurrent stability`"""

from pathlib import Path
from typing import Annotated

import typer


def stability(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A study's folder, or one run's: as train or reproduce left it.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path("stability"),
    length: Annotated[
        int | None, typer.Option(min=1, show_default="each task's longest test length", help="Length of the sequences.")
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, help="Test sequences per run; at most as many as its recipe tests with.")
    ] = 256,
) -> None:
    """Show where along a sequence trained models begin to err, and why.

    Each finished run answers test sequences at every prefix. Measured by position: the share right, the sequences without an
    error so far, the margin of the decision, and the norm of the carried state. A verdict says in words what kind of
    failure it is (never learned, stopped short, length dependence, drift, early errors, slips). An RLT that errs answers
    again with its attention cut to the training length, which shows whether that is to blame. Writes stability.html, which
    needs nothing but itself, stability.csv (a row per run), stability_by_position.csv and figures/ (PNG and SVG). Runs that
    are not finished are left out.

    \b
    Example: crosscurrent stability runs/rlt-mini -o stability
             crosscurrent stability runs/rlt-mini/parity/rlt-1/seed-42 --length 1024 --examples 64
    """
    from crosscurrent.experiments.stability import measure_runs, write_stability
    from crosscurrent.experiments.stability.page import short_table
    from crosscurrent.files import refuse_file

    refuse_file(output)  # before the long part
    measured = measure_runs(runs, length, examples)
    written = write_stability(measured, output)
    typer.echo(short_table(measured))
    typer.echo(f"Written: {written[0]}, and {len(written) - 1} files beside it")
