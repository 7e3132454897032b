"""The solver that a user names for an evaluation."""

import json
from typing import Any

from crosscurrent.recurrence import Sequential, Solver, as_solver
from crosscurrent.suggestions import did_you_mean

CONFIGURED, EXACT = "configured", "exact"


def scoring_solver(choice: str | dict[str, Any] | Solver) -> Solver | None:
    """The solver that a choice names; None for the one that the model is configured with.

    Args:
        choice: "configured", "exact" (token by token), a solver, or one as a recipe writes it: a dictionary, or its JSON.

    Raises:
        ValueError: it is none of these, or a setting is unknown or not allowed.

    Example:
        >>> scoring_solver("exact")
        Sequential(truncate=None, recompute_every=None)
        >>> scoring_solver('{"name": "jacobi", "iterations": 8}').iterations
        8
        >>> scoring_solver("configured") is None
        True
    """
    if not isinstance(choice, str):
        return as_solver(choice)
    if choice == CONFIGURED:
        return None
    if choice == EXACT:
        return Sequential()
    if not choice.lstrip().startswith("{"):
        raise ValueError(
            f"solver {choice!r} is not known: give {CONFIGURED}, {EXACT}, or a solver's settings as JSON, such as "
            f'{{"name": "jacobi", "iterations": 8}}.{did_you_mean(choice, (CONFIGURED, EXACT))}'
        )
    try:
        return as_solver(json.loads(choice))
    except json.JSONDecodeError as error:
        raise ValueError(f"solver {choice!r} is not JSON ({error.msg} at character {error.pos}).") from error
