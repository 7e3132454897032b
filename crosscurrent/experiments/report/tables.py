"""The tables of a report, as CSV and JSON."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from crosscurrent.experiments.aggregate import Collection
from crosscurrent.files import write_whole

Table = list[dict[str, Any]]


def score_table(collection: Collection) -> Table:
    """One row per task, model, length and metric: mean and sample standard deviation over seeds, in %."""
    return [
        {
            "task": score.task,
            "model": score.model,
            "length": score.length,
            "metric": score.metric,
            "mean_percent": round(100 * score.mean, 4),
            "standard_deviation_percent": None
            if score.standard_deviation is None
            else round(100 * score.standard_deviation, 4),
            "num_seeds": len(score.values),
            "num_seeds_asked": score.num_asked,
        }
        for task in collection.tasks
        for score in collection.scores(task)
    ]


def seed_table(collection: Collection) -> Table:
    """One row per run, length and metric, in %."""
    return [
        {
            "task": score.task,
            "model": score.model,
            "seed": seed,
            "length": score.length,
            "metric": score.metric,
            "value_percent": round(100 * value, 4),
        }
        for task in collection.tasks
        for score in collection.scores(task)
        for seed, value in score.values.items()
    ]


def run_table(collection: Collection) -> Table:
    """One row per finished run: its size, its selected step, and what it cost."""
    return [
        {
            "task": run.task,
            "model": run.model,
            "seed": run.seed,
            "num_parameters": run.result["num_parameters"],
            "num_steps": sum("loss" in row for row in run.rows),
            "selected_step": run.result["selected_step"],
            "validation_loss": run.result["validation"]["validation_loss"],
            "seconds_per_step": run.result["seconds_per_step"],
            "training_seconds": run.result["training_seconds"],
        }
        for run in collection.finished
        if run.result is not None
    ]


def write_table(table: Table, path: Path) -> None:
    """Write PATH.csv and PATH.json."""
    write_csv(table, Path(f"{path}.csv"))
    write_whole(Path(f"{path}.json"), json.dumps(table, indent=1) + "\n")


def write_csv(table: Table, path: Path) -> None:
    """Write a table with the columns of its first row."""
    text = io.StringIO()
    if table:
        writer = csv.DictWriter(text, fieldnames=list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    write_whole(path, text.getvalue())
