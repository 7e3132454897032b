"""`crosscurrent info`"""

import json
from typing import Annotated, Any

import typer


def info(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a folder, or an id on the Hugging Face hub.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a model is made of.

    Its kind, layers, recurrence, solver and sizes, and how far its gates have opened.

    \b
    Example: crosscurrent info retrofitted
             crosscurrent info retrofitted --json | jq .num_parameters
    """
    from crosscurrent.experiments.inspection import describe
    from crosscurrent.models.base import load_base

    facts = describe(load_base(model))
    typer.echo(json.dumps(facts, indent=2) if as_json else _table(facts))


def _table(facts: dict[str, Any]) -> str:
    width = max(map(len, facts)) + 2
    return "\n".join(f"{name.replace('_', ' '):<{width}}{_text(value)}" for name, value in facts.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(item)}" for name, item in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
