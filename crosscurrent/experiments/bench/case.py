"""What a benchmark is made of: subjects that take turns, and the ratios between them that are of interest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Size = Literal["tiny", "standard", "large"]
Dtype = Literal["float32", "bfloat16-autocast"]
Quantity = Literal["seconds", "memory"]


class UnavailableError(Exception):
    """A subject cannot be measured here. The message says how to get it."""


@dataclass(frozen=True)
class Conditions:
    """Under what a case is measured.

    Args:
        size: "standard": the sizes of the published comparisons. "tiny": only to see that a case works. "large":
            batches and lengths for a GPU.
        dtype: float32, or float32 weights under bfloat16 autocast. Cases that compare the two set their own.
        device: "cpu" or "cuda".
        threads: of PyTorch on the CPU. None: as many as it is set to.
    """

    size: Size = "standard"
    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int | None = None

    def autocast(self, dtype: Dtype | None = None) -> torch.autocast:
        """The context to run in: of the conditions, or of a dtype that a case sets."""
        return torch.autocast(self.device, torch.bfloat16, enabled=(dtype or self.dtype) == "bfloat16-autocast")


@dataclass(frozen=True)
class Workload:
    """A subject that is ready to be measured.

    Args:
        run: does the work once and returns the seconds that a unit of it took (see `timing`). What must be put back
            before each run is done by it too, outside of what it times.
        model: whose parameters are counted.
    """

    run: Callable[[], float]
    model: nn.Module


@dataclass(frozen=True)
class Subject:
    """Something to measure. `build` makes it, and may raise `UnavailableError`."""

    name: str
    build: Callable[[], Workload]


@dataclass(frozen=True)
class Ratio:
    """How much more one subject takes than another.

    Args:
        over, under: names of the two subjects.
        quantity: "seconds" or "memory".
        at_most, at_least: what it should reach; neither: it is only shown.

    Example:
        >>> Ratio("RLT-1", "RLT-0", at_most=1.3).is_reached_by(1.2)
        True
    """

    over: str
    under: str
    quantity: Quantity = "seconds"
    at_most: float | None = None
    at_least: float | None = None

    @property
    def has_reach(self) -> bool:
        return self.at_most is not None or self.at_least is not None

    @property
    def reach(self) -> str:
        """As tables show it; empty if there is none."""
        bounds = {"<=": self.at_most, ">=": self.at_least}
        return " and ".join(f"{sign} {bound:.2f}" for sign, bound in bounds.items() if bound is not None)

    def is_reached_by(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Args:
        name: as on the command line.
        summary: what is measured, in a line.
        unit: what the seconds are of: "step", "token", "prefill".
        sizes: the figures that make up each size.
        repeats: rounds that are measured unless told otherwise.
        has_memory: whether peak memory is measured too.
        subjects, ratios: given the conditions and the figures of their size.
    """

    name: str
    summary: str
    unit: str
    sizes: Mapping[Size, Mapping[str, Any]]
    repeats: int
    has_memory: bool
    subjects: Callable[[Conditions, Mapping[str, Any]], list[Subject]]
    ratios: Callable[[Mapping[str, Any]], list[Ratio]]
