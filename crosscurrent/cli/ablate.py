"""`crosscurrent ablate`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from crosscurrent.cli.evaluate import Dtype, PromptFormat, SplitName


def ablate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A recurrent model: a folder, or an id on the Hugging Face hub.")
    ],
    task: Annotated[
        str, typer.Option(metavar="TASK", help="A reasoning task, with its options as in variable_assignment:depth=2.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A folder for scores, figure and records. The same command goes on.")
    ],
    conditions: Annotated[
        str, typer.Option(metavar="NAME,...", help="Which to run beside intact, which always is.")
    ] = "off,reset,other,random",
    reset: Annotated[
        str | None,
        typer.Option(metavar="N,...", show_default="1,4,16", help="Of the condition reset: every so many tokens."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(show_default="0", help="Of the condition random: seed of its vectors.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The task's files, if it is not a generated one.", show_default="the hub")
    ] = None,
    split: Annotated[SplitName, typer.Option(help="Which problems.")] = SplitName.test,
    limit: Annotated[int, typer.Option(min=1, help="Ask the first so many of them.")] = 200,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Problems per pass. It changes no score but by rounding.")
    ] = 16,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, show_default="the task's", help="Cut answers off after so many tokens.")
    ] = None,
    prompt_format: Annotated[
        PromptFormat | None, typer.Option(show_default="the task's", help="Ask as a chat, or as plain text.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto: as they are saved.")] = Dtype.auto,
) -> None:
    """Find out where a model's recurrence helps.

    The model answers the same problems with its carried state left alone and changed, and what it loses is what the state
    was worth. Weights and attention stay as they are. Conditions:

    \b
    intact   nothing is changed
    off      no token reads a state at all
    reset    every N-th token reads the state of a token without predecessor: how far back must it reach?
    other    each token reads the state of the next problem, at the same distance from the prompt's end
    random   each token reads a random vector as long as its state

    Decoding is greedy and exact, token by token, prompts included unless the model is configured with
    prompt_recurrence=False. The difference to intact is paired by problem; intervals hold 95 % of the bootstrap. OUTPUT gets
    ablation.json, a line per problem in CONDITION.jsonl, and a figure (accuracy.png, accuracy.svg).

    \b
    Example: crosscurrent ablate finetuned --task variable_assignment:depth=2 --output ablation
             crosscurrent ablate finetuned --task gsm8k --data gsm8k_test.jsonl --limit 50 --reset 8 --output ablation
             crosscurrent ablate finetuned --task variable_assignment --conditions off,other --output ablation
    """
    names = [word.strip() for word in conditions.split(",") if word.strip()]
    for option, value, condition in (("--reset", reset, "reset"), ("--seed", seed, "random")):
        if value is not None and condition not in names:
            raise typer.BadParameter(f"{option} without the condition {condition} has no effect.")
    counts = _counts(reset)

    import torch

    from crosscurrent.evaluation.answering import AnsweringSettings
    from crosscurrent.experiments.ablation import RESETS, interventions_of, refuse_other_folder, run_ablation
    from crosscurrent.experiments.answering import tasks_of
    from crosscurrent.models.base import load_base, load_tokenizer

    interventions = interventions_of(
        names, counts or RESETS, seed or 0
    )  # mistakes are named before the model is loaded
    refuse_other_folder(output)
    chosen = tasks_of([task])[task]
    problems = chosen.problems(split.value, data, limit)  # type: ignore[arg-type]
    settings = AnsweringSettings(
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        prompt_format=None if prompt_format is None else prompt_format.value,  # type: ignore[arg-type]
    )
    tokenizer = load_tokenizer(model)
    language_model: Any = load_base(model, dtype=dtype.value)
    language_model.to("cuda" if torch.cuda.is_available() else "cpu")
    facts = run_ablation(language_model, tokenizer, chosen, problems, interventions, output, settings, model)
    typer.echo(_table(facts))


def _counts(text: str | None) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text is not None else []
    strange = [word for word in words if not word.isdecimal() or int(word) < 1]
    if strange:
        raise typer.BadParameter(f"--reset: {strange[0]!r} is not a number of at least 1; give such as 1,4,16.")
    return [int(word) for word in words]


def _table(facts: dict[str, Any]) -> str:
    conditions = facts["conditions"]
    task, intact = facts["task"], conditions["intact"]
    options = "".join(f" {name}={value}" for name, value in task["options"].items())
    lines = [f"{facts['model']['name']}: {task['name']}{options}, {intact['num_problems']:,} problems"]
    for place, metric in enumerate(intact["metrics"]):
        lines += [
            "",
            f"{'condition':<11}{metric:>18}{'':>9}{'less intact':>18}{'':>9}{'changed':>9}{'unparsed':>10}{'cut':>8}",
        ]
        for name, found in conditions.items():
            score = _with_interval(found["metrics"][metric])
            compared = found.get("compared_to_intact")
            less = _with_interval(compared[place]["difference"], "+") if compared else ""
            shares = [found.get(key) for key in ("changed_rate", "parse_failure_rate", "truncation_rate")]
            changed, unread, cut = ("" if share is None else f"{share:.1%}" for share in shares)
            lines.append(f"{name:<11}{score:>27}{less:>27}{changed:>9}{unread:>11}{cut:>9}")
    lines += [
        "",
        "intervals: 95 %, paired by problem for the difference; changed: outputs that are not those of intact",
    ]
    return "\n".join(lines)


def _with_interval(estimate: dict[str, float], sign: str = "") -> str:
    mean, low, high = (f"{estimate[key]:{sign}.1%}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
