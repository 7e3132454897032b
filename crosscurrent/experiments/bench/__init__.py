"""Benchmarks: how long the models take, and how much memory, in ratios formed within one run."""

from crosscurrent.experiments.bench.case import Case, Conditions, Ratio, Subject, UnavailableError, Workload
from crosscurrent.experiments.bench.facts import environment
from crosscurrent.experiments.bench.fusion import FUSION
from crosscurrent.experiments.bench.peer import RLT_DECODE, RLT_PEER_STEP
from crosscurrent.experiments.bench.rlt import RLT_PREFILL, RLT_STEP
from crosscurrent.experiments.bench.running import run_case
from crosscurrent.experiments.bench.t2mlr import T2MLR_DECODE, T2MLR_PREFILL, T2MLR_STEP
from crosscurrent.suggestions import did_you_mean

CASES: dict[str, Case] = {
    case.name: case
    for case in (RLT_STEP, RLT_PEER_STEP, RLT_DECODE, RLT_PREFILL, T2MLR_STEP, T2MLR_DECODE, T2MLR_PREFILL, FUSION)
}


def find_case(name: str) -> Case:
    """The case of a name.

    Raises:
        ValueError: there is none; the message says which there are.

    Example:
        >>> find_case("rlt-step").unit
        'step'
    """
    if name not in CASES:
        raise ValueError(f"there is no benchmark {name!r}.{did_you_mean(name, CASES)} There are: {', '.join(CASES)}.")
    return CASES[name]


__all__ = [
    "CASES",
    "Case",
    "Conditions",
    "Ratio",
    "Subject",
    "UnavailableError",
    "Workload",
    "environment",
    "find_case",
    "run_case",
]
