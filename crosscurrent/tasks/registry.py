"""Tasks by name."""

from crosscurrent.suggestions import did_you_mean
from crosscurrent.tasks.addition import Addition, AdditionPlaces
from crosscurrent.tasks.modular import Mod5Brackets, Mod5Flat
from crosscurrent.tasks.parity import Parity
from crosscurrent.tasks.permutations import S5Standard, S5Swaps
from crosscurrent.tasks.s5_retrieval import S5Retrieval, S5RetrievalState
from crosscurrent.tasks.task import BOS, Task

_TASKS: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Make a task known by its name, to recipes and the command line.

    Raises:
        ValueError: the name is taken, or the task does not describe itself in full.

    Example::

        register_task(MyTask())
    """
    if not isinstance(task, Task):
        raise ValueError(f"{task!r} is not a task: give an object of a subclass of Task, as MyTask().")
    missing = [name for name in ("name", "vocabulary", "chance", "lengths") if not getattr(task, name, None)]
    if missing or not isinstance(task.name, str):
        raise ValueError(f"{type(task).__name__} needs {' and '.join(missing) or 'a name that is text'}.")
    if task.has_positions != (type(task).positions is not Task.positions):
        raise ValueError(f"{task.name} needs both or neither of has_positions = True and a method `positions`.")
    if BOS not in task.vocabulary or len(set(task.vocabulary)) < len(task.vocabulary):
        raise ValueError(f"the vocabulary of {task.name} needs {BOS!r}, and each symbol once.")
    if task.name in _TASKS:
        raise ValueError(f"there is a task named {task.name!r} already: choose another name.")
    _TASKS[task.name] = task
    return task


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ValueError: there is none; the message names the nearest, and all.

    Example:
        >>> get_task("parity").chance
        0.5
        >>> get_task("partiy")
        Traceback (most recent call last):
        ValueError: there is no task 'partiy'. Did you mean 'parity'? Tasks: addition, addition_places, ...
    """
    if not isinstance(name, str) or name not in _TASKS:
        raise ValueError(f"there is no task {name!r}.{did_you_mean(name, _TASKS)} Tasks: {', '.join(task_names())}.")
    return _TASKS[name]


def task_names() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(_TASKS)


for _task in (
    Parity,
    S5Standard,
    S5Swaps,
    Mod5Flat,
    Mod5Brackets,
    Addition,
    AdditionPlaces,
    S5Retrieval,
    S5RetrievalState,
):
    register_task(_task())
