"""A case from start to end: build its subjects, let them take turns, measure their memory, form the ratios."""

import gc
from typing import Any

import torch
from tqdm import tqdm

from crosscurrent.experiments.bench.case import Case, Conditions, Ratio, Subject, UnavailableError, Workload
from crosscurrent.experiments.bench.memory import peak_memory
from crosscurrent.experiments.bench.timing import paired_rounds, spread


def run_case(
    case: Case, conditions: Conditions, *, repeats: int | None = None, with_memory: bool = True
) -> dict[str, Any]:
    """Measure a case.

    Args:
        case: which.
        conditions: under what.
        repeats: rounds to measure. None: the case's own number.
        with_memory: measure peak memory too, if the case has it.

    Returns:
        What `--json` prints of a case: name, summary, unit, sizes, rounds; of each subject the seconds of every round,
        their median and quartiles, num_parameters, peak_memory (bytes or None) and unavailable (why it has no figures,
        or None); of each ratio the median and quartiles over the rounds, reach, and is_reached
        (None unless the size is "standard", which what is to be reached is stated for).

    Raises:
        ValueError: there is no such device.

    Example:
        >>> from crosscurrent.experiments.bench import find_case
        >>> result = run_case(find_case("rlt-prefill"), Conditions(size="tiny"), repeats=1)
        >>> [subject["name"] for subject in result["subjects"]]
        ['prefill, Sequential', 'prefill, Jacobi to 1e-6', 'token by token']
    """
    if conditions.threads is not None:
        torch.set_num_threads(conditions.threads)
    figures = case.sizes[conditions.size]
    subjects = case.subjects(conditions, figures)
    workloads, missing = _build(subjects)
    counts = {name: sum(p.numel() for p in workload.model.parameters()) for name, workload in workloads.items()}
    times = paired_rounds(
        {name: workload.run for name, workload in workloads.items()}, repeats or case.repeats, case.name
    )
    workloads.clear()
    gc.collect()  # the memory processes should have the machine's memory to themselves
    memory: dict[str, int | None] = {}
    if case.has_memory and with_memory:
        for name in tqdm(times, desc=f"{case.name}: memory", unit="subject", leave=False):
            memory[name] = peak_memory(case, name, conditions)
    return {
        "name": case.name,
        "summary": case.summary,
        "unit": case.unit,
        "sizes": dict(figures),
        "rounds": repeats or case.repeats,
        "subjects": [
            {
                "name": subject.name,
                "seconds": times.get(subject.name, []),
                **(spread(times[subject.name]) if subject.name in times else {}),
                "num_parameters": counts.get(subject.name),
                "peak_memory": memory.get(subject.name),
                "unavailable": missing.get(subject.name),
            }
            for subject in subjects
        ],
        "ratios": [_ratio(ratio, times, memory, conditions) for ratio in case.ratios(figures)],
    }


def _build(subjects: list[Subject]) -> tuple[dict[str, Workload], dict[str, str]]:
    """What can be measured, and why the rest cannot."""
    workloads, missing = {}, {}
    for subject in subjects:
        try:
            workloads[subject.name] = subject.build()
        except UnavailableError as error:
            missing[subject.name] = str(error)
    return workloads, missing


def _ratio(
    ratio: Ratio, times: dict[str, list[float]], memory: dict[str, int | None], conditions: Conditions
) -> dict[str, Any]:
    values = []
    if ratio.quantity == "memory":
        over, under = memory.get(ratio.over), memory.get(ratio.under)
        if over is not None and under:
            values = [over / under]
    elif ratio.over in times and ratio.under in times:
        values = [a / b for a, b in zip(times[ratio.over], times[ratio.under], strict=True)]
    found: dict[str, Any] = {
        "over": ratio.over,
        "under": ratio.under,
        "quantity": ratio.quantity,
        **(spread(values) if values else {"median": None, "lower_quartile": None, "upper_quartile": None}),
        "reach": ratio.reach or None,
    }
    is_judged = ratio.has_reach and found["median"] is not None and conditions.size == "standard"
    return found | {"is_reached": ratio.is_reached_by(found["median"]) if is_judged else None}
