"""`crosscurrent retrofit`"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

SAMPLE = "The capital of France is Paris, and the capital of Italy is"


def retrofit(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="smollm2-135m, a folder, or an id on the Hugging Face hub.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder for the new model and its tokenizer.")],
    layer_start: Annotated[int, typer.Option(min=0, help="First recurrent layer, counted from 0.")],
    layer_end: Annotated[int, typer.Option(min=1, help="The layer after the last recurrent one.")],
    feedback_interval: Annotated[
        int,
        typer.Option(min=1, help="1: every token reads the state of the one before; B: of the last chunk of B tokens."),
    ] = 1,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Jacobi iterations that solve a whole sequence.", show_default="4")
    ] = None,
    backward_iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many of them, the last, carry gradient: the published way, 16 and 4 (docs/solvers.md).",
            show_default="an implicit gradient",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUTPUT.")] = False,
) -> None:
    """Add a recurrence to a pretrained model, and save it.

    The output of the layers from LAYER_START to before LAYER_END is fed back, token by token, to the first of them. The
    new model computes exactly what the base does until it is trained. The published choice is the middle fifth of
    the layers. transformers loads the result with AutoModelForCausalLM after `import crosscurrent`.

    \b
    Example: crosscurrent retrofit smollm2-135m retrofitted --layer-start 12 --layer-end 18
    """
    from crosscurrent.experiments.checks import max_logit_difference
    from crosscurrent.experiments.inspection import num_recurrent_parameters
    from crosscurrent.experiments.saving import check_target, save_model
    from crosscurrent.models.base import load_base, load_tokenizer, shareable_name
    from crosscurrent.models.t2mlr import retrofit as retrofit_model
    from crosscurrent.models.t2mlr.configuration_t2mlr import DEFAULT_SOLVER
    from crosscurrent.recurrence import Jacobi

    check_target(output, overwrite)
    if backward_iterations is not None:
        solver = Jacobi(iterations or Jacobi.iterations, backward_iterations)
    else:
        solver = replace(DEFAULT_SOLVER, iterations=iterations or DEFAULT_SOLVER.iterations)
    tokenizer, base_model = load_tokenizer(base), load_base(base)
    model = retrofit_model(base_model, layer_start, layer_end, feedback_interval=feedback_interval, solver=solver)
    difference = max_logit_difference(base_model, model, tokenizer(SAMPLE, return_tensors="pt")["input_ids"])
    command = {
        "--layer-start": layer_start,
        "--layer-end": layer_end,
        "--feedback-interval": feedback_interval,
        "--iterations": iterations,
        "--backward-iterations": backward_iterations,
    }
    words = ["crosscurrent", "retrofit", shareable_name(base), output.resolve().name]
    words += [str(word) for option in command.items() if option[1] is not None for word in option]
    save_model(model, tokenizer, output, overwrite, shlex.join(words))
    typer.echo(
        f"{output}: {base} with layers {layer_start} to {layer_end - 1} of {model.config.num_hidden_layers} recurrent, "
        f"feedback interval {feedback_interval}, {solver}\n"
        f"parameters: {model.num_parameters():,}, of them new: {num_recurrent_parameters(model):,}\n"
        f"largest logit difference to the base on a sample: {difference}"
    )
