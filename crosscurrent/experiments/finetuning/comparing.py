"""A retrofit beside its baselines: which runs these are, and what came out, with paired intervals.

A fair comparison needs three baselines, all of the same base, data and order of data:

untouched            the base as it is: what fine-tuning gives at all
baseline             fine-tuned without recurrence, after the same steps
baseline-same-time   the same, after as many steps as fit into the retrofit's time
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from crosscurrent.evaluation.answering import score_answers
from crosscurrent.experiments.finetuning.examples import ProblemsOfRun
from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.experiments.finetuning.run import run_finetune
from crosscurrent.experiments.finetuning.step_time import refuse_others, step_time_ratio
from crosscurrent.experiments.processes import num_processes
from crosscurrent.experiments.run_folder import BusyError, read_json
from crosscurrent.files import locked, write_whole
from crosscurrent.models.base import load_base, load_tokenizer

RETROFIT, BASELINE, SAME_TIME, UNTOUCHED = "retrofit", "baseline", "baseline-same-time", "untouched"
BASELINES = (BASELINE, SAME_TIME, UNTOUCHED)
SCORES = "scores.json"  # of the untouched base, beside its answers.jsonl


def baseline_of(recipe: FinetuneRecipe, max_steps: int | None = None) -> FinetuneRecipe:
    """The same run without the recurrence.

    Args:
        recipe: of a retrofit.
        max_steps: another number of steps; None: as many.

    Raises:
        ValueError: the recipe has no range of its own, or trains the fusion alone, which a baseline has not.
    """
    if not recipe.base.is_recurrent:
        raise ValueError("base.layer_start and layer_end are not given: a comparison needs a retrofit.")
    if recipe.training.method == "fusion":
        raise ValueError(
            "training.method=fusion leaves nothing to train without recurrence: compare with the untouched base alone "
            f"(--baselines {UNTOUCHED})."
        )
    training = recipe.training.model_copy(
        update={"fusion_learning_rate": None, "max_steps": max_steps or recipe.training.max_steps}
    )
    problems = recipe.problems.model_copy(update={"recurrent": None})
    return recipe.model_copy(update={"base": recipe.base.alone, "training": training, "problems": problems})


def same_time_baseline(recipe: FinetuneRecipe, output: Path) -> FinetuneRecipe:
    """The baseline with as many steps as take the retrofit's time, by a measurement that is kept in `output`."""
    baseline = baseline_of(recipe)
    ratio = step_time_ratio(recipe, baseline, output)
    return baseline_of(recipe, max(1, round(ratio * recipe.training.max_steps)))


def run_comparison(
    recipe: FinetuneRecipe, output: Path, seeds: Sequence[int], baselines: Sequence[str], tell: Callable[[str], None]
) -> None:
    """Do the runs of a comparison, or what is missing of them.

    Args:
        recipe: of the retrofit; its seed gives way to `seeds`.
        output: a folder; runs lie in OUTPUT/MODEL/seed-N.
        seeds: of what is learned and its order, and of the starting weights of what is new; every run is made with each.
        baselines: some of `BASELINES`.
        tell: called with a line of text for each run.

    Raises:
        ValueError, OSError: as `run_finetune`. What is done stays.
    """
    if num_processes() > 1:
        raise ValueError(
            "a comparison is not run under torchrun. Start its runs there one by one with `crosscurrent train`, into "
            f"{output}/MODEL/seed-N; then the same command without torchrun finds them done, and compares."
        )
    made: dict[str, Callable[[], FinetuneRecipe]] = {
        RETROFIT: lambda: recipe,
        BASELINE: lambda: baseline_of(recipe),
        SAME_TIME: lambda: same_time_baseline(recipe, output),
    }
    wanted = [name for name in made if name == RETROFIT or name in baselines]
    if set(baselines) - {UNTOUCHED}:
        baseline_of(recipe)  # a mistake shows before hours of training
    for seed in seeds:
        for name in wanted:
            folder = output / name / f"seed-{seed}"
            result = run_finetune(made[name]().model_copy(update={"seed": seed}), folder, f"{name}, seed {seed}")
            assert result is not None
            tell(f"{name}, seed {seed}: {one_line(recipe, result)}")
    if UNTOUCHED in baselines:
        found = answer_untouched(recipe, output / UNTOUCHED)
        tell(f"{UNTOUCHED}: {_score(found, recipe.problems.task.metrics[0])}")


def one_line(recipe: FinetuneRecipe, result: dict[str, Any]) -> str:
    """About a finished run."""
    return (
        f"{result['steps']} steps in {result['training_seconds']:.0f} s, validation loss {result['validation_loss']:.4f}, "
        f"{_score(result['test'], recipe.problems.task.metrics[0])}"
    )


def _score(test: dict[str, Any], metric: str) -> str:
    found = test["metrics"][metric]
    return f"{metric} {found['mean']:.1%} [{found['low']:.1%}, {found['high']:.1%}] of {test['num_problems']} problems"


def answer_untouched(recipe: FinetuneRecipe, folder: Path) -> dict[str, Any]:
    """Put the test problems to the base as it is, or go on with that.

    Raises:
        BusyError: another process is at it.
    """
    file = folder / SCORES
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, BusyError(f"{folder}: another process is at work on it. Wait for it, or stop it.")):
        if not file.exists():
            _answer_untouched(recipe, folder)
    found = read_json(file, "metrics", "num_problems", "asked")
    refuse_others(file, found["asked"], _asked(recipe))
    return found


def _asked(recipe: FinetuneRecipe) -> dict[str, Any]:
    """What the answers of the untouched base depend on."""
    problems = recipe.problems.model_dump(
        mode="json", include={"name", "options", "data", "num_test", "prompt_format", "seed"}
    )
    evaluation = recipe.evaluation.model_dump(mode="json", exclude={"batch_size"})
    return {"base": recipe.base.name, "problems": problems, "evaluation": evaluation}


def _answer_untouched(recipe: FinetuneRecipe, folder: Path) -> None:
    model: Any = load_base(recipe.base.name, dtype=torch.float32)
    problems = ProblemsOfRun(recipe, load_tokenizer(recipe.base.name), model)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    found = score_answers(
        model,
        problems.tokens.tokenizer,
        problems.tokens.task,
        problems.problems("test"),
        recipe.answering,
        folder / "answers.jsonl",
        UNTOUCHED,
    )
    write_whole(folder / SCORES, json.dumps(found | {"asked": _asked(recipe)}, indent=2) + "\n")
