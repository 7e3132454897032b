"""How long something takes, and subjects taking turns so that what else the machine does meets all of them."""

import time
from collections.abc import Callable, Mapping
from statistics import quantiles

import torch
from tqdm import tqdm

WARM_UPS = 1  # rounds that are not counted


def now(device: str) -> float:
    """Seconds on a clock, once all work given to the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], object], device: str) -> float:
    started = now(device)
    work()
    return now(device) - started


def paired_rounds(runs: Mapping[str, Callable[[], float]], repeats: int, label: str) -> dict[str, list[float]]:
    """Let all subjects take turns. Each round begins with another one.

    Args:
        runs: each does its work once and returns its seconds.
        repeats: rounds, beside one that warms up.
        label: of the progress bar.

    Returns:
        Seconds of every round: entries at one place belong together.

    Example:
        >>> paired_rounds({"a": lambda: 1.0, "b": lambda: 2.0}, repeats=2, label="example")
        {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    names = list(runs)
    found: dict[str, list[float]] = {name: [] for name in names}
    with tqdm(total=(WARM_UPS + repeats) * len(names), desc=label, unit="run", leave=False) as bar:
        for place in range(WARM_UPS + repeats):
            first = place % max(len(names), 1)
            for name in names[first:] + names[:first]:
                seconds = runs[name]()
                if place >= WARM_UPS:
                    found[name].append(seconds)
                bar.update()
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles.

    Example:
        >>> spread([3.0, 1.0, 2.0])
        {'median': 2.0, 'lower_quartile': 1.5, 'upper_quartile': 2.5}
    """
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}
