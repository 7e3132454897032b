"""The figures of an inspected text."""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from crosscurrent.evaluation.telemetry import Memory, Trace
from crosscurrent.experiments.drawing import COLOURS

SIZE = (5.4, 3.5)  # small enough to be read on a telephone, where the figure fills the width
MARKED = 40  # points up to which each gets a mark


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.9")
    return figure, axes


def _line(axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str, place: int) -> None:
    style = ("-", "--", "-.")[place]
    marker = ("o", "s", "^")[place] if len(xs) <= MARKED else None
    axes.plot(xs, ys, style, color=COLOURS[(0, 3, 2)[place]], marker=marker, markersize=3, linewidth=1.5, label=label)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)


def draw_gates(trace: Trace) -> Figure:
    """Mean of both gates at each token."""
    figure, axes = _axes("Gates, mean over features", "token", "sigmoid gate")
    places = range(1, trace.fused.shape[1] + 1)
    _line(axes, places, trace.current_gate[0].tolist(), "on the stream", 0)
    _line(axes, places, trace.recurrent_gate[0].tolist(), "on the state", 1)
    _legend(figure)
    return figure


def draw_norms(trace: Trace) -> Figure:
    """Norms of state, stream and of what the fusion adds, at each token."""
    figure, axes = _axes("Norms at the fusion", "token", "2-norm (log scale)")
    places = range(1, trace.fused.shape[1] + 1)
    added = (trace.change * trace.stream_norm)[0].tolist()
    _line(axes, places, _positive(trace.stream_norm[0].tolist()), "stream", 0)
    _line(axes, places, _positive(trace.state_norm[0].tolist()), "state", 1)
    _line(axes, places, _positive(added), "what is added", 2)
    axes.set_yscale("log")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def draw_residuals(residuals: Sequence[float]) -> Figure:
    """Relative change of the states in each Jacobi iteration."""
    figure, axes = _axes("Jacobi residual", "iteration", "relative change (log scale)")
    _line(axes, range(1, len(residuals) + 1), _positive(residuals), "residual", 0)
    axes.set_yscale("log")
    return figure


def draw_memory(memory: Memory) -> Figure:
    """What is left of a perturbation of the state after each token."""
    figure, axes = _axes("Perturbation left in the state", "tokens later", "share (log scale)")
    places = range(len(memory.remaining))
    _line(axes, places, _positive(memory.remaining), "run on freely", 0)
    _line(axes, places, _positive(memory.remaining_clean), "with undisturbed attention", 1)
    axes.axhline(memory.FORGOTTEN, color="0.35", linestyle=":", linewidth=1.2)
    axes.annotate(f"{memory.FORGOTTEN:.0%}", (places[-1], memory.FORGOTTEN), ha="right", va="bottom", fontsize="small")
    axes.set_yscale("log")
    _legend(figure)
    return figure


def _positive(values: Sequence[float]) -> list[float]:
    """Zeros have no place on a log scale: they leave a gap."""
    return [value if value > 0 else math.nan for value in values]
