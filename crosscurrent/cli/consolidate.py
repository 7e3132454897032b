"""`crosscurrent consolidate`"""

from pathlib import Path
from typing import Annotated

import typer


def consolidate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run on text, finished or not.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder for the model.")],
    step: Annotated[int | None, typer.Option(min=1, show_default="the last", help="Of the checkpoint.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is there.")] = False,
) -> None:
    """Make one model of a checkpoint, also where it lies in shards (FSDP2).

    For checkpoints on the way: a run that is finished has its model in RUN/model.

    \b
    Example: crosscurrent consolidate runs/mine model-at-1000 --step 1000
    """
    from crosscurrent.experiments.consolidation import consolidate as consolidate_run

    found = consolidate_run(run, output, step, overwrite)
    typer.echo(f"Written: {output}, the model after step {found}")
