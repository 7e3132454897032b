"""`crosscurrent finetune`"""

from pathlib import Path
from typing import Annotated

import typer

from crosscurrent.cli.train import CHANGES, numbers_of, words_of

BASELINES = "baseline,baseline-same-time,untouched"


def finetune(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A .yaml file, or a name that `crosscurrent recipes` lists.")
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=CHANGES)] = None,
    seeds: Annotated[str | None, typer.Option(metavar="SEED,...", show_default="the recipe's")] = None,
    baselines: Annotated[str, typer.Option(metavar="NAME,...", help="Which of them; none: no one.")] = BASELINES,
    output: Annotated[Path | None, typer.Option("--output", "-o", show_default="runs/RECIPE")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be run.")] = False,
) -> None:
    """Fine-tune a pretrained model with a recurrence on a reasoning task, and compare it with what it must beat.

    The baselines are the same base on the same data: fine-tuned without recurrence for as many steps (baseline), and for as
    many as take the retrofit's time (baseline-same-time; the ratio is measured first), and as it is (untouched). All answer
    the same test problems; differences are paired by problem, with 95 % intervals. OUTPUT gets the runs
    (MODEL/seed-N, each with its model and a record of every answer) and comparison.md, .json, .png and .svg.

    If the command is stopped, the same command goes on. `crosscurrent train RECIPE` does one run alone.

    \b
    Example: crosscurrent finetune reasoning/mini/variable_assignment-2/retrofit
             crosscurrent finetune reasoning/mini/gsm_aug_equations/retrofit problems.data=gsm8k-folder --seeds 42,43,44
             crosscurrent finetune my.yaml base.layer_start=8 base.layer_end=14 training.method=lora -o runs/mine
    """
    from crosscurrent.experiments.finetuning.comparing import BASELINES as KNOWN
    from crosscurrent.experiments.finetuning.comparing import run_comparison
    from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
    from crosscurrent.experiments.finetuning.report import read_comparisons, write_comparison
    from crosscurrent.experiments.settings import overrides
    from crosscurrent.experiments.study import find_recipe
    from crosscurrent.suggestions import did_you_mean

    name, found = find_recipe(recipe, overrides(changes or []))
    if not isinstance(found, FinetuneRecipe):
        raise ValueError(
            f"{name} is no recipe of fine-tuning (problems, base, training): `crosscurrent train` runs it."
        )
    wanted = [] if baselines == "none" else words_of(baselines)
    for word in wanted:
        if word not in KNOWN:
            raise typer.BadParameter(
                f"--baselines: {word!r}.{did_you_mean(word, KNOWN)} Give some of {', '.join(KNOWN)}."
            )
    chosen = numbers_of(seeds) or [found.seed]
    folder = output if output is not None else Path("runs") / name
    if plan:
        models = ["retrofit", *(word for word in wanted if word != "untouched")]
        paths = [f"{folder / model}/seed-{seed}" for seed in chosen for model in models]
        typer.echo("\n".join(paths + [str(folder / word) for word in wanted if word == "untouched"]))
        return
    run_comparison(found, folder, chosen, wanted, lambda text: typer.echo(text, err=True))
    written = write_comparison(read_comparisons([folder])[folder], folder)
    typer.echo((folder / "comparison.md").read_text(encoding="utf-8"))
    typer.echo(f"Written: {', '.join(map(str, written))}")
