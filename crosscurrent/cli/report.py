"""`crosscurrent report`"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders that train or reproduce wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path("report"),
) -> None:
    """Show runs side by side: one page, figures and tables.

    Writes report.html, which needs nothing but itself, figures/ (PNG and SVG) and tables/ (CSV and JSON). Runs that are
    not finished are named and left out of the tables.

    \b
    Example: crosscurrent report runs/rlt-mini -o report
    """
    from crosscurrent.experiments.aggregate import collect
    from crosscurrent.experiments.report import write_report

    collection = collect(runs)
    written = write_report(collection, output)
    typer.echo(
        f"{len(collection.finished)} finished runs of {len(collection.runs)}, tasks: {', '.join(collection.tasks)}\n"
        f"Written: {written[0]}, and {len(written) - 1} files in figures/ and tables/ beside it"
    )
