"""A study: a grid of runs, written as what they share and what sets them apart.

In YAML::

    description: what it is
    seeds: [42, 43, 44]
    defaults:                              # of every run; a part of a recipe
      training: {max_steps: 300, batch_size: 128, learning_rate: 0.001}
    tasks:
      parity: {task: {name: parity}}
    models:
      rlt-1: {model: {architecture: rlt, ...}}
    cells:                                 # which model on which task; left out: every one on each
      - {tasks: [parity], models: [rlt-1]}

The recipe of a run is the defaults, then its task's part, then its model's part, then what its cell changes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from crosscurrent.experiments.kinds import AnyKind, load_recipe, recipe_of
from crosscurrent.experiments.recipe import Seed
from crosscurrent.experiments.settings import Settings, merge, nearest, read_yaml, validated
from crosscurrent.suggestions import did_you_mean

Values = dict[str, Any]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]  # they become names of folders


class CellsSettings(Settings):
    """Some models on some tasks.

    Attributes:
        tasks, models: labels.
        changes: a part of a recipe, for these runs alone.
    """

    tasks: tuple[Label, ...]
    models: tuple[Label, ...]
    changes: Values = {}


class Study(Settings):
    """A grid of runs.

    Attributes:
        description: one sentence.
        seeds: of the starting weights; every cell is run with each.
        defaults, tasks, models: parts of recipes.
        cells: which of the grid; null: all of it.
    """

    description: str
    seeds: tuple[Seed, ...]
    defaults: Values = {}
    tasks: dict[Label, Values]
    models: dict[Label, Values]
    cells: tuple[CellsSettings, ...] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "Study":
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)}: give at least one, and each once.")
        for number, cells in enumerate(self.cells or ()):
            _check_labels(cells.tasks, self.tasks, f"cells[{number}]: task")
            _check_labels(cells.models, self.models, f"cells[{number}]: model")
        if not self._pairs():
            raise ValueError("a study needs tasks, models and, if it has cells, something in them.")
        parts = [
            self.defaults,
            *self.tasks.values(),
            *self.models.values(),
            *(cells.changes for cells in self.cells or ()),
        ]
        if any("seed" in part for part in parts):
            raise ValueError("seed: the seeds of a study stand in `seeds`.")
        pairs = [(task, model) for task, model, _ in self._pairs()]
        twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
        if twice is not None:
            raise ValueError(f"cells: {twice[1]} on {twice[0]} is there twice.")
        return self

    def _pairs(self) -> list[tuple[str, str, Values]]:
        if self.cells is None:
            return [(task, model, {}) for task in self.tasks for model in self.models]
        return [(task, model, cells.changes) for cells in self.cells for task in cells.tasks for model in cells.models]

    def values(self, task: str, model: str) -> Values:
        """The recipe of a cell as plain values, without a seed.

        Raises:
            ValueError: the study has no such cell.
        """
        for one, other, changes in self._pairs():
            if (one, other) == (task, model):
                return merge(self.defaults, self.tasks[task], self.models[model], changes)
        raise ValueError(f"there is no cell {task}/{model} in this study.")

    def plan(
        self,
        source: str,
        tasks: Iterable[str] = (),
        models: Iterable[str] = (),
        seeds: Iterable[int] = (),
        changes: Values | None = None,
    ) -> list["PlannedRun"]:
        """Its runs in order, all cells of one seed before those of the next.

        Args:
            source: named in errors.
            tasks, models, seeds: which of them; none: all.
            changes: a part of a recipe, on top of every one.

        Raises:
            ValueError: a label or seed is not in the study, or a recipe is not valid.
        """
        tasks, models, seeds = list(tasks), list(models), list(seeds)
        _check_labels(tasks, self.tasks, "task")
        _check_labels(models, self.models, "model")
        strange = [seed for seed in seeds if seed not in self.seeds]
        if strange or len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds {seeds}: give some of {list(self.seeds)}, each once.")
        if "seed" in (changes or {}):
            raise ValueError("seed cannot be changed for a whole study: choose among its seeds instead.")
        chosen = [
            (task, model)
            for task, model, _ in self._pairs()
            if (not tasks or task in tasks) and (not models or model in models)
        ]
        if not chosen:
            raise ValueError(f"the study has no {', '.join(models)} on {', '.join(tasks)}.")
        return [
            PlannedRun(task, model, self._recipe(source, task, model, seed, changes or {}))
            for seed in (seeds or self.seeds)
            for task, model in chosen
        ]

    def _recipe(self, source: str, task: str, model: str, seed: int, changes: Values) -> AnyKind:
        values = merge(self.values(task, model), {"seed": seed}, changes)
        return recipe_of(values, f"{source}, {task}/{model}")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    task: str
    model: str
    recipe: Any  # of one of the kinds

    @property
    def name(self) -> str:
        """Of the run, and of its folder below the study's."""
        return f"{self.task}/{self.model}/seed-{self.recipe.seed}"


