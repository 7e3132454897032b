"""The kinds of runs, on a task, on text and on reasoning problems: told apart by what their recipes hold."""

from pathlib import Path
from typing import Any

from crosscurrent.experiments.finetuning.comparing import one_line
from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.experiments.finetuning.run import FinetuneRunFolder, run_finetune
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run import run
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.experiments.settings import merge, read_yaml, validated
from crosscurrent.experiments.text_recipe import TextRecipe
from crosscurrent.experiments.text_run import TextRunFolder, run_text

AnyKind = Recipe | TextRecipe | FinetuneRecipe

_KINDS: dict[str, type[AnyKind]] = {"task": Recipe, "data": TextRecipe, "problems": FinetuneRecipe}


def recipe_of(values: Any, source: str) -> AnyKind:
    """A recipe from plain values: of a run on a `task`, on text (`data`), or on reasoning `problems`.

    Raises:
        ValueError: something in it is not allowed; the message names the source and the key.
    """
    if not isinstance(values, dict):
        return validated(Recipe, values, source)
    given = [key for key in _KINDS if key in values]
    if not given:
        raise ValueError(
            f"{source}: a recipe has a task ({{name: parity}}), data ({{prepared: FOLDER, ...}}) or problems "
            "({name: gsm8k, ...}): give one."
        )
    if len(given) > 1:
        articles = ["a task" if key == "task" else key for key in given]
        raise ValueError(f"{source}: a recipe has either {' or '.join(articles)}, not both.")
    return validated(_KINDS[given[0]], values, source)


def load_recipe(path: Path, changes: dict[str, Any] | None = None) -> AnyKind:
    """A recipe from a YAML file, with changes on top.

    Raises:
        ValueError: something in it is not allowed; the message names the file, the key and the nearest valid one.
        OSError: it cannot be read.
    """
    values = read_yaml(path)
    if isinstance(values, dict) and {"tasks", "models"} <= set(values):
        raise ValueError(f"{path} is a study, not a recipe: `crosscurrent reproduce` runs it.")
    return recipe_of(merge(values, changes or {}) if isinstance(values, dict) else values, str(path))


def folder_of(recipe: AnyKind, path: Path) -> RunFolder:
    """The folder of a run of this kind."""
    kinds: dict[type, type[RunFolder]] = {TextRecipe: TextRunFolder, FinetuneRecipe: FinetuneRunFolder}
    return kinds.get(type(recipe), RunFolder)(path)


def run_any(recipe: AnyKind, path: Path, name: str = "") -> dict[str, Any] | None:
    """Do a run of any kind: see `run`, `run_text` and `run_finetune`."""
    if isinstance(recipe, TextRecipe):
        return run_text(recipe, path, name)
    return run_finetune(recipe, path, name) if isinstance(recipe, FinetuneRecipe) else run(recipe, path, name)


def summary(recipe: AnyKind, result: dict[str, Any]) -> str:
    """One line about a finished run."""
    if isinstance(recipe, TextRecipe):
        return (
            f"{result['steps']} steps, {result['tokens']:,} tokens in {result['training_seconds']:.0f} s, validation loss "
            f"{result['validation_loss']:.4f}"
        )
    if isinstance(recipe, FinetuneRecipe):
        return one_line(recipe, result)
    metric = recipe.task.task.metrics[0]
    scores = result["test"]
    first, last = min(scores, key=int), max(scores, key=int)
    return (
        f"step {result['selected_step']} selected, {metric} {100 * scores[first][metric]:.1f} % at length {first}, "
        f"{100 * scores[last][metric]:.1f} % at {last}"
    )
