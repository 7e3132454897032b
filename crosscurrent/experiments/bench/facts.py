"""What a measurement was made with and on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from crosscurrent.experiments.bench.case import Conditions
from crosscurrent.version import __version__


def environment(conditions: Conditions) -> dict[str, Any]:
    """Versions, machine and conditions, as the results keep them.

    Example:
        >>> environment(Conditions())["dtype"]
        'float32'
    """
    return {
        "crosscurrent": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if conditions.device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "device": conditions.device,
        "dtype": conditions.dtype,
        "size": conditions.size,
    }


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
