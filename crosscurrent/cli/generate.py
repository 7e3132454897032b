"""`crosscurrent generate`"""

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer


class SolverName(StrEnum):
    sequential = "sequential"
    jacobi = "jacobi"
    sweeps = "sweeps"


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a folder, or an id on the Hugging Face hub.")
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; without it, it is read from stdin.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random instead of the likeliest.")] = False,
    temperature: Annotated[
        float | None, typer.Option(show_default="1", help="With --sample: below 1 is more predictable.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, show_default="1.0", help="With --sample: among the likeliest of this total share."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(show_default="0", help="With --sample: seed of the random draws.")] = None,
    solver: Annotated[
        SolverName | None,
        typer.Option(show_default="the model's", help="How the prompt is solved; sequential is exact."),
    ] = None,
    prompt_recurrence: Annotated[
        bool | None, typer.Option(show_default="the model's", help="Whether prompt tokens read the state.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Put the prompt into the tokenizer's chat template, if it has one.")
    ] = True,
) -> None:
    """Continue a prompt.

    Only the generated text goes to stdout, as it is made.

    \b
    Example: crosscurrent generate retrofitted "What is the capital of France?"
             echo "The capital of France is" | crosscurrent generate retrofitted --no-chat --solver sequential
    """
    sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
    _refuse_sampling_settings(sample, sampling)
    text = prompt if prompt is not None else _prompt_from_stdin()
    if not text:
        raise ValueError("the prompt is empty: give it as an argument, or on stdin.")

    from transformers import TextStreamer, set_seed

    from crosscurrent.models.base import load_base, load_tokenizer

    tokenizer = load_tokenizer(model)
    language_model: Any = load_base(model)
    choices = _recurrence_choices(language_model, solver, prompt_recurrence)
    set_seed(seed if seed is not None else 0)
    if sample:
        choices |= {"temperature": temperature, "top_p": top_p}
    language_model.generate(
        **_encode(tokenizer, text, chat),
        max_new_tokens=max_new_tokens,
        do_sample=sample,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **choices,
    )


def _refuse_sampling_settings(sample: bool, settings: dict[str, float | None]) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is not None]
    if given and not sample:
        raise typer.BadParameter(f"{', '.join(given)} without --sample has no effect.")


def _prompt_from_stdin() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, as an argument or on stdin.")
    return sys.stdin.read().removesuffix("\n")


def _recurrence_choices(model: Any, solver: SolverName | None, prompt_recurrence: bool | None) -> dict[str, Any]:
    """Arguments of `generate` that only recurrent models take."""
    from crosscurrent.models.generation import RecurrentCausalLM
    from crosscurrent.recurrence import SOLVERS, solver_from_dict

    if solver is None and prompt_recurrence is None:
        return {}
    if not isinstance(model, RecurrentCausalLM):
        raise ValueError(
            f"{type(model).__name__} has no recurrence: --solver and --prompt-recurrence are for recurrent models."
        )
    choices: dict[str, Any] = {"prompt_recurrence": prompt_recurrence}
    if solver is not None:
        configured = solver_from_dict(model.config.solver)
        choices["solver"] = configured if configured.name == solver else SOLVERS[solver]()
    return choices


def _encode(tokenizer: Any, text: str, chat: bool) -> dict[str, Any]:
    """The prompt as model inputs of one row."""
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        encoded = tokenizer(text, return_tensors="pt")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
