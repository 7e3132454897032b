"""What autograd functions leave aside for one another while a backward pass runs."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.autograd import Variable

T = TypeVar("T")


class PerBackwardPass(Generic[T]):
    """A value that each backward pass has for itself, and that ends with it.

    Without this, what a pass left behind, because it was asked for some of the gradients only, would be found by the next.

    Args:
        make: the value at the start of a pass.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._values: dict[int, T] = {}

    def value(self) -> T:
        """Of the backward pass that is running."""
        task = torch._C._current_graph_task_id()
        if task not in self._values:
            self._values[task] = self._make()
            Variable._execution_engine.queue_callback(lambda: self._end(task))
        return self._values[task]

    def _end(self, task: int) -> None:
        self._values.pop(task, None)

    def take(self) -> T | None:
        """As `value`, which is forgotten then; None if nothing has asked for it."""
        return self._values.pop(torch._C._current_graph_task_id(), None)


def refuse_second_derivatives() -> None:
    """To be called first in a backward pass that leaves something aside, and so cannot be differentiated itself.

    Raises:
        RuntimeError: it is to be (`create_graph=True`).
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives (create_graph=True) are not available through the steps of a sequential solve. Solve with "
            "cc.Jacobi(iterations=T, backward_iterations=T), which is exact for T tokens, and with attention that has them: "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or attn_implementation='eager'."
        )
