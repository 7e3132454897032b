"""The figures of a stability report: one task each, a line per run."""

from collections.abc import Callable, Sequence
from typing import Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from crosscurrent.evaluation.stability import AtPosition
from crosscurrent.experiments.drawing import COLOURS
from crosscurrent.experiments.stability.runs import Measured

_LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_MOST_POINTS = (
    2000  # of lines and dots; more are put into the drawing as a picture, which takes a fraction of the space
)

Value = Callable[[AtPosition], float | None]


def draw_accuracy(runs: Sequence[Measured]) -> Figure:
    """Share right, and share of sequences without an error so far."""
    figure, (left, right) = _panels(2)
    _draw(left, runs, lambda at: 100 * at.right)
    left.set_title("positions right (%)", fontsize="medium")
    left.axhline(100 * runs[0].findings.chance, color="0.35", linestyle=":", linewidth=1)
    _draw(right, runs, lambda at: 100 * at.without_error)
    right.set_title("sequences without an error so far (%)", fontsize="medium")
    for axes in (left, right):
        axes.set_ylim(-3, 103)
    return _finish(figure, runs)


def draw_margin(runs: Sequence[Measured]) -> Figure:
    """Margin of the decision: median, 5 % quantile, and median before a sequence's first error."""
    figure, panels = _panels(3)
    values: dict[str, Value] = {
        "median margin": lambda at: at.margin_median,
        "5 % quantile": lambda at: at.margin_low,
        "median before a first error": lambda at: at.margin_median_unerring,
    }
    for axes, (title, value) in zip(panels, values.items(), strict=True):
        _draw(axes, runs, value)
        axes.axhline(0, color="0.35", linewidth=1)
        axes.set_title(title, fontsize="medium")
    return _finish(figure, runs)


def draw_norm(runs: Sequence[Measured]) -> Figure:
    """The state's norm: relative to its mean at training length, and how much it differs between sequences."""
    figure, (left, right) = _panels(2)
    for one in runs:
        start = one.findings.norm_trained or 1.0
        _draw(left, [one], lambda at, start=start: at.norm_mean / start, runs)  # type: ignore[misc]
    left.set_title("mean norm of the state / at training length", fontsize="medium")
    left.axhline(1, color="0.35", linewidth=1)
    _draw(right, runs, lambda at: 100 * at.norm_deviation / at.norm_mean if at.norm_mean else None)
    right.set_title("its standard deviation over sequences (% of the mean)", fontsize="medium")
    return _finish(figure, runs)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure, panels = plt.subplots(1, count, figsize=(11.5, 4.0), layout="constrained", squeeze=False)
    return figure, list(panels[0])


def _draw(axes: Axes, runs: Sequence[Measured], value: Value, among: Sequence[Measured] = ()) -> None:
    models, seeds = _labels(among or runs)
    for one in runs:
        points = one.positions.by_position
        values = [value(at) for at in points]
        axes.plot(
            [at.position for at in points],
            [float("nan") if found is None else found for found in values],
            color=COLOURS[models.index(one.run.model) % len(COLOURS)],
            linestyle=_LINES[seeds.index(one.run.seed) % len(_LINES)],
            linewidth=1.1,
            rasterized=len(points) * len(among or runs) > _MOST_POINTS,
        )


def _labels(runs: Sequence[Measured]) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(one.run.model for one in runs)), sorted({one.run.seed for one in runs})


def _finish(figure: Figure, runs: Sequence[Measured]) -> Figure:
    """What all panels share: the axis, the training lengths, the legend."""
    trained = max(one.findings.trained_position for one in runs)
    for axes in figure.axes:
        axes.axvspan(0, trained, color="0.92", zorder=0)
        axes.set_xlabel("position in the sequence")
        axes.set_xlim(left=0)
        axes.grid(color="0.88", axis="y")
    models, seeds = _labels(runs)
    handles = [
        Line2D([], [], color=COLOURS[place % len(COLOURS)], linewidth=2.5, label=model)
        for place, model in enumerate(models)
    ]
    handles += [
        Line2D([], [], color="0.3", linestyle=_LINES[place % len(_LINES)], label=f"seed {seed}")
        for place, seed in enumerate(seeds)
    ]
    handles.append(Line2D([], [], color="0.88", linewidth=8, label="training lengths"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize="small", frameon=False)
    return figure
