"""Generated problems, one file each; the sequence tasks are registered by name."""

from crosscurrent.tasks.registry import get_task, register_task, task_names
from crosscurrent.tasks.task import IGNORED, Example, Layout, Lengths, Task

__all__ = ["IGNORED", "Example", "Layout", "Lengths", "Task", "get_task", "register_task", "task_names"]
