"""The report as one page, which needs nothing but itself."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from crosscurrent.experiments.aggregate import Collection, Run, Score
from crosscurrent.experiments.drawing import inline_svg, page_template, save_figure
from crosscurrent.experiments.recipe import TrainingRecipe
from crosscurrent.experiments.report.figures import draw_curves, draw_generalisation
from crosscurrent.experiments.report.tables import run_table, score_table, seed_table, write_table
from crosscurrent.experiments.settings import read_yaml
from crosscurrent.files import refuse_file, write_whole

KINDS = ("lengths", "curves")  # of figures


@dataclass(frozen=True)
class Section:
    """What the page shows of a task."""

    task: str
    description: str
    chance: float
    num_test: int
    training: list[dict[str, str]]
    metrics: list["MetricTable"]
    generalisation: str
    curves: str


@dataclass(frozen=True)
class MetricTable:
    """A metric: models down, lengths across; ours, then the published ones."""

    metric: str
    lengths: list[int]
    ours: dict[str, dict[int, Score]]
    published: dict[str, dict[int, str]]


def write_report(collection: Collection, output: Path) -> list[Path]:
    """Write a report of finished runs: `report.html`, `figures/` (PNG and SVG) and `tables/` (CSV and JSON).

    The same runs give the same files, byte for byte, with the same versions of the libraries.

    Args:
        collection: the runs.
        output: the folder; files of an earlier report in it are replaced.

    Returns:
        The files written.

    Raises:
        ValueError: no run is finished, or the folder is a file.

    Example::

        write_report(collect([Path("runs/rlt-mini")]), Path("report"))
    """
    if not collection.finished:
        raise ValueError(f"none of the {len(collection.runs)} runs is finished: a report shows finished runs.")
    refuse_file(output)
    figures, tables = output / "figures", output / "tables"
    for folder in (figures, tables):
        folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:  # an earlier report may have had other tasks
        for earlier in figures.glob(f"*_{kind}.*"):
            earlier.unlink()
    sections = [_section(collection, task, figures) for task in collection.tasks if collection.of_task(task)]
    rows = {"scores": score_table(collection), "seeds": seed_table(collection), "runs": run_table(collection)}
    for name, table in rows.items():
        write_table(table, tables / name)
    page = page_template("crosscurrent.experiments.report").render(
        sections=sections,
        runs=_costs(collection),
        unfinished=[run.name for run in collection.runs if run.result is None],
        versions=_versions(collection),
        source=_published()["source"],
        published_times=_published()["seconds_per_step"],
    )
    write_whole(output / "report.html", page)
    drawn = [
        figures / f"{section.task}_{kind}.{form}" for section in sections for kind in KINDS for form in ("png", "svg")
    ]
    return [output / "report.html", *drawn, *(tables / f"{name}.{form}" for name in rows for form in ("csv", "json"))]


def _section(collection: Collection, task: str, figures: Path) -> Section:
    runs, scores = collection.of_task(task), collection.scores(task)
    models = list(dict.fromkeys(run.model for run in collection.runs))
    recipe = runs[0].recipe.task
    trained = recipe.task.trained_range([length for run in runs for length in run.lengths_reached])
    first = [score for score in scores if score.metric == recipe.task.metrics[0]]
    shown = save_figure(
        draw_generalisation(first, task, recipe.task.chance, trained, models),
        figures / f"{task}_lengths",
    )
    every = [run for run in collection.runs if run.task == task and run.rows]
    curves = save_figure(draw_curves(every, recipe.task, models), figures / f"{task}_curves")
    return Section(
        task=task,
        description=" ".join((type(recipe.task).__doc__ or "").split("\n\n")[0].split()),
        chance=100 * recipe.task.chance,
        num_test=recipe.num_test,
        training=_training(runs),
        metrics=[_metric_table(scores, metric, recipe.name) for metric in recipe.task.metrics],
        generalisation=inline_svg(shown, f"{task}-lengths"),
        curves=inline_svg(curves, f"{task}-curves"),
    )


def _training(runs: list[Run]) -> list[dict[str, str]]:
    """How each model was trained, and with which seeds."""
    rows = []
    for model in dict.fromkeys(run.model for run in runs):
        chosen = [run for run in runs if run.model == model]
        recipe = chosen[0].recipe
        shortest, longest = recipe.task.task.trained_range([length for run in chosen for length in run.lengths_reached])
        rows.append(
            {
                "model": model,
                "lengths": f"{shortest}–{longest}" if longest > shortest else str(longest),
                "loss": "every prefix" if recipe.task.prefix_supervision else "answer",
                "steps": _most_steps(recipe.training),
                "learning_rate": f"{recipe.training.learning_rate:g}",
                "seeds": ", ".join(str(run.seed) for run in chosen),
            }
        )
    return rows


def _most_steps(training: TrainingRecipe) -> str:
    cut = f", at most {training.max_tokens:,} tokens" if training.max_tokens is not None else ""
    return f"{training.max_steps:,} × {training.batch_size}{cut}"


def _metric_table(scores: list[Score], metric: str, task: str) -> MetricTable:
    chosen = [score for score in scores if score.metric == metric]
    is_published = metric in ("final", "answer_tokens")
    published = _published()["tasks"].get(task, {}) if is_published else {}
    ours: dict[str, dict[int, Score]] = {}
    for score in chosen:
        ours.setdefault(score.model, {})[score.length] = score
    lengths = {score.length for score in chosen} | {length for row in published.values() for length in row}
    return MetricTable(
        metric=metric.replace("_", " "),
        lengths=sorted(lengths),
        ours=ours,
        published=published,
    )


def _costs(collection: Collection) -> list[dict[str, Any]]:
    """Per task and model: the size, and the range of step times over seeds."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run_table(collection):
        rows.setdefault((row["task"], row["model"]), []).append(row)
    return [
        {
            "task": task,
            "model": model,
            "num_parameters": f"{found[0]['num_parameters']:,}",
            "num_steps": ", ".join(f"{row['num_steps']:,}" for row in found),
            "selected": ", ".join(f"{row['selected_step']:,}" for row in found),
            "seconds": _range([row["seconds_per_step"] for row in found]),
            "minutes": _range([row["training_seconds"] / 60 for row in found]),
        }
        for (task, model), found in rows.items()
    ]


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low}–{high}"


def _versions(collection: Collection) -> list[str]:
    """What the runs were made with, once each."""
    lines = [", ".join(f"{name} {value}" for name, value in run.versions.items()) for run in collection.finished]
    return list(dict.fromkeys(lines))


def _published() -> dict[str, Any]:
    return read_yaml(Path(str(files("crosscurrent.experiments.report") / "published_rlt.yaml")))
