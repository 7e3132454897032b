"""Scores of a model on tasks of lm-evaluation-harness."""

import math
from dataclasses import dataclass
from typing import Any

from lm_eval import evaluator
from lm_eval.api.metrics import mean_stderr
from lm_eval.api.model import LM

METRICS = ("acc_norm", "acc")  # of each task the first that it has is its score: as tables of pretrained models have it


@dataclass(frozen=True)
class TaskScores:
    """Of one task.

    Attributes:
        scores: each metric of the harness, from 0 to 1: `acc`, the share of examples whose right answer is the likeliest,
            and, of most tasks, `acc_norm`, the same with log-likelihoods divided by the answers' lengths in bytes.
        standard_errors: of each metric; None if there is but one example.
        num_examples: how many were scored.
        num_available: how many there are.
        version: of the harness's task.
        examples: one record per example, in order: `doc_id` (its place in the data), `target`, the `loglikelihoods` of
            the answers, each metric, and the harness's `doc_hash` and `prompt_hash`.
    """

    scores: dict[str, float]
    standard_errors: dict[str, float | None]
    num_examples: int
    num_available: int
    version: Any
    examples: list[dict[str, Any]]

    @property
    def metric(self) -> str:
        """The metric that stands for the task in a mean."""
        return next(metric for metric in METRICS if metric in self.scores)


def score_tasks(model: LM, tasks: dict[str, Any], limit: int | None = None) -> dict[str, TaskScores]:
    """Score a model on each task.

    Args:
        model: of the harness, such as `CrosscurrentLM`.
        tasks: as `load_tasks` returns them.
        limit: the first so many examples of each task; None: all.

    Raises:
        ValueError: the limit is less than 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} is not allowed: give at least 1, or None for all examples.")
    # Without standard errors, in which the harness divides by zero if there is one example: _standard_error.
    results: Any = evaluator.evaluate(model, {"tasks": tasks}, limit=limit, bootstrap_iters=0)
    return {name: _task_scores(name, results) for name in tasks}


def _task_scores(name: str, results: Any) -> TaskScores:
    found = {key.partition(",")[0]: value for key, value in results["results"][name].items()}
    scores = {metric: float(found[metric]) for metric in reversed(METRICS) if metric in found}
    examples = sorted(results["samples"][name], key=lambda example: example["doc_id"])
    counts = results["n-samples"][name]
    return TaskScores(
        scores=scores,
        standard_errors={metric: _standard_error([example[metric] for example in examples]) for metric in scores},
        num_examples=counts["effective"],
        num_available=counts["original"],
        version=results["versions"][name],
        examples=[_record(example, scores) for example in examples],
    )


def _standard_error(values: list[float]) -> float | None:
    return mean_stderr(values) if len(values) > 1 else None  # the harness's, which fails on a single value


def _record(example: dict[str, Any], metrics: Any) -> dict[str, Any]:
    kept = {name: example[name] for name in ("doc_id", "target", *metrics)}
    loglikelihoods = [score for score, _ in example["filtered_resps"]]
    hashes = {name: example[name] for name in ("doc_hash", "prompt_hash")}
    return kept | {"loglikelihoods": loglikelihoods} | hashes


def mean_score(scores: dict[str, TaskScores]) -> float:
    """The mean over tasks of each one's `acc_norm`, or `acc` where it has no other."""
    return math.fsum(found.scores[found.metric] for found in scores.values()) / len(scores)
