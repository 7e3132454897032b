"""The solvers by name, so that a model's configuration can hold one."""

from dataclasses import asdict
from typing import Any, ClassVar, Protocol

from crosscurrent.recurrence.gradients import from_settings, gradient_from_dict, gradient_to_dict
from crosscurrent.recurrence.jacobi import Jacobi
from crosscurrent.recurrence.problem import Problem, Solution
from crosscurrent.recurrence.sequential import Sequential
from crosscurrent.recurrence.sweeps import Sweeps


class Solver(Protocol):
    """How the coupled equations of a call are solved. A new solver joins by a line in `SOLVERS`."""

    name: ClassVar[str]

    def solve(self, problem: Problem) -> Solution: ...


SOLVERS: dict[str, Any] = {solver.name: solver for solver in (Sequential, Jacobi, Sweeps)}


def solver_to_dict(solver: Solver) -> dict[str, Any]:
    """A solver as plain data.

    Example:
        >>> solver_to_dict(Sequential())
        {'name': 'sequential', 'truncate': None, 'recompute_every': None}
    """
    data = {"name": solver.name} | asdict(solver)  # type: ignore[call-overload]
    gradient = getattr(solver, "gradient", None)
    return data if gradient is None else data | {"gradient": gradient_to_dict(gradient)}


def solver_from_dict(data: dict[str, Any]) -> Solver:
    """The solver that `data` describes.

    Raises:
        ValueError: the name or a setting is unknown, or a setting's value is not allowed.

    Example:
        >>> solver_from_dict({"name": "jacobi", "iterations": 8}) == Jacobi(iterations=8, backward_iterations=4)
        True
        >>> solver_from_dict({"name": "jacobi", "iterations": 3, "gradient": {"name": "implicit"}}).gradient
        Implicit(iterations=2, tolerance=None)
    """
    settings = dict(data)
    if isinstance(settings.get("gradient"), dict):
        settings["gradient"] = gradient_from_dict(settings["gradient"])
    solver: Solver = from_settings("solver", SOLVERS, settings)
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