def _check_labels(given: Iterable[str], known: Iterable[str], what: str) -> None:
    for label in given:
        if label not in known:
            raise ValueError(f"there is no {what} {label!r}.{nearest(label, list(known))}")


def shipped() -> Path:
    """The folder of the recipes that come with the package."""
    return Path(str(files("crosscurrent") / "recipes"))


def shipped_studies() -> dict[str, Path]:
    """The studies that come with the package, by name: "rlt/mini", ..."""
    root = shipped()
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


_PARTS_OF_RECIPES = (("task", "model"), ("data", "model"), ("problems", "base"))


def load_study(path: Path) -> Study:
    """A study from a YAML file.

    Raises:
        ValueError: something in it is not allowed; the message names the file and the key.
        OSError: it cannot be read.
    """
    values = read_yaml(path)
    if isinstance(values, dict) and any({one, other} <= set(values) for one, other in _PARTS_OF_RECIPES):
        raise ValueError(f"{path} is a recipe, not a study: `crosscurrent train` runs it.")
    return validated(Study, values, str(path))


def find_study(name: str, scale: str | None = None) -> tuple[str, Study]:
    """A study that comes with the package, by name and scale, or one in a file.

    Hyphens may stand for what else parts a name's words, and a scale is left out where there is one alone: "rlt-beyond",
    "rlt-mini".

    Returns:
        Its name and the study.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> find_study("rlt", "mini")[0]
        'rlt/mini'
    """
    if name.endswith((".yaml", ".yml")):
        if scale is not None:
            raise ValueError(f"--scale {scale} has no effect on a file: leave it out.")
        return Path(name).stem, load_study(Path(name))
    studies = shipped_studies()
    families = {study.rpartition("/")[0] for study in studies}
    name = next((known for known in (*families, *studies) if re.sub("[/_]", "-", known) == name), name)
    scales = [study.rpartition("/")[2] for study in studies if study.rpartition("/")[0] == name]
    if scale is None and len(scales) > 1:
        raise ValueError(f"{name} comes in several scales: give --scale {' or --scale '.join(scales)}.")
    scale = scale if scale is not None else next(iter(scales), None)
    wanted = name if scale is None else f"{name}/{scale}"
    if wanted not in studies:
        hint = did_you_mean(wanted, studies)
        raise ValueError(f"there is no study {wanted!r}.{hint} Give one of {', '.join(studies)}, or a .yaml file.")
    return wanted, load_study(studies[wanted])


def find_recipe(name: str, changes: Values | None = None) -> tuple[str, Any]:
    """A recipe in a file, or one of a study that comes with the package: "rlt/mini/parity/rlt-1".

    Returns:
        A name for it and the recipe.

    Raises:
        ValueError: there is none of that name, or something in it is not allowed.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name).stem, load_recipe(Path(name), changes)
    study_name, task, model = _split(name)
    study = load_study(shipped_studies()[study_name])
    values = merge(study.values(task, model), {"seed": study.seeds[0]}, changes or {})
    return name, recipe_of(values, name)


def recipe_names() -> list[str]:
    """All recipes of all studies that come with the package."""
    return [
        f"{study}/{task}/{model}"
        for study, path in shipped_studies().items()
        for task, model, _ in load_study(path)._pairs()
    ]


def _split(name: str) -> tuple[str, str, str]:
    names = recipe_names()
    if name not in names:
        hint = did_you_mean(name, names, most=3)
        raise ValueError(f"there is no recipe {name!r}.{hint} `crosscurrent recipes` lists them; a file ends in .yaml.")
    study, task, model = name.rsplit("/", 2)
    return study, task, model
