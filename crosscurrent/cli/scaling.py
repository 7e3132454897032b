"""`crosscurrent scaling`"""

from enum import StrEnum
from typing import Annotated

import typer


class Shape(StrEnum):
    m135 = "135m"
    m361 = "361m"
    b1 = "1b"
    b7 = "7b"


class GpuName(StrEnum):
    a100 = "a100"
    h100 = "h100"
    h200 = "h200"
    l40s = "l40s"


def scaling(
    model: Annotated[
        list[Shape] | None, typer.Option(show_default="all", help="A shape. Give the option once for each.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, powers of two; up to 8 share a node.")] = "1,8,64,512",
    gpu: Annotated[GpuName, typer.Option(help="Which kind.")] = GpuName.h100,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step on all GPUs together, a power of two.")] = 256,
    efficiency: Annotated[
        float, typer.Option(help="Assumed share of a GPU's peak that a training step reaches while it is busy.")
    ] = 0.4,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Estimate memory and time of a training step, from one GPU to many.

    For a Llama, T2MLR and RLT at four shapes: the fastest layout that fits (DDP, FSDP2 or HSDP; rows of a microbatch x
    microbatches; "again" where layers are computed once more backward), memory of each GPU in GB, and what limits the
    step. A calculation, not a measurement: docs/scaling.md names every assumption.

    \b
    Example: crosscurrent scaling
             crosscurrent scaling --model 135m --gpus 1,2,4,8 --gpu a100
             crosscurrent scaling --model 7b --gpus 512 --batch-size 1024 --sequence-length 4096
    """
    counts = _counts(gpus)
    from crosscurrent.experiments.scaling import GPUS, SHAPES, Assumptions, plan_table

    assumptions = Assumptions(efficiency=efficiency)
    chosen = [shape.value for shape in model] if model else list(SHAPES)
    for shape in chosen:
        table = plan_table(shape, GPUS[gpu.value], counts, sequence_length, batch_size, assumptions, markdown)
        title = f"{shape} on {GPUS[gpu.value].name}, {batch_size} rows of {sequence_length:,} tokens a step"
        typer.echo(f"{'### ' if markdown else ''}{title}\n\n{table}\n")


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"--gpus {text}: give numbers with commas between them, as in 1,8,64.")
    return [int(part) for part in parts]
