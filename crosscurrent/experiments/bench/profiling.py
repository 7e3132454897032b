"""Where the time of each subject goes, operation by operation."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from crosscurrent.experiments.bench.case import Case, Conditions, UnavailableError

MOST_OPERATIONS = 15


def profile_case(case: Case, conditions: Conditions, trace: Path | None = None) -> Iterator[str]:
    """Profile one run of each subject, after one that warms up.

    Args:
        case, conditions: as in `run_case`.
        trace: also write what happened when, for chrome://tracing or Perfetto: NAME.json becomes NAME-CASE-SUBJECT.json.

    Yields:
        A table for each subject: its operations that took longest themselves.
    """
    if conditions.threads is not None:
        torch.set_num_threads(conditions.threads)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if conditions.device == "cuda" else [])
    for subject in case.subjects(conditions, case.sizes[conditions.size]):
        title = f"{case.name}: {subject.name}"
        try:
            workload = subject.build()
        except UnavailableError as error:
            yield f"{title}: {error}"
            continue
        workload.run()
        with profile(activities=activities) as profiler:
            workload.run()
        if trace is not None:
            profiler.export_chrome_trace(str(trace.with_name(f"{trace.stem}-{_file_name(title)}.json")))
        order = f"self_{conditions.device}_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=MOST_OPERATIONS, max_name_column_width=48)
        yield f"{title}\n{table}"


def _file_name(title: str) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in title.lower()).split()
    return "-".join(words)
