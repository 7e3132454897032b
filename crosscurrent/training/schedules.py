"""Curricula: settings that change in the course of training, as pure functions of the step."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from crosscurrent.models.rlt import RLTForCausalLM
from crosscurrent.recurrence import Schedule


@dataclass(frozen=True)
class Steps:
    """A value that holds from a step on, until the next one does.

    Args:
        points: (step, value) pairs; the first step is 0 and the steps rise.

    Raises:
        ValueError: the steps do not rise from 0.

    Example:
        >>> interval = Steps([(0, 16), (100, 4), (200, 1)])
        >>> [interval(step) for step in (0, 99, 100, 5000)]
        [16, 16, 4, 1]
    """

    points: Sequence[tuple[int, Any]]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.points]
        if any(type(start) is not int for start in starts):
            raise ValueError(f"the steps {starts} are not allowed: they are integers.")
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"the steps {starts} are not allowed: they start at 0 and rise.")

    def __call__(self, step: int) -> Any:
        if step < 0:
            raise ValueError(f"step={step} is not allowed: steps are counted from 0.")
        return self.points[bisect_right([start for start, _ in self.points], step) - 1][1]


@dataclass(frozen=True)
class Ramp:
    """A value that goes in a straight line from one number to another, and stays there.

    Args:
        first, last: the values at step 0 and from step `num_steps` on.
        num_steps: at least 1.

    Raises:
        ValueError: num_steps is below 1, or a value is not finite.

    Example:
        >>> length = Ramp(4, 32, 100)
        >>> [length(step) for step in (0, 50, 100, 5000)]
        [4.0, 18.0, 32.0, 32.0]
    """

    first: float
    last: float
    num_steps: int

    def __post_init__(self) -> None:
        if type(self.num_steps) is not int or self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps!r} is not allowed: give an integer of at least 1.")
        if not math.isfinite(self.last - self.first):
            raise ValueError(f"a ramp from {self.first} to {self.last} is not allowed: give finite numbers.")

    def __call__(self, step: int) -> float:
        share = min(step / self.num_steps, 1.0)
        return self.first + share * (self.last - self.first)


def set_feedback(model: PreTrainedModel, feedback_interval: int | None, feedback_scale: float | None) -> None:
    """Let a recurrent model read the state at another interval, or at another strength (RLT), from now on.

    Raises:
        ValueError: the model has no such setting.
    """
    if feedback_interval is not None:
        if getattr(model.config, "feedback_interval", None) is None:
            raise ValueError(f"{type(model).__name__} has no feedback: an interval of it cannot change.")
        Schedule(feedback_interval)  # refuses what is no interval
        model.config.feedback_interval = feedback_interval
    if feedback_scale is not None:
        if not isinstance(model, RLTForCausalLM) or model.config.feedback_interval is None:
            raise ValueError(f"{type(model).__name__} has no feedback_scale that could change.")
        model.set_feedback_scale(feedback_scale)
