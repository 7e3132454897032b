"""What to do with a step whose loss or gradient is not as it should be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

MOST_SKIPS = 10  # in a row: then it is no accident


@dataclass(frozen=True)
class StepGuard:
    """Looks at a step before it reaches the weights.

    Args:
        nonfinite: a loss or gradient that is NaN or infinite: "stop", or "skip" the step.
        spike: a loss far above those before it: "ignore", "skip" or "stop".
        spike_factor: times the median of the losses before it.
        spike_window: of how many losses; there is no spike before so many steps.

    Raises:
        ValueError: the factor is not above 1, or the window is below 2.

    Example:
        >>> guard = StepGuard(spike="skip", spike_factor=2.0, spike_window=3)
        >>> guard.fault(5.0, 1.0, before=[2.0, 2.1, 1.9])
        ('skip', 'the loss is 5, 2.5 times the median of the 3 before it (2)')
        >>> guard.fault(3.0, 1.0, before=[2.0, 2.1, 1.9]) is None
        True
    """

    nonfinite: Literal["stop", "skip"] = "stop"
    spike: Literal["ignore", "skip", "stop"] = "ignore"
    spike_factor: float = 2.0
    spike_window: int = 100

    def __post_init__(self) -> None:
        if not self.spike_factor > 1:
            raise ValueError(f"spike_factor={self.spike_factor} is not allowed: give a number above 1.")
        if self.spike_window < 2:
            raise ValueError(f"spike_window={self.spike_window} is not allowed: give at least 2.")

    def fault(self, loss: float, grad_norm: float, before: Sequence[float]) -> tuple[str, str] | None:
        """What is to be done about a step, "skip" or "stop", and why; None if it is as it should be.

        Args:
            loss: of the step, over all processes.
            grad_norm: before clipping.
            before: the losses of the steps before it that were made, the last ones at the end.
        """
        if not math.isfinite(loss):
            return self.nonfinite, f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return self.nonfinite, f"the norm of the gradients is {grad_norm}, of a loss of {loss:.6g}"
        window = before[-self.spike_window :]
        if self.spike == "ignore" or len(window) < self.spike_window:
            return None
        usual = median(window)
        if loss <= self.spike_factor * usual:
            return None
        return self.spike, (
            f"the loss is {loss:.6g}, {loss / usual:.3g} times the median of the {len(window)} before it ({usual:.6g})"
        )
