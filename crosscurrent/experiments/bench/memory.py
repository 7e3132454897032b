"""Peak memory of one subject, in a process of its own: in a shared one all subjects would add to the same peak.

python -m crosscurrent.experiments.bench.memory '{"case": ..., "subject": ..., "conditions": {...}}'
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from crosscurrent.experiments.bench.case import Case, Conditions, Subject, Workload

RUNS = 2  # the second meets gradients and buffers that the first has left
# What glibc does with freed memory by default depends on the order of sizes; with a fixed threshold it gives large
# blocks back at once, so that the resident memory follows what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


def peak_memory(case: Case, subject: str, conditions: Conditions) -> int | None:
    """Bytes that a subject needs at most, its weights included.

    On a CPU: by how much the peak of the process's resident memory has risen since the same subject ran at size
    "tiny", which has loaded all libraries. On a GPU: the most that PyTorch has allocated.

    Returns:
        None where the operating system keeps no such count (Windows).

    Raises:
        ValueError: the process failed; the message ends with what it said.
    """
    asked = {"case": case.name, "subject": subject, "conditions": asdict(conditions)}
    finished = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(asked)],
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
    _run(tiny)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _run(real)
        return torch.cuda.max_memory_allocated() - before
    peak = _peak_resident()
    _run(real)
    after = _peak_resident()
    return None if peak is None or after is None else after - peak


def _run(build: Callable[[], Workload]) -> None:
    workload = build()
    for _ in range(RUNS):
        workload.run()


def _peak_resident() -> int | None:
    try:
        import resource
    except ModuleNotFoundError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    from crosscurrent.experiments.bench import find_case

    asked = json.loads(sys.argv[1])
    case, conditions = find_case(asked["case"]), Conditions(**asked["conditions"])
    if conditions.threads is not None:
        torch.set_num_threads(conditions.threads)

    def build(which: Conditions) -> Callable[[], Workload]:
        subjects: list[Subject] = case.subjects(which, case.sizes[which.size])
        return next(subject.build for subject in subjects if subject.name == asked["subject"])

    print(json.dumps(peak_of(build(replace(conditions, size="tiny")), build(conditions), conditions.device)))


if __name__ == "__main__":
    main()
