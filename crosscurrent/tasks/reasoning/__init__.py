"""Reasoning tasks: questions in natural or formal language, one file each."""

from crosscurrent.tasks.reasoning.registry import get_reasoning_task, reasoning_task_names
from crosscurrent.tasks.reasoning.task import Problem, ReasoningTask, Verdict

__all__ = ["Problem", "ReasoningTask", "Verdict", "get_reasoning_task", "reasoning_task_names"]
