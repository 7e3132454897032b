"""The figures of a report."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from crosscurrent.experiments.aggregate import Run, Score
from crosscurrent.experiments.drawing import COLOURS
from crosscurrent.tasks import Task

# Markers and lines differ without colour. Each run through the colours takes the next line.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_LINES = ("-", "--", ":", "-.")


def style_of(model: str, models: Sequence[str]) -> dict[str, Any]:
    """Colour and line of a model, the same in all figures of a report, and different for up to 32 models."""
    place = models.index(model)
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": _LINES[place // len(COLOURS) % len(_LINES)]}


def _marker_of(model: str, models: Sequence[str]) -> str:
    return _MARKERS[models.index(model) % len(_MARKERS)]


def draw_generalisation(
    scores: Sequence[Score], title: str, chance: float, trained: tuple[int, int], models: Sequence[str]
) -> Figure:
    """A metric against the length: mean and sample standard deviation, and every seed as a small mark.

    Args:
        scores: of one task and one metric.
        title: above the figure.
        chance: the share that guessing gives.
        trained: the shortest and the longest training length, shown as a shaded range.
        models: all models of the report, which decides their styles.
    """
    figure, axes = plt.subplots(figsize=(7.2, 5.0), layout="constrained")
    shortest, longest = trained
    label = f"training lengths ({shortest}–{longest})" if longest > shortest else f"training length ({longest})"
    axes.axvspan(shortest * 0.97, longest * 1.03, color="0.9", label=label)
    axes.axhline(100 * chance, color="0.35", linestyle=":", label=f"chance ({100 * chance:.3g} %)")
    lengths = sorted({score.length for score in scores})
    present = [model for model in models if any(score.model == model for score in scores)]
    for place, model in enumerate(present):
        _draw_model(axes, sorted((s for s in scores if s.model == model), key=lambda s: s.length), place, models)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(
        max(shortest * 0.97, min(lengths[0] * 0.6, longest * 0.5)) if shortest < lengths[0] else shortest * 0.9,
        lengths[-1] * 1.1,
    )
    axes.set_ylim(-3, 103)
    axes.set_xlabel("payload length (log scale)")
    axes.set_ylabel(f"{scores[0].metric.replace('_', ' ')} right (%)")
    axes.set_title(f"{title}: mean and sample SD over seeds; small marks: each seed")
    axes.grid(axis="y", color="0.88")
    figure.legend(fontsize="small", loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_model(axes: Axes, scores: Sequence[Score], place: int, models: Sequence[str]) -> None:
    model = scores[0].model
    style, marker = style_of(model, models), _marker_of(model, models)
    shift = 1 + 0.012 * place  # so that equal models can be told apart
    xs = [score.length * shift for score in scores]
    errors = [100 * (score.standard_deviation or 0.0) for score in scores]
    counts = {len(score.values) for score in scores}
    label = f"{model} (n = {'–'.join(map(str, sorted(counts)))})"
    axes.errorbar(
        xs, [100 * s.mean for s in scores], errors, marker=marker, capsize=3, linewidth=1.8, label=label, **style
    )
    for x, score in zip(xs, scores, strict=True):
        values = [100 * value for value in score.values.values()]
        axes.plot(
            [x] * len(values), values, marker=marker, color=style["color"], alpha=0.55, markersize=3.5, linestyle="none"
        )


def draw_curves(runs: Sequence[Run], task: Task, models: Sequence[str]) -> Figure:
    """Loss of every step and of every validation, unsmoothed, and the first metric in validation; a line per seed.

    If the lengths of some runs grow, the greatest length as well.
    """
    grows = any("max_length" in row for run in runs for row in run.rows)
    figure, all_axes = plt.subplots(1, 3 + grows, figsize=(11.5 + 3.5 * grows, 3.8), layout="constrained")
    metric = task.metrics[0]
    seen: set[str] = set()
    for run in runs:
        style = style_of(run.model, models)
        label = None if run.model in seen else run.model
        seen.add(run.model)
        training = [(row["step"], row["loss"]) for row in run.rows if "loss" in row]
        checks = [row for row in run.rows if "validation_loss" in row]
        lengths = run.recipe.task.validation_lengths
        scores = [100 * sum(row[f"validation_{metric}_{n}"] for n in lengths) / len(lengths) for row in checks]
        steps = [row["step"] for row in checks]
        # Thousands of points each: as a picture inside the drawing they take a fraction of the space.
        all_axes[0].plot(*zip(*training, strict=True), linewidth=0.7, alpha=0.85, label=label, rasterized=True, **style)
        all_axes[1].plot(steps, [row["validation_loss"] for row in checks], linewidth=1, **style)
        all_axes[2].plot(steps, scores, linewidth=1, **style)
        lengths_drawn = [(row["step"], row["max_length"]) for row in run.rows if "max_length" in row]
        if lengths_drawn:
            all_axes[3].step(*zip(*lengths_drawn, strict=True), where="post", linewidth=1, **style)
            all_axes[3].yaxis.set_major_locator(MaxNLocator(integer=True))
        if run.result is not None:
            selected = steps.index(run.result["selected_step"])
            all_axes[1].plot(
                steps[selected], checks[selected]["validation_loss"], "o", color=style["color"], markersize=4
            )
    titles = (
        "training loss, every step",
        "validation loss (dot: selected)",
        f"validation, {metric.replace('_', ' ')} (%)",
        "greatest training length",
    )
    for axes, title in zip(all_axes, titles, strict=False):
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(color="0.92")
    for axes in all_axes[:2]:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=9))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    all_axes[2].set_ylim(-3, 103)
    handles = all_axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, fontsize="small", frameon=False)
    for line in figure.legends[0].get_lines():
        line.set_linewidth(2.5)
    return figure
