"""What autograd functions leave aside for one another while a backward pass runs."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class PerBackwardPass(Generic[T]):
    """A value that each backward pass has for itself.

    Without this, what a pass left behind, because it failed or was asked for some of the gradients only, would be found by
    the next. Passes within passes, as checkpointing makes, end before the outer one goes on.

    Args:
        make: the value at the start of a pass.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._values: dict[int, T] = {}

    def value(self) -> T:
        """Of the backward pass that is running."""
        task = self._forget_ended()
        if task not in self._values:
            self._values[task] = self._make()
        return self._values[task]

    def take(self) -> T | None:
        """As `value`, which is forgotten then; None if nothing has asked for it."""
        return self._values.pop(self._forget_ended(), None)

    def _forget_ended(self) -> int:
        task = torch._C._current_graph_task_id()  # they are numbered upwards
        for later in [known for known in self._values if known > task]:
            del self._values[later]
        return task
