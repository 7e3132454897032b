"""Reasoning tasks by name."""

from dataclasses import fields
from typing import Any

from crosscurrent.suggestions import did_you_mean
from crosscurrent.tasks.reasoning.gsm8k import GSM8K, GSMAugEquations, GSMAugLanguage
from crosscurrent.tasks.reasoning.hotpotqa import Hotpotqa
from crosscurrent.tasks.reasoning.math500 import MATH500
from crosscurrent.tasks.reasoning.pathfinding import Pathfinding
from crosscurrent.tasks.reasoning.prosqa import Prosqa, ProsqaGenerated
from crosscurrent.tasks.reasoning.question_answer import QuestionAnswer
from crosscurrent.tasks.reasoning.task import ReasoningTask
from crosscurrent.tasks.reasoning.variable_assignment import VariableAssignment

_TASKS: dict[str, type[ReasoningTask]] = {
    task.name: task
    for task in (
        GSM8K,
        GSMAugEquations,
        GSMAugLanguage,
        MATH500,
        VariableAssignment,
        Pathfinding,
        Prosqa,
        ProsqaGenerated,
        Hotpotqa,
        QuestionAnswer,
    )
}


def reasoning_task_names() -> list[str]:
    """The names of all reasoning tasks, sorted.

    Example:
        >>> "variable_assignment" in reasoning_task_names()
        True
    """
    return sorted(_TASKS)


def get_reasoning_task(name: str, /, **options: Any) -> ReasoningTask:
    """The task of that name.

    Args:
        name: of a registered task.
        options: of the task, such as depth=5.

    Raises:
        ValueError: there is none of that name, or it has no such option, or not with that value.

    Example:
        >>> get_reasoning_task("variable_assignment", depth=5)
        VariableAssignment(depth=5)
        >>> get_reasoning_task("variable_asignment")
        Traceback (most recent call last):
        ValueError: there is no reasoning task 'variable_asignment'. Did you mean 'variable_assignment'? Tasks: ...
    """
    if not isinstance(name, str) or name not in _TASKS:
        raise ValueError(
            f"there is no reasoning task {name!r}.{did_you_mean(name, _TASKS)} Tasks: {', '.join(reasoning_task_names())}."
        )
    task = _TASKS[name]
    known = [option.name for option in fields(task)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            allowed = f"its options are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{name} has no option {option!r}.{did_you_mean(option, known)} ({allowed})")
    return task(**options)
