"""What all figures and pages are made with.

A module of its own because it decides, before anything is drawn, that no display is needed.
"""

from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

matplotlib.use("Agg")  # draws into files: no display is needed

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from crosscurrent.files import write_whole

# Okabe and Ito's colours, which differ for nearly all eyes.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#9A7D0A")
# The same figure gives the same file: no date in it, no random ids, text as text.
_SVG: Any = {"svg.hashsalt": "crosscurrent", "svg.fonttype": "none", "font.family": ["DejaVu Sans", "sans-serif"]}


def save_figure(figure: Figure, path: Path) -> str:
    """Write PATH.png and PATH.svg, and return the SVG's element for a page."""
    figure.savefig(f"{path}.png", dpi=130, metadata={"Software": None})
    text = StringIO()
    with plt.rc_context(_SVG):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    write_whole(Path(f"{path}.svg"), text.getvalue())
    return text.getvalue()[text.getvalue().index("<svg") :]


def draw_scores(scores: dict[str, dict[str, float]], colours: dict[str, str], title: str, label: str) -> Figure:
    """Scores one below the other, with their intervals.

    Args:
        scores: by name, each with `mean`, `low` and `high` from 0 to 1.
        colours: by name.
        title, label: of the figure, and of its axis.
    """
    figure, axes = plt.subplots(figsize=(6.4, 1.2 + 0.36 * len(scores)), layout="constrained")
    for place, (name, one) in enumerate(scores.items()):
        axes.plot([100 * one["low"], 100 * one["high"]], [place, place], color=colours[name], linewidth=2)
        axes.plot([100 * one["mean"]], [place], "o", color=colours[name])
    axes.set_yticks(range(len(scores)), list(scores))
    axes.invert_yaxis()
    axes.set_xlabel(f"{label} (%), with 95 % interval")
    axes.set_title(title, fontsize="medium")
    axes.grid(color="0.9", axis="x")
    axes.set_axisbelow(True)
    return figure


def inline_svg(svg: str, prefix: str) -> str:
    """An SVG for a page with others: its ids must be its own."""
    for before, after in (('id="', f'id="{prefix}-'), ("url(#", f"url(#{prefix}-"), ('href="#', f'href="#{prefix}-')):
        svg = svg.replace(before, after)
    return svg


def page_template(package: str) -> jinja2.Template:
    """The `page.html.j2` of a package. What is put into it is escaped."""
    text = (files(package) / "page.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
