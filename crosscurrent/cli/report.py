"""`crosscurrent report`"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders that train or reproduce wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")] = Path("report"),
) -> None:
    """Show runs side by side: one page, figures and tables.

    Of tasks: writes report.html, which needs nothing but itself, figures/ (PNG and SVG) and tables/ (CSV and JSON). Of
    text: validation loss against tokens and against seconds (PNG, SVG, CSV), and a table (Markdown). Of fine-tuning: scores
    with paired intervals, for each folder of models a table (Markdown, JSON) and a figure. Runs that are not finished are
    left out.

    \b
    Example: crosscurrent report runs/rlt-mini -o report
    """
    from crosscurrent.experiments.aggregate import collect
    from crosscurrent.experiments.finetuning.report import finetune_folders, read_comparisons, write_comparison
    from crosscurrent.experiments.report import write_report
    from crosscurrent.experiments.text_report import read_text_runs, text_folders, write_text_report

    on_text = text_folders(runs)
    if on_text:
        found = read_text_runs(on_text)
        files = write_text_report(found, output)
        typer.echo(f"{len(found)} finished runs of {len(on_text)}\nWritten: {', '.join(map(str, files))}")
        return
    if finetune_folders(runs):
        compared = read_comparisons(runs)
        names = [folder.name for folder in compared]
        if len(set(names)) < len(names):
            raise ValueError(
                f"two comparisons have the same name ({', '.join(sorted(names))}): report them one by one."
            )
        for folder, entries in compared.items():
            place = output if len(compared) == 1 else output / folder.name
            typer.echo(f"Written: {', '.join(map(str, write_comparison(entries, place)))}")
        return
    collection = collect(runs)
    written = write_report(collection, output)
    typer.echo(
        f"{len(collection.finished)} finished runs of {len(collection.runs)}, tasks: {', '.join(collection.tasks)}\n"
        f"Written: {written[0]}, and {len(written) - 1} files in figures/ and tables/ beside it"
    )
