"""Runs gathered from folders, and what they say together: mean and sample standard deviation over seeds."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscurrent.experiments.grid import STUDY_FILE
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run_folder import RunFolder, read_json, refuse_other_versions
from crosscurrent.suggestions import differences
from crosscurrent.training.telemetry import Row


@dataclass(frozen=True)
class Run:
    """A finished run, or one that is under way (`result` is None).

    Attributes:
        task, model: labels, from the folder's name.
        rows: its metrics, step by step.
        versions: of the software it was made with.
        num_seeds_asked: by the study it belongs to; None if it belongs to none.
        path: of its folder.
    """

    task: str
    model: str
    recipe: Recipe
    result: dict[str, Any] | None
    rows: list[Row]
    versions: dict[str, Any]
    num_seeds_asked: int | None
    path: Path

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def name(self) -> str:
        return f"{self.task}/{self.model}/seed-{self.seed}"

    @property
    def lengths_reached(self) -> list[int]:
        """The training lengths, as far as a curriculum came."""
        lengths = self.recipe.task.train_lengths
        reached = max((row["max_length"] for row in self.rows if "max_length" in row), default=max(lengths))
        return [length for length in lengths if length <= reached] or [min(lengths)]


@dataclass(frozen=True)
class Score:
    """A metric of a model at a test length.

    Attributes:
        values: by seed, as shares from 0 to 1.
        num_asked: how many seeds the study asks for; None if the runs belong to no study.
    """

    task: str
    model: str
    length: int
    metric: str
    values: dict[int, float]
    num_asked: int | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def standard_deviation(self) -> float | None:
        """Of the sample (ddof 1); None for one seed."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def text(self) -> str:
        """In %.

        Example:
            >>> Score("parity", "rlt-1", 256, "final", {42: 1.0, 43: 0.5}, num_asked=3).text
            '75.00 ± 35.36'
        """
        deviation = self.standard_deviation
        return f"{100 * self.mean:.2f}" + (f" ± {100 * deviation:.2f}" if deviation is not None else "")

    @property
    def remark(self) -> str:
        """How many seeds there are, if some are missing."""
        is_partial = self.num_asked is not None and len(self.values) < self.num_asked
        return f"{len(self.values)} of {self.num_asked} seeds" if is_partial else ""


@dataclass(frozen=True)
class Collection:
    """All runs found, in the order in which they are shown."""

    runs: tuple[Run, ...]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.result is not None]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.task for run in self.runs))

    def of_task(self, task: str) -> list[Run]:
        """The finished runs of a task."""
        return [run for run in self.finished if run.task == task]

    def scores(self, task: str) -> list[Score]:
        """Every metric of every model at every length."""
        found: dict[tuple[str, int, str], dict[int, float]] = {}
        asked = {run.model: run.num_seeds_asked for run in self.of_task(task)}
        for run in self.of_task(task):
            assert run.result is not None
            for length, values in run.result["test"].items():
                for metric in run.recipe.task.task.metrics:
                    found.setdefault((run.model, int(length), metric), {})[run.seed] = values[metric]
        return [
            Score(task, model, length, metric, values, asked[model])
            for (model, length, metric), values in found.items()
        ]


def collect(folders: Iterable[Path]) -> Collection:
    """The runs below some folders.

    Raises:
        ValueError: there is none, two are the same, or runs of one cell or study do not belong together: their recipes
            differ in more than the seed, or their versions do.
        OSError: a folder does not exist.
    """
    folders = list(folders)
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: give one that holds runs.")
    paths = [path.parent for folder in folders for path in sorted(folder.resolve().rglob("recipe.yaml"))]
    if not paths:
        names = ", ".join(map(str, folders))
        raise ValueError(f"there are no runs in {names}: give the folder that train or reproduce wrote.")
    studies = {path: _study_of(path) for path in paths}
    runs = [_read(path, studies[path]) for path in paths]
    _check(runs)
    _refuse_other_test_sets(runs)
    order = [
        label
        for study in dict.fromkeys(studies.values())
        if study is not None
        for kind in ("tasks", "models")
        for label in _study_file(study).get(kind, [])
    ]
    place = {label: number for number, label in reversed(list(enumerate(order)))}
    runs.sort(
        key=lambda run: (
            place.get(run.task, len(place)),
            place.get(run.model, len(place)),
            run.task,
            run.model,
            run.seed,
        )
    )
    return Collection(tuple(runs))


def _study_of(path: Path) -> Path | None:
    """The folder of the study that a run lies in: TASK/MODEL/seed-N below it."""
    return next((folder for folder in list(path.parents)[:3] if (folder / STUDY_FILE).exists()), None)


def _study_file(study: Path) -> dict[str, Any]:
    return read_json(study / STUDY_FILE, "study", "seeds")


def _read(path: Path, study: Path | None) -> Run:
    """A run, labelled by its place in its study, or else by its recipe's task and its folder's name."""
    folder = RunFolder(path)
    recipe = folder.recipe()
    named = path.parent if path.name.startswith("seed-") else path
    result = folder.result() if folder.is_done else None
    if result is not None and result["selected_step"] not in folder.metrics.covered_steps():
        raise ValueError(
            f"{folder.metrics.path}: rows are missing before step {result['selected_step']}: restore the file."
        )
    return Run(
        task=recipe.task.name if study is None else path.relative_to(study).parts[0],
        model=named.name,
        recipe=recipe,
        result=result,
        rows=folder.metrics.rows(),
        versions=folder.versions(),
        num_seeds_asked=None if study is None else len(_study_file(study)["seeds"]),
        path=path,
    )


def _refuse_other_test_sets(runs: list[Run]) -> None:
    """Raise ValueError if runs of one task were tested on different sequences."""
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.task, run)
        for what in ("task.name", "task.num_test", "data_seeds.test"):
            section, name = what.split(".")
            ours, theirs = (getattr(getattr(one.recipe, section), name) for one in (run, other))
            if ours != theirs:
                raise ValueError(
                    f"{run.name} was tested on other sequences than {other.name} ({what}: {theirs} -> {ours}): they cannot "
                    "stand in one table. Report them apart."
                )


def _check(runs: list[Run]) -> None:
    first: dict[tuple[str, str], Run] = {}
    names: set[str] = set()
    for run in runs:
        if run.name in names:
            raise ValueError(f"{run.name} is there twice: give folders that do not overlap.")
        names.add(run.name)
        other = first.setdefault((run.task, run.model), run)
        differing = differences(other.recipe.model_dump(exclude={"seed"}), run.recipe.model_dump(exclude={"seed"}))
        if differing:
            raise ValueError(
                f"{run.name} is of another recipe than {other.name} ({'; '.join(differing[:3])}): they cannot stand in one "
                "table. Put them into folders with different names."
            )
        refuse_other_versions(f"{runs[0].name} and {run.name} were made", runs[0].versions, run.versions)
