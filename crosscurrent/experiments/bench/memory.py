"""Peak memory of one subject, in a process of its own: in a shared one all subjects would add to the same peak."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from crosscurrent.experiments.bench.case import Case, Conditions, Subject, Workload

STATUS = Path("/proc/self/status")  # Linux
# What glibc does with freed memory by default depends on the order of sizes; with a fixed threshold it gives large
# blocks back at once, so that the resident memory follows what is in use. A lower one costs much time.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}


def peak_memory(case: Case, subject: str, conditions: Conditions) -> int | None:
    """Bytes that a subject needs at most, its weights included.

    On a CPU: the peak of the process's resident memory, less what was resident after the same subject had run at size
    "tiny", which has loaded all libraries. On a GPU: the most that PyTorch has allocated.

    Returns:
        None on a CPU where the system is not Linux.

    Raises:
        ValueError: the process failed; the message ends with what it said.
    """
    asked = {"case": case.name, "subject": subject, "conditions": asdict(conditions)}
    finished = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import report; report()", json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ALLOCATOR,
    )
    if finished.returncode:
        said = finished.stderr.strip().splitlines()
        raise ValueError(f"{case.name}, {subject}: measuring its memory failed: {said[-1] if said else 'killed'}")
    return json.loads(finished.stdout.splitlines()[-1])


def peak_of(tiny: Callable[[], Workload], real: Callable[[], Workload], device: str) -> int | None:
    """What `peak_memory` measures, in this process."""
    tiny().run()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        real().run()
        return torch.cuda.max_memory_allocated() - allocated
    before = _resident("VmRSS")
    real().run()
    peak = _resident("VmHWM")
    return None if before is None or peak is None else peak - before


def _resident(which: str) -> int | None:
    """Bytes resident now (VmRSS) or at most so far (VmHWM).

    The system's count of the peak, not `resource.getrusage`: that begins with the peak of the process that started this one.
    """
    if not STATUS.exists():
        return None
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{which}:")]
    return int(line.split()[1]) * 1024


def report() -> None:
    """Print the peak of the subject that the command line names, as JSON: what the process of its own does."""
    from crosscurrent.experiments.bench import find_case

    asked = json.loads(sys.argv[1])
    case, conditions = find_case(asked["case"]), Conditions(**asked["conditions"])
    if conditions.threads is not None:
        torch.set_num_threads(conditions.threads)

    def build(which: Conditions) -> Callable[[], Workload]:
        subjects: list[Subject] = case.subjects(which, case.sizes[which.size])
        return next(subject.build for subject in subjects if subject.name == asked["subject"])

    print(json.dumps(peak_of(build(replace(conditions, size="tiny")), build(conditions), conditions.device)))
