"""State-tracking stability: where finished runs begin to err, and why."""

from crosscurrent.experiments.stability.page import write_stability
from crosscurrent.experiments.stability.runs import measure_runs

__all__ = ["measure_runs", "write_stability"]
