"""`crosscurrent train`, `crosscurrent reproduce` and `crosscurrent recipes`"""

from pathlib import Path
from typing import Annotated, Any

import typer

CHANGES = "Values to change, as key.key=value (the value as in YAML)."


def recipes() -> None:
    """List the recipes that come with the package.

    Each is STUDY/TASK/MODEL. `crosscurrent train` takes one, `crosscurrent reproduce` a whole study.

    \b
    Example: crosscurrent recipes | grep parity
    """
    from crosscurrent.experiments.study import recipe_names

    typer.echo("\n".join(recipe_names()))


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A .yaml file, or a name that `crosscurrent recipes` lists.")
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=CHANGES)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", show_default="runs/RECIPE/seed-SEED", help="The run's folder.")
    ] = None,
) -> None:
    """Train a model on a task, select a checkpoint by validation, and test it; train one on text; or fine-tune one.

    The folder holds the resolved recipe, every metric of every step, and the model. If the command is stopped, the same
    command goes on from the last checkpoint. Text is prepared first: `crosscurrent prepare`. On several GPUs:

    \b
        torchrun --nproc-per-node 4 -m crosscurrent train RECIPE ...
    \b
    Example: crosscurrent train rlt/mini/parity/rlt-1
             crosscurrent train rlt/mini/parity/rlt-1 seed=7 training.max_steps=100 model.hidden_size=32
             crosscurrent train my.yaml --output runs/mine
             crosscurrent train text/nano/wikipedia/t2mlr data.prepared=wikipedia-tokens
    """
    from crosscurrent.experiments.kinds import run_any, summary
    from crosscurrent.experiments.recipe import Recipe
    from crosscurrent.experiments.settings import overrides
    from crosscurrent.experiments.study import find_recipe
    from crosscurrent.experiments.text_recipe import TextRecipe

    name, found = find_recipe(recipe, overrides(changes or []))
    folder = output if output is not None else Path("runs") / name / f"seed-{found.seed}"
    result = run_any(found, folder, name)
    if result is not None:
        if isinstance(found, Recipe):
            typer.echo(_scores(found.task.name, result))
        else:
            typer.echo(_text_scores(result) if isinstance(found, TextRecipe) else summary(found, result))
        typer.echo(f"Written: {folder}")


def _scores(task: str, result: dict[str, Any]) -> str:
    lines = [
        f"{task}: the weights of step {result['selected_step']} had the lowest validation loss, "
        f"{result['validation']['validation_loss']:.4f}",
        f"{result['num_parameters']:,} parameters, {result['seconds_per_step']:.3f} s per step, "
        f"{result['training_seconds']:.0f} s in all",
        "",
    ]
    scores = result["test"]
    names = [name for name in next(iter(scores.values())) if name not in ("loss", "num_examples")]
    lines.append(f"{'length':>8}" + "".join(f"{name:>16}" for name in names) + "   (% right)")
    for length, found in scores.items():
        lines.append(f"{length:>8}" + "".join(f"{100 * found[name]:>16.2f}" for name in names))
    return "\n".join(lines)


def _text_scores(result: dict[str, Any]) -> str:
    lines = [
        f"validation loss {result['validation_loss']:.4f} nats per token, perplexity {result['validation_perplexity']:.2f}",
        f"{result['steps']} steps, {result['tokens']:,} tokens, {result['epochs']:.2f} epochs",
        f"{result['num_parameters']:,} parameters, {result['seconds_per_step']:.3f} s per step, "
        f"{result['training_seconds']:.0f} s of training steps",
    ]
    skipped = result["num_skipped_steps"]
    return "\n".join([*lines, f"{skipped} steps were skipped: see the log"] if skipped else lines)


def reproduce(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="rlt, rlt-beyond, ... (`crosscurrent recipes` begins with them), or a .yaml file with a study of your own.",
        ),
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=CHANGES)] = None,
    scale: Annotated[
        str | None, typer.Option(help="Where there are several. mini: two CPU cores. paper: the published sizes.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="TASK,...", show_default="all", help="Tasks to run.")] = None,
    models: Annotated[str | None, typer.Option(metavar="MODEL,...", show_default="all", help="Models to run.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="SEED,...", show_default="all", help="Seeds to run.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            show_default="runs/STUDY-SCALE, or runs/NAME of a file",
            help="The folder of the study's runs.",
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be run.")] = False,
) -> None:
    """Run a study: every task with every model and seed, as far as it has not been run.

    Stop it whenever you like; the same command goes on. Start it several times, also on other machines that share the
    folder, and the processes divide the runs among them. `crosscurrent report` shows what there is at any time.

    \b
    Example: crosscurrent reproduce rlt --scale mini --only parity,s5_swaps
             crosscurrent reproduce rlt --scale mini --plan
             crosscurrent reproduce rlt-beyond --only s5_standard --models rlt-1 --seeds 42
             OMP_NUM_THREADS=1 crosscurrent reproduce rlt --scale mini --seeds 42 &
             OMP_NUM_THREADS=1 crosscurrent reproduce rlt --scale mini --seeds 43
    """
    from crosscurrent.experiments.grid import open_grid, run_grid
    from crosscurrent.experiments.settings import overrides
    from crosscurrent.experiments.study import find_study

    name, found = find_study(study, scale)
    runs = found.plan(name, words_of(only), words_of(models), numbers_of(seeds), overrides(changes or []))
    folder = output if output is not None else Path("runs") / name.replace("/", "-")
    if plan:
        typer.echo("\n".join(f"{folder / run.name}{_state(folder, run)}" for run in runs))
        typer.echo(f"{len(runs)} runs", err=True)
        return
    open_grid(folder, name, found, runs)
    report = run_grid(folder, runs, typer.echo)
    typer.echo(
        f"{len(report.finished)} runs done now, {len(report.were_done)} before, {len(report.busy)} by other processes, "
        f"{len(report.failed)} failed"
    )
    if report.failed:
        raise typer.Exit(1)


def _state(output: Path, planned: Any) -> str:
    from crosscurrent.experiments.kinds import folder_of

    folder = folder_of(planned.recipe, output / planned.name)
    try:
        folder.check_recipe(planned.recipe)
    except ValueError:
        return "  in the way: a run of another recipe or version"
    return "  done" if folder.is_done else "  begun" if folder.recipe_file.exists() else ""


def words_of(text: str | None) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in text.split(",")] if text else []


def numbers_of(text: str | None) -> list[int]:
    """The seeds between commas."""
    words = words_of(text)
    strange = [word for word in words if not word.isdecimal()]
    if strange:
        raise typer.BadParameter(f"--seeds: {strange[0]!r} is not a number.")
    return [int(word) for word in words]
