"""Runs gathered from folders, and what they say together: mean and sample standard deviation over seeds."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscurrent.experiments.grid import STUDY_FILE
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run_folder import RunFolder, differences, read_json
from crosscurrent.experiments.study import find_study
from crosscurrent.training.telemetry import Row


@dataclass(frozen=True)
class Run:
    """A finished run, or one that is under way (`result` is None).

    Attributes:
        task, model: labels, from the folder's name.
        rows: its metrics, step by step.
        versions: of the software it was made with.
    """

    task: str
    model: str
    recipe: Recipe
    result: dict[str, Any] | None
    rows: list[Row]
    versions: dict[str, Any]

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def name(self) -> str:
        return f"{self.task}/{self.model}/seed-{self.seed}"


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
    def is_partial(self) -> bool:
        """Whether seeds are missing."""
        return self.num_asked is not None and len(self.values) < self.num_asked

    def text(self) -> str:
        """In %, as "97.30 ± 2.76", with a remark if seeds are missing.

        Example:
            >>> Score("parity", "rlt-1", 256, "final", {42: 1.0, 43: 0.5}, num_asked=3).text()
            '75.00 ± 35.36 (2 of 3 seeds)'
        """
        deviation = self.standard_deviation
        text = f"{100 * self.mean:.2f}" + (f" ± {100 * deviation:.2f}" if deviation is not None else "")
        return f"{text} ({len(self.values)} of {self.num_asked} seeds)" if self.is_partial else text


@dataclass(frozen=True)
class Collection:
    """All runs found, in the order in which they are shown."""

    runs: tuple[Run, ...]
    seeds_asked: tuple[int, ...] | None

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
        for run in self.of_task(task):
            assert run.result is not None
            for length, values in run.result["test"].items():
                for metric in run.recipe.task.task.metrics:
                    found.setdefault((run.model, int(length), metric), {})[run.seed] = values[metric]
        asked = len(self.seeds_asked) if self.seeds_asked is not None else None
        return [Score(task, model, length, metric, values, asked) for (model, length, metric), values in found.items()]


def collect(folders: Iterable[Path]) -> Collection:
    """The runs below some folders.

    Raises:
        ValueError: there is none, two are the same, or runs of one cell or study do not belong together: their recipes
            differ in more than the seed, or their versions of crosscurrent do.
        OSError: a folder does not exist.
    """
    runs: list[Run] = []
    seeds: set[tuple[int, ...]] = set()
    order: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: give one that holds runs.")
        found = [_read(path.parent, folder) for path in sorted(folder.rglob("recipe.yaml"))]
        runs += found
        if (folder / STUDY_FILE).exists():
            study = read_json(folder / STUDY_FILE)
            seeds.add(tuple(study["seeds"]))
            order += _order(study["study"])
    if not runs:
        raise ValueError(
            f"there are no runs in {', '.join(map(str, folders))}: give the folder that train or reproduce wrote."
        )
    _check(runs)
    place = {label: number for number, label in reversed(list(enumerate(order)))}
    runs.sort(key=lambda run: (place.get(run.task, len(place)), place.get(run.model, len(place)), run.name))
    return Collection(tuple(runs), seeds.pop() if len(seeds) == 1 else None)


def _order(study: str) -> list[str]:
    """The labels of a study that comes with the package, in its order; none of another."""
    try:
        _, found = find_study(study)
    except (ValueError, OSError):
        return []
    return [*found.tasks, *found.models]


def _read(folder: Path, root: Path) -> Run:
    run = RunFolder(folder)
    recipe = run.recipe()
    parts = folder.relative_to(root).parts
    labels = [part for part in parts if not part.startswith("seed-")] or [root.name]
    return Run(
        task=labels[-2] if len(labels) > 1 else recipe.task.name,
        model=labels[-1],
        recipe=recipe,
        result=run.result() if run.is_done else None,
        rows=run.metrics.rows(),
        versions=run.versions(),
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
        if run.versions.get("crosscurrent") != runs[0].versions.get("crosscurrent"):
            raise ValueError(
                f"{run.name} was made with crosscurrent {run.versions.get('crosscurrent')}, {runs[0].name} with "
                f"{runs[0].versions.get('crosscurrent')}: numbers of different versions do not stand in one table."
            )
