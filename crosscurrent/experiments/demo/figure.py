"""The figure of the tracking demonstration."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files: no display is needed

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator


def draw_accuracy(
    accuracy: Mapping[str, Mapping[int, float]], chance: float, train_lengths: tuple[int, int], path: Path
) -> None:
    """Draw accuracy against sequence length, one line per model, and save it as PNG.

    Args:
        accuracy: per model its share of right answers (0 to 1) at each length.
        chance: what guessing gives.
        train_lengths: shortest and longest length of the training sequences, shown as a shaded range.
        path: of the PNG to write.
    """
    lengths = sorted({length for scores in accuracy.values() for length in scores})
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.axvspan(*train_lengths, color="0.9", label=f"training lengths ({train_lengths[0]}–{train_lengths[1]})")
    axes.axhline(100 * chance, color="0.35", linestyle=":", label=f"chance ({chance:.0%})")
    for (model, scores), style in zip(accuracy.items(), ("o-", "s--", "^-.", "d:"), strict=False):
        axes.plot(list(scores), [100 * share for share in scores.values()], style, linewidth=2, label=model)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(0, 105)
    axes.set_xlabel("sequence length (bits, logarithmic)")
    axes.set_ylabel("final parity right (%)")
    axes.set_title("Parity beyond the training lengths")
    axes.grid(axis="y", color="0.85")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
