"""An evaluation of a model's answers: tasks by name, a folder that can be gone on with, and a baseline to compare with."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from crosscurrent.evaluation.answering import (
    AnsweringSettings,
    Answers,
    Session,
    compare,
    read_answers,
    refuse_incomparable,
)
from crosscurrent.files import LOCK, is_partial, locked, refuse_file, write_whole
from crosscurrent.models.base import shareable_name
from crosscurrent.suggestions import did_you_mean
from crosscurrent.tasks.reasoning import Problem, ReasoningTask, get_reasoning_task, reasoning_task_names
from crosscurrent.tasks.splits import Split
from crosscurrent.version import __version__

SCORES = "scores.json"


def is_reasoning_task(word: str) -> bool:
    """Whether a word of --tasks names a reasoning task, with or without options.

    Example:
        >>> is_reasoning_task("variable_assignment:depth=5"), is_reasoning_task("piqa")
        (True, False)
    """
    return word.partition(":")[0] in reasoning_task_names()


def tasks_of(words: Sequence[str]) -> dict[str, ReasoningTask]:
    """Reasoning tasks by the words that name them, each once.

    Args:
        words: names, with options as name:key=value:key=value. Values are read as JSON (5, true, null), or else as text.

    Raises:
        ValueError: there is no such task or option, a value is not allowed, or none is given.

    Example:
        >>> tasks_of(["variable_assignment:depth=5"])
        {'variable_assignment:depth=5': VariableAssignment(depth=5)}
    """
    if not words:
        raise ValueError(f"no task is given: give some of {', '.join(reasoning_task_names())}.")
    return {word: _task(word) for word in words}


def _task(word: str) -> ReasoningTask:
    name, *assignments = word.split(":")
    options: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not (separator and key and text) or key in options:
            raise ValueError(f"{word!r} is not a task with options: write {name}:key=value:key=value, each key once.")
        options[key] = _value(text)
    return get_reasoning_task(name, **options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def records_name(word: str) -> str:
    """The file that keeps the records of a task.

    Example:
        >>> records_name("variable_assignment:depth=5")
        'variable_assignment-depth=5.jsonl'
    """
    return re.sub(r"[^\w.=-]", "-", word) + ".jsonl"


def problems_of(
    tasks: dict[str, ReasoningTask], split: Split, data: Path | None, limit: int | None
) -> dict[str, Sequence[Problem]]:
    """The problems of each task. A folder of data is for those that are not generated, if there are any.

    Raises:
        ValueError: as `ReasoningTask.problems`.
        OSError: files are missing, or the hub cannot be reached.
    """
    some_read = any(not task.is_generated for task in tasks.values())
    return {
        word: task.problems(split, data=None if task.is_generated and some_read else data, count=limit)
        for word, task in tasks.items()
    }


def read_baseline(folder: Path, tasks: dict[str, ReasoningTask]) -> dict[str, Answers]:
    """The answers of an earlier evaluation, for each task.

    Raises:
        ValueError: it lacks a task, is not finished or is damaged.
    """
    found = {}
    for word in tasks:
        path = folder / records_name(word)
        if not path.is_file():
            there = [other.stem for other in sorted(folder.glob("*.jsonl"))]
            raise ValueError(
                f"the baseline {folder} has no {path.name}.{did_you_mean(path.stem, there)} It must be the output folder of "
                f"an evaluation of {word}."
            )
        found[word] = read_answers(path)
        if not found[word].is_complete:
            raise ValueError(f"the baseline {path} is not finished: run its command again, it goes on from there.")
    return found


@contextmanager
def claimed(output: Path | None, tasks: dict[str, ReasoningTask]) -> Iterator[None]:
    """Keep other processes out of an output folder, and make sure that it is a new one or this evaluation's.

    Raises:
        ValueError: it holds something else.
        OSError: another process is at work in it, or it cannot be written to.
    """
    if output is None:
        yield
        return
    refuse_file(output)
    own = {SCORES, LOCK, *map(records_name, tasks)}
    found = sorted(path.name for path in output.iterdir()) if output.exists() else []
    others = [name for name in found if name not in own and not is_partial(name)]
    if others:
        raise ValueError(
            f"{output} holds something else ({others[0]}): give a new folder, or the one of this evaluation."
        )
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, OSError(f"{output}: another process is at work on this evaluation. Wait for it, or stop it.")):
        yield


@dataclass(frozen=True)
class Evaluated:
    """A model to be evaluated.

    Attributes:
        name: for the records; of a local folder only the last part is kept.
        model: any causal language model.
        tokenizer: the model's.
    """

    name: str
    model: Any
    tokenizer: Any


def run_answering(
    evaluated: Evaluated,
    tasks: dict[str, ReasoningTask],
    problems: dict[str, Sequence[Problem]],
    settings: AnsweringSettings,
    output: Path | None = None,
    baselines: dict[str, Answers] | None = None,
) -> dict[str, Any]:
    """Put the problems of all tasks to a model.

    Args:
        evaluated: the model.
        tasks: as `tasks_of` returns them.
        problems: of each task.
        settings: how they are asked.
        output: a folder for the records; None: they are not kept.
        baselines: of each task, the answers to compare with.

    Returns:
        Plain values, as scores.json holds them.

    Raises:
        ValueError: as `answer_problems`, or a baseline is not of the same problems.
    """
    sessions = {
        word: Session(evaluated.model, evaluated.tokenizer, task, problems[word], settings, evaluated.name)
        for word, task in tasks.items()
    }
    for word, baseline in (baselines or {}).items():  # before hours of generation
        refuse_incomparable(sessions[word].header, baseline.header, f"the baseline's {records_name(word)}")
    found: dict[str, Any] = {}
    for word, session in sessions.items():
        records = session.answer(None if output is None else output / records_name(word))
        found[word] = session.facts(records)
        if baselines:
            differences = [one.to_dict() for one in compare(records, baselines[word].records)]
            found[word]["comparison"] = {"baseline": baselines[word].header["model"], "differences": differences}
    model = evaluated.model
    return {
        "format": 1,
        "model": shareable_name(evaluated.name),
        "model_class": type(model).__name__,
        "num_parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch_size": settings.batch_size,
        "tasks": found,
        "device": str(model.device),
        "num_threads": torch.get_num_threads(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {"crosscurrent": __version__}
    for package in ("transformers", "tokenizers", "torch", "numpy", "math-verify"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # math-verify is needed by some tasks only
            continue
    return found


def write_scores(facts: dict[str, Any], output: Path) -> None:
    """Write scores.json, last: where it is, all is."""
    write_whole(output / SCORES, json.dumps(facts, indent=2) + "\n")
