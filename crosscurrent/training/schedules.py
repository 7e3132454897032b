"""Curricula: settings that change in the course of training, as pure functions of the step or of the losses so far."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Grown:
    """How far a `Growth` has come.

    Attributes:
        value: that holds now.
        num_steps: that it has held.
        smoothed: the smoothed loss of these steps; None before the first.
        is_complete: whether the loss has fallen below the threshold at the last value as well.
    """

    value: int
    num_steps: int = 0
    smoothed: float | None = None
    is_complete: bool = False


@dataclass(frozen=True)
class Growth:
    """A length that grows each time the smoothed loss falls below a threshold: what is learned decides, not the step.

    The smoothed loss begins anew with each value. It is an exponential moving average, whose first value is the first loss.

    Args:
        values: that it takes, rising.
        factor: the next value is the first that is so many times the one before, rounded down; or the last.
        loss_below: the threshold.
        smoothing: weight of the average so far when a loss is added.
        min_steps: a value holds for at least so many.

    Raises:
        ValueError: the values are not whole numbers that rise, the factor is not above 1, the threshold is not positive, the
            smoothing is not in [0, 1), or min_steps is below 1.

    Example:
        >>> growth = Growth((2, 3, 4, 6, 7, 8), factor=1.5, loss_below=0.1, smoothing=0.0, min_steps=1)
        >>> grown = growth.start()
        >>> for loss in (0.5, 0.09, 0.2, 0.05, 0.05):
        ...     grown = growth.after(grown, loss)
        >>> grown.value, grown.is_complete
        (6, False)
    """

    values: tuple[int, ...]
    factor: float
    loss_below: float
    smoothing: float = 0.9
    min_steps: int = 5

    def __post_init__(self) -> None:
        values = self.values
        if not values or any(type(value) is not int for value in values) or list(values) != sorted(set(values)):
            raise ValueError(f"values={list(values)} are not allowed: give integers that rise.")
        if type(self.min_steps) is not int or self.min_steps < 1:
            raise ValueError(f"min_steps={self.min_steps!r} is not allowed: give an integer of at least 1.")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor} is not allowed: give a finite number above 1.")
        if not 0 < self.loss_below < math.inf:
            raise ValueError(f"loss_below={self.loss_below} is not allowed: give a finite number above 0.")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing={self.smoothing} is not allowed: give a number from 0 to below 1.")

    def start(self) -> Grown:
        """Before any loss."""
        return Grown(self.values[0])

    def after(self, grown: Grown, loss: float) -> Grown:
        """How far it has come with one more loss."""
        before = loss if grown.smoothed is None else grown.smoothed
        smoothed = self.smoothing * before + (1 - self.smoothing) * loss
        grown = replace(grown, num_steps=grown.num_steps + 1, smoothed=smoothed)
        if not smoothed < self.loss_below or grown.num_steps < self.min_steps:
            return grown
        if grown.value == self.values[-1]:
            return replace(grown, is_complete=True)
        least = max(math.floor(min(grown.value * self.factor, self.values[-1])), grown.value + 1)
        return Grown(next((value for value in self.values if value >= least), self.values[-1]))


def set_feedback(
    model: PreTrainedModel,
    feedback_interval: int | None = None,
    feedback_scale: float | None = None,
    state_noise: float | None = None,
) -> None:
    """Let a recurrent model read the state at another interval, or an RLT at another strength or with other noise.

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
    if state_noise is not None:
        if not isinstance(model, RLTForCausalLM) or model.config.feedback_interval is None:
            raise ValueError(f"{type(model).__name__} has no state_noise that could change.")
        if not 0 <= state_noise < math.inf:
            raise ValueError(f"state_noise={state_noise} is not allowed: give a finite number of at least 0.")
        model.config.state_noise = state_noise
