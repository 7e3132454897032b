"""The solvers by name, so that a model's configuration can hold one."""

from dataclasses import asdict
from typing import Any, ClassVar, Protocol

from crosscurrent.recurrence.jacobi import Jacobi
from crosscurrent.recurrence.problem import Problem, Solution
from crosscurrent.recurrence.sequential import Sequential
from crosscurrent.suggestions import did_you_mean


class Solver(Protocol):
    """How the coupled equations of a call are solved. A new solver joins by a line in `SOLVERS`."""

    name: ClassVar[str]

    def solve(self, problem: Problem) -> Solution: ...


SOLVERS: dict[str, Any] = {solver.name: solver for solver in (Sequential, Jacobi)}


def solver_to_dict(solver: Solver) -> dict[str, Any]:
    """A solver as plain data.

    Example:
        >>> solver_to_dict(Sequential())
        {'name': 'sequential', 'truncate': None}
    """
    return {"name": solver.name} | asdict(solver)  # type: ignore[call-overload]


def solver_from_dict(data: dict[str, Any]) -> Solver:
    """The solver that `data` describes.

    Raises:
        ValueError: the name or a setting is unknown, or a setting's value is not allowed.

    Example:
        >>> solver_from_dict({"name": "jacobi", "iterations": 8})
        Jacobi(iterations=8, backward_iterations=4, tolerance=None, on_nonconvergence='record')
    """
    settings = dict(data)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in SOLVERS:
        raise ValueError(
            f"solver name {name!r} is not known: give one of {sorted(SOLVERS)}.{did_you_mean(name, SOLVERS)}"
        )
    known = SOLVERS[name].__dataclass_fields__
    for key in settings:
        if key not in known:
            raise ValueError(f"{name} has no setting {key!r}: it has {sorted(known)}.{did_you_mean(key, known)}")
    solver: Solver = SOLVERS[name](**settings)
    return solver


def as_solver(solver: Any) -> Solver:
    """The solver given as an object, or as data as a configuration holds it.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(solver, dict):
        return solver_from_dict(solver)
    if isinstance(solver, tuple(SOLVERS.values())):
        known: Any = solver
        return known
    raise ValueError(
        f"solver={solver!r} is not allowed: give an object such as cc.Jacobi(iterations=16, backward_iterations=4) or "
        'cc.Sequential(), or a dictionary {"name": ..., and its settings}.'
    )
