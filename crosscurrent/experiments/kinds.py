"""The two kinds of runs, on a task and on text: told apart by what their recipes hold."""

from pathlib import Path
from typing import Any

from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run import run
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.experiments.settings import merge, read_yaml, validated
from crosscurrent.experiments.text_recipe import TextRecipe
from crosscurrent.experiments.text_run import TextRunFolder, run_text

AnyKind = Recipe | TextRecipe


def recipe_of(values: Any, source: str) -> AnyKind:
    """A recipe from plain values: of a run on text if it has `data`, else on a task.

    Raises:
        ValueError: something in it is not allowed; the message names the source and the key.
    """
    is_text = isinstance(values, dict) and "data" in values
    if is_text and "task" in values:
        raise ValueError(f"{source}: a recipe has either a task or data, not both.")
    if isinstance(values, dict) and not is_text and "task" not in values:
        raise ValueError(
            f"{source}: a recipe has a task ({{name: parity}}) or data ({{prepared: FOLDER, ...}}): give one."
        )
    return validated(TextRecipe, values, source) if is_text else validated(Recipe, values, source)


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
    return TextRunFolder(path) if isinstance(recipe, TextRecipe) else RunFolder(path)


def run_any(recipe: AnyKind, path: Path, name: str = "") -> dict[str, Any] | None:
    """Do a run of either kind: see `run` and `run_text`."""
    return run_text(recipe, path, name) if isinstance(recipe, TextRecipe) else run(recipe, path, name)


def summary(recipe: AnyKind, result: dict[str, Any]) -> str:
    """One line about a finished run."""
    if isinstance(recipe, TextRecipe):
        return (
            f"{result['steps']} steps, {result['tokens']:,} tokens in {result['training_seconds']:.0f} s, validation loss "
            f"{result['validation_loss']:.4f}"
        )
    metric = recipe.task.task.metrics[0]
    scores = result["test"]
    first, last = min(scores, key=int), max(scores, key=int)
    return (
        f"step {result['selected_step']} selected, {metric} {100 * scores[first][metric]:.1f} % at length {first}, "
        f"{100 * scores[last][metric]:.1f} % at {last}"
    )
