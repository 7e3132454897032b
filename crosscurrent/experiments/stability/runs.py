"""Finished runs, measured position by position."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from crosscurrent.evaluation.scoring import Examples
from crosscurrent.evaluation.stability import (
    Positions,
    attention_cuts,
    configured,
    measure_positions,
    state_of,
)
from crosscurrent.experiments.aggregate import Run, collect
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run import examples_of
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.experiments.settings import merge, validated
from crosscurrent.experiments.stability.verdict import LEARNED, STABLE, Findings, Verdict, findings_of, verdict
from crosscurrent.tasks import Task

NUM_EXAMPLES = 256
_MOST_ROWS = 64  # per forward call: logits of long sequences are large


@dataclass(frozen=True)
class Measured:
    """A run, measured.

    Attributes:
        run: the run.
        length, trained_length: of the payloads: those in question, and those that stand for the training lengths.
        state: what its norms are of, in words.
        positions: what it says at `length`.
        findings, verdict: what follows.
    """

    run: Run
    length: int
    trained_length: int
    state: str
    positions: Positions
    findings: Findings
    verdict: Verdict


@dataclass(frozen=True)
class _Planned:
    """A run that is to be measured, with the examples for it."""

    run: Run
    length: int
    trained_length: int
    examples: Examples

    @property
    def num_batches(self) -> int:
        """Per length."""
        return -(-self.examples.count // self.examples.batch_size)


def measure_runs(folder: Path, length: int | None = None, num_examples: int = NUM_EXAMPLES) -> list[Measured]:
    """Measure the finished runs below a folder.

    Each run's model answers the first test examples of one length, and as many of the longest training length, every
    prefix asked, run as its recipe tests it. If it errs, an RLT whose attention reaches beyond the training lengths answers
    again with that attention cut.

    Args:
        folder: of a study, or of one run.
        length: of the payloads; None: each recipe's longest test length.
        num_examples: per length; at most as many as the recipe tests with.

    Raises:
        ValueError: no run is finished, one lacks its weights, or a task has no such length.
        OSError: a folder cannot be read.

    Example::

        for one in measure_runs(Path("runs/rlt-mini")):
            print(one.run.name, one.verdict.kind)
    """
    if num_examples < 1:
        raise ValueError(f"examples={num_examples} is not allowed: give at least 1.")
    planned = [_plan(run, length, num_examples) for run in _finished(folder)]
    with tqdm(total=sum(2 * one.num_batches for one in planned), desc="measuring", unit="batch") as bar:
        return [_measure(one, bar) for one in planned]


def _finished(folder: Path) -> list[Run]:
    """The finished runs, all of them with their weights."""
    collection = collect([folder])
    if not collection.finished:
        raise ValueError(
            f"none of the {len(collection.runs)} runs in {folder} is finished: `crosscurrent reproduce` or `train` goes on "
            "with them."
        )
    for run in collection.finished:
        model = RunFolder(run.path).model
        if not model.is_dir():
            raise ValueError(
                f"{run.name} has no weights ({model} is missing), so there is nothing to ask. Runs that were published "
                "without them have to be run again: `crosscurrent reproduce`."
            )
    return collection.finished


def _plan(run: Run, length: int | None, num_examples: int) -> _Planned:
    length = max(run.recipe.task.test_lengths) if length is None else length
    changed = merge(run.recipe.model_dump(mode="json"), {"task": {"test_lengths": [length]}})
    recipe = validated(Recipe, changed, run.name)  # refuses what the task or the model has not
    examples = examples_of(recipe, "test")
    examples = replace(
        examples,
        count=min(num_examples, examples.count),
        batch_size=min(_MOST_ROWS, examples.batch_size),
        prefix_supervision=True,
    )
    return _Planned(run, length, _trained_length(run), examples)


def _trained_length(run: Run) -> int:
    """The longest training length of which there are test examples; else the shortest validation length."""
    task = run.recipe.task.task
    lengths = [length for length in run.lengths_reached if _has_tests(task, length)]
    return max(lengths, default=min(run.recipe.task.validation_lengths))


def _has_tests(task: Task, length: int) -> bool:
    try:
        task.check_length(length, "test")
    except ValueError:
        return False
    return True


def _measure(planned: _Planned, bar: Any) -> Measured:
    run, recipe = planned.run, planned.run.recipe
    bar.set_description(run.name)
    model = _load(run.path)

    def ask(length: int) -> Positions:
        return measure_positions(model, planned.examples, length, on_batch=bar.update)

    found, trained = ask(planned.length), ask(planned.trained_length)
    last = _last_trained_position(run)
    findings = findings_of(trained, found, last, recipe.task.prefix_supervision, recipe.task.task.chance)
    reached, growth = max(run.lengths_reached), recipe.curriculum.growth
    last_length = max(recipe.task.train_lengths) if growth is None else growth.last
    findings = replace(
        findings,
        stopped_at=reached if reached < last_length else None,
        trained_length=planned.trained_length,
    )
    cuts = attention_cuts(model, last + 1) if _is_to_explain(findings) else {}
    bar.total += len(cuts) * planned.num_batches
    scores = {}
    for part, settings in cuts.items():
        with configured(model, settings):
            scores[part] = ask(planned.length).right_share
    findings = replace(findings, cuts=scores)
    return Measured(run, planned.length, planned.trained_length, state_of(model), found, findings, verdict(findings))


def _is_to_explain(findings: Findings) -> bool:
    """Whether it learned the task, and errs beyond the training lengths."""
    is_longer = findings.last_position > findings.trained_position
    return is_longer and findings.right_trained >= LEARNED and findings.without_error < STABLE


def _load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        RunFolder(path).model, dtype=torch.float32, use_safetensors=True
    ).eval()
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    return model


def _last_trained_position(run: Run) -> int:
    """Of the longest training examples; those of one length may differ in their number of tokens."""
    task, longest = run.recipe.task.task, max(run.lengths_reached)
    return max(len(task.example("train", longest, index).tokens) for index in range(16)) - 1
