"""What a stability report consists of: two tables, figures, and one page that holds them all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosscurrent.evaluation.stability import Rate
from crosscurrent.experiments.drawing import inline_svg, page_template, save_figure
from crosscurrent.experiments.report.tables import Table, write_csv
from crosscurrent.experiments.stability import verdict
from crosscurrent.experiments.stability.figures import draw_accuracy, draw_margin, draw_norm
from crosscurrent.experiments.stability.runs import Measured
from crosscurrent.files import refuse_file, write_whole
from crosscurrent.version import __version__

_DRAW = {"accuracy": draw_accuracy, "margin": draw_margin, "norm": draw_norm}
_CAPTIONS = {
    "accuracy": "Where errors begin. Grey: positions that training examples have. Dotted: guessing.",
    "margin": "How sure it is: the logit of the right token minus the largest other one; below 0 it errs. The last panel "
    "leaves out sequences that have erred, so it shows what leads to errors rather than what follows from them.",
    "norm": "How large the state is, by position. A T2MLR's state is normalised at every token, so that only its learned "
    "weights and its direction change its norm.",
}


def write_stability(runs: Sequence[Measured], output: Path) -> list[Path]:
    """Write stability.html, stability.csv, stability_by_position.csv, and figures/ (PNG and SVG).

    The same measurements give the same files, byte for byte, with the same versions of the libraries.

    Args:
        runs: as `measure_runs` returns them.
        output: the folder; files of an earlier report in it are replaced.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: the output is a file.
    """
    refuse_file(output)
    figures = output / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for kind in _DRAW:  # an earlier report may have had other tasks
        for earlier in figures.glob(f"*_{kind}.*"):
            earlier.unlink()
    tables = {"stability": stability_table(runs), "stability_by_position": position_table(runs)}
    for name, table in tables.items():
        write_csv(table, output / f"{name}.csv")
    tasks = list(dict.fromkeys(one.run.task for one in runs))
    page = page_template("crosscurrent.experiments.stability").render(
        sections=[_section([one for one in runs if one.run.task == task], figures) for task in tasks],
        captions=_CAPTIONS,
        rules=(verdict.__doc__ or "").split("\n\n", 1)[1].strip(),
        version=__version__,
    )
    write_whole(output / "stability.html", page)
    drawn = [figures / f"{task}_{kind}.{form}" for task in tasks for kind in _DRAW for form in ("png", "svg")]
    return [output / "stability.html", *(output / f"{name}.csv" for name in tables), *drawn]


def _section(runs: Sequence[Measured], figures: Path) -> dict[str, Any]:
    """What the page shows of a task."""
    task = runs[0].run.task
    drawn = {kind: save_figure(draw(runs), figures / f"{task}_{kind}") for kind, draw in _DRAW.items()}
    return {
        "task": task,
        "length": _span([one.length for one in runs]),
        "num_examples": _span([one.findings.num_examples for one in runs]),
        "trained_length": _span([one.trained_length for one in runs]),
        "states": {
            state: ", ".join(dict.fromkeys(one.run.model for one in runs if one.state == state))
            for state in dict.fromkeys(one.state for one in runs)
        },
        "rows": [{"model": one.run.model, "verdict": one.verdict} | _short(one) for one in runs],
        "figures": {kind: inline_svg(svg, f"{task}-{kind}") for kind, svg in drawn.items()},
    }


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _short(one: Measured) -> dict[str, str]:
    """The numbers that the page shows of a run."""
    found = one.findings
    return {
        "seed": str(one.run.seed),
        "trained": _percent(found.right_trained),
        "right": _percent(found.right),
        "without_error": _percent(found.without_error),
        "erred_half": "–" if found.erred_half is None else str(found.erred_half),
        "hazards": f"{_hazard(found.hazard_early)} / {_hazard(found.hazard_late)}",
        "margins": f"{_decimal(found.margin_trained)} / {_decimal(found.margin_end)}",
        "norm": f"{100 * found.norm_drift:+.1f}",
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _hazard(rate: Rate) -> str:
    return "–" if rate.value is None else f"{rate.value:.2g}"


def short_table(runs: Sequence[Measured]) -> str:
    """One line per run, for a terminal."""
    rows = [("run", "right %", "no error %", "half erred by", "verdict")]
    for one in runs:
        row = _short(one)
        rows.append((one.run.name, row["right"], row["without_error"], row["erred_half"], one.verdict.kind))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if 0 < place < 4 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def stability_table(runs: Sequence[Measured]) -> Table:
    """One row per run."""
    return [_row(one) for one in runs]


def _row(one: Measured) -> dict[str, Any]:
    found = one.findings
    return {
        "task": one.run.task,
        "model": one.run.model,
        "seed": one.run.seed,
        "length": one.length,
        "num_examples": found.num_examples,
        "last_position": found.last_position,
        "trained_length": one.trained_length,
        "trained_position": found.trained_position,
        "verdict": one.verdict.kind,
        "right_percent": _rounded(found.right, 100),
        "right_trained_percent": _rounded(found.right_trained, 100),
        "without_error_percent": _rounded(found.without_error, 100),
        "erred_tenth_by": found.erred_tenth,
        "erred_half_by": found.erred_half,
        "hazard_trained": _rounded(found.hazard_trained.value),
        "hazard_beyond": _rounded(found.hazard_beyond.value),
        "hazard_early": _rounded(found.hazard_early.value),
        "hazard_late": _rounded(found.hazard_late.value),
        "right_after_error_percent": _rounded(found.right_after_error, 100),
        "margin_trained": _rounded(found.margin_trained),
        "margin_end": _rounded(found.margin_end),
        "state": one.state,
        "norm_trained": _rounded(found.norm_trained),
        "norm_end": _rounded(found.norm_end),
        "norm_drift_percent": _rounded(found.norm_drift, 100),
        **{
            f"right_{part.replace(' ', '_')}_cut_percent": _rounded(found.cuts.get(part), 100)
            for part in ("encoder", "memory", "encoder and memory")
        },
        "explanation": one.verdict.text,
    }


def position_table(runs: Sequence[Measured]) -> Table:
    """One row per run and supervised position."""
    return [
        {
            "task": one.run.task,
            "model": one.run.model,
            "seed": one.run.seed,
            "length": one.length,
            "position": at.position,
            "num_asked": at.num_asked,
            "right_percent": _rounded(at.right, 100),
            "without_error_percent": _rounded(at.without_error, 100),
            "num_at_risk": at.hazard.chances,
            "first_errors": at.hazard.events,
            "margin_median": _rounded(at.margin_median),
            "margin_5_percent": _rounded(at.margin_low),
            "margin_median_before_error": _rounded(at.margin_median_unerring),
            "norm_mean": _rounded(at.norm_mean),
            "norm_deviation": _rounded(at.norm_deviation),
        }
        for one in runs
        for at in one.positions.by_position
    ]


def _rounded(value: float | None, factor: float = 1) -> float | None:
    return None if value is None else float(f"{factor * value:.5g}")
