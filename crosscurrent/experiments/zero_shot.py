"""What is kept of a zero-shot evaluation: scores with all that they depend on, and a record of each example."""

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from crosscurrent.evaluation.zero_shot import (
    LOCAL_FILES,
    TaskScores,
    checksum,
    mean_score,
    score_tasks,
)
from crosscurrent.models.base import shareable_name
from crosscurrent.training.telemetry import write_whole
from crosscurrent.version import __version__

SCORES = "scores.json"


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model.

    Attributes:
        facts: of scores.json: the model, its solver, sizes, versions, each task's scores and data.
        scores: of each task, with the examples.
    """

    facts: dict[str, Any]
    scores: dict[str, TaskScores]


def run_zero_shot(name: str, lm: Any, tasks: dict[str, Any], folder: Path | None, limit: int | None) -> Evaluation:
    """Score a model.

    Args:
        name: of the model, for the records; of a local folder only the last part is kept.
        lm: the model, as the harness takes one: a `CrosscurrentLM`, or the harness's own `HFLM`.
        tasks: as `load_tasks(names, folder)` returned them.
        folder: the same.
        limit: the first so many examples of each task; None: all.

    Raises:
        ValueError: the limit is less than 1.

    Example::

        evaluation = run_zero_shot("mine", lm, load_tasks(["piqa"]), folder=None, limit=100)
        write_evaluation(evaluation, Path("scores"))
    """
    scores = score_tasks(lm, tasks, limit)
    facts = {
        "format": 1,
        "model": shareable_name(name),
        "model_class": type(lm.model).__name__,
        "num_parameters": lm.model.num_parameters(),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "solver": getattr(lm, "solver", None),
        "scored_by": type(lm).__name__,
        "batch_size": lm.batch_size,
        "limit": limit,
        "mean": mean_score(scores),
        "tasks": {task: _task_facts(found, _source(tasks[task], folder)) for task, found in scores.items()},
        "device": str(lm.device),
        "num_threads": torch.get_num_threads(),
        "versions": _versions(),
    }
    return Evaluation(facts, scores)


def _task_facts(found: TaskScores, source: dict[str, Any]) -> dict[str, Any]:
    return {
        **found.scores,
        **{f"{metric}_stderr": error for metric, error in found.standard_errors.items()},
        "metric": found.metric,
        "num_examples": found.num_examples,
        "num_available": found.num_available,
        "task_version": found.version,
        "data": source,
    }


def _source(task: Any, folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {"hub": task.config.dataset_path, "name": task.config.dataset_name}
    source = LOCAL_FILES[task.config.task]
    return {"file": source.name, "sha256": checksum(source, folder)}


def _versions() -> dict[str, str]:
    packages = ("lm_eval", "transformers", "tokenizers", "torch", "datasets")
    return {"crosscurrent": __version__} | {name: version(name) for name in packages}


def refuse_used_folder(output: Path) -> None:
    """Raise ValueError, before hours of scoring, if an evaluation cannot be written there."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there already: give a new or an empty folder.")
    above = next(parent for parent in output.resolve().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{output}: {above} is not a folder that can be written to: give another one.")


def write_evaluation(evaluation: Evaluation, output: Path) -> None:
    """Write TASK.jsonl, a line for each example, and scores.json, last: where it is, all is."""
    output.mkdir(parents=True, exist_ok=True)
    for task, found in evaluation.scores.items():
        write_whole(output / f"{task}.jsonl", "".join(json.dumps(example) + "\n" for example in found.examples))
    write_whole(output / SCORES, json.dumps(evaluation.facts, indent=2) + "\n")
