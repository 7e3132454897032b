"""How fast a training goes, and how much memory it takes."""

import platform
import resource
import time
from typing import Any

import torch

from crosscurrent.training.flops import StepFlops, peak_flops, step_flops


class Throughput:
    """Measures steps from the moment that their data is asked for.

    Args:
        model: what is trained, before it is wrapped.
        num_rows: of a step, over all processes.
        sequence_length: of each row.
        num_processes: that share a step.
        dtype: of the products.

    Example::

        throughput = Throughput(model, num_rows=256, sequence_length=2048, num_processes=8, dtype=torch.bfloat16)
        throughput.start()
        ...
        throughput.values()  # {"throughput/tokens_per_second": ..., ...}
    """

    def __init__(self, model: Any, num_rows: int, sequence_length: int, num_processes: int, dtype: torch.dtype):
        self.model, self.num_rows, self.sequence_length = model, num_rows, sequence_length
        self.num_processes = num_processes
        is_gpu = torch.cuda.is_available()
        self.peak = peak_flops(torch.cuda.get_device_name(), dtype) if is_gpu else None
        self._flops: dict[Any, StepFlops | None] = {}
        self._started = time.perf_counter()

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def values(self) -> dict[str, float]:
        """Of the step that has just ended.

        `throughput/`: tokens_per_second, data and padding included; model_tflops, of the model without recurrence, a
        second and process; recurrence_tflops, what the recurrence adds to them (both if the model's operations can be
        counted). Where the device's peak is known: mfu, the share of it that the model without recurrence makes use of, and
        mfu_with_recurrence. `memory/peak_gib`: of this process, on its GPU if it has one.
        """
        seconds = time.perf_counter() - self._started
        values = {
            "throughput/tokens_per_second": self.num_rows * self.sequence_length / seconds,
            "memory/peak_gib": _peak_bytes() / 2**30,
        }
        flops = self._step_flops()
        if flops is not None:
            rate = 1e-12 / seconds / self.num_processes
            values["throughput/model_tflops"] = flops.model * rate
            values["throughput/recurrence_tflops"] = flops.recurrence * rate
            if self.peak is not None:
                values["throughput/mfu"] = flops.model * rate * 1e12 / self.peak
                values["throughput/mfu_with_recurrence"] = flops.total * rate * 1e12 / self.peak
        return {name: float(f"{value:.6g}") for name, value in values.items()}

    def _step_flops(self) -> StepFlops | None:
        """Counted once for each interval of a curriculum; None for kinds of models that cannot be counted."""
        interval = getattr(self.model.config, "feedback_interval", None)
        if interval not in self._flops:
            try:
                self._flops[interval] = step_flops(self.model, self.num_rows, self.sequence_length)
            except ValueError:
                self._flops[interval] = None
        return self._flops[interval]


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
