"""Runs on text side by side: validation loss against tokens and against seconds, and a table."""

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from crosscurrent.experiments.drawing import COLOURS, save_figure
from crosscurrent.experiments.run_folder import refuse_other_versions
from crosscurrent.experiments.text_run import TextRunFolder
from crosscurrent.files import write_whole

_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class TextRun:
    """A finished run.

    Attributes:
        model: a label, from the folder's name.
        seed: of the starting weights.
        result: what `result.json` holds.
        tokens, seconds, losses: of each validation, what was read and how long training had taken until then.
    """

    model: str
    seed: int
    result: dict[str, Any]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


def text_folders(paths: Sequence[Path]) -> list[TextRunFolder]:
    """The folders of runs on text among some folders, and in them."""
    files = sorted({file for path in paths for file in path.rglob("recipe.yaml")})
    return [TextRunFolder(file.parent) for file in files if "\ndata:" in "\n" + file.read_text(encoding="utf-8")]


def read_text_runs(folders: Sequence[TextRunFolder]) -> list[TextRun]:
    """The finished runs.

    Raises:
        ValueError: there are none, or they were made with different versions, so that their numbers do not compare.
    """
    finished = [folder for folder in folders if folder.is_done]
    if not finished:
        raise ValueError("no run is finished yet: there is nothing to show.")
    for folder in finished[1:]:
        refuse_other_versions(f"{folder.path} was made", folder.versions(), finished[0].versions())
    return [_read(folder) for folder in finished]


def _read(folder: TextRunFolder) -> TextRun:
    recipe = folder.recipe()
    rows = folder.metrics.rows()
    trained = [row for row in rows if "seconds" in row]
    elapsed = dict(zip((row["step"] for row in trained), accumulate(row["seconds"] for row in trained), strict=True))
    validations = folder.metrics.validations()
    per_step = recipe.training.batch_size * recipe.data.sequence_length
    name = folder.path.name
    return TextRun(
        model=folder.path.parent.name if name == f"seed-{recipe.seed}" else name,
        seed=recipe.seed,
        result=folder.result(),
        tokens=tuple(row["step"] * per_step for row in validations),
        seconds=tuple(elapsed[row["step"]] for row in validations),
        losses=tuple(row["validation_loss"] for row in validations),
    )


def write_text_report(runs: Sequence[TextRun], output: Path) -> list[Path]:
    """Write curves.png, curves.svg, table.md and table.csv.

    Raises:
        OSError: something cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    models = list(dict.fromkeys(run.model for run in runs))
    _draw(runs, models, output / "curves")
    table = [_line([run for run in runs if run.model == model]) for model in models]
    names = list(table[0])
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    lines += ["| " + " | ".join(row.values()) + " |" for row in table]
    write_whole(output / "table.md", "\n".join(lines) + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "seed", "tokens", "seconds", "validation_loss"])
    for run in runs:
        for values in zip(run.tokens, run.seconds, run.losses, strict=True):
            writer.writerow([run.model, run.seed, values[0], f"{values[1]:.1f}", f"{values[2]:.5f}"])
    write_whole(output / "curves.csv", text.getvalue())
    return [output / name for name in ("curves.png", "curves.svg", "curves.csv", "table.md")]


def _line(runs: list[TextRun]) -> dict[str, str]:
    losses = [run.result["validation_loss"] for run in runs]
    deviation = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    first = runs[0].result
    return {
        "model": runs[0].model,
        "parameters": f"{first['num_parameters']:,}",
        "tokens": f"{first['tokens']:,}",
        "seconds a step": f"{statistics.median(run.result['seconds_per_step'] for run in runs):.3f}",
        "seconds": f"{statistics.fmean(run.result['training_seconds'] for run in runs):.0f}",
        "validation loss": f"{statistics.fmean(losses):.4f}{deviation}",
        "lowest on the way": f"{statistics.fmean(min(run.losses) for run in runs):.4f}",
        "seeds": str(len(runs)),
    }


def _draw(runs: Sequence[TextRun], models: list[str], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    for axes, name, unit in ((left, "tokens", "tokens read"), (right, "seconds", "seconds of training")):
        for run in runs:
            _draw_run(axes, run, name, models, is_first=run is next(r for r in runs if r.model == run.model))
        axes.set_xlabel(unit)
        axes.grid(color="0.9")
    left.set_ylabel("validation loss (nats per token)")
    left.set_title("after the same tokens")
    right.set_title("after the same time")
    right.legend(frameon=False)
    shown = [loss for run in runs for loss in run.losses[1:] or run.losses]
    left.set_ylim(min(shown) - 0.05, max(shown) + 0.05)
    save_figure(figure, path)


def _draw_run(axes: Axes, run: TextRun, name: str, models: list[str], is_first: bool) -> None:
    place = models.index(run.model)
    axes.plot(
        getattr(run, name),
        run.losses,
        color=COLOURS[place % len(COLOURS)],
        linestyle=_LINES[place // len(COLOURS) % len(_LINES)],
        linewidth=1.2,
        label=run.model if is_first else None,
    )
