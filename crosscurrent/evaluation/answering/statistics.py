"""What records of outputs add up to, and how sure that is.

All intervals are of the bootstrap: problems are drawn anew with replacement, 10,000 times, always with the same random
numbers; the middle 95 % of the resulting means are the interval. It covers whatever is a mean over problems: shares, F1,
pass@k, paired differences. Where all values are equal it has no width, however few they are.

Shapes: N problems, S outputs of each, M figures of each problem, D draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosscurrent.evaluation.answering.records import Record

Values = NDArray[np.float64]

NUM_DRAWS = 10_000
_AT_ONCE = 250  # draws, which bounds the memory
_MIDDLE = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % interval."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """As plain values."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Comparison:
    """Two models on the same problems.

    Attributes:
        metric: that was compared.
        difference: the mean over problems of the score less the baseline's, with its paired interval.
        share_not_better: of the draws, those whose difference is 0 or less. Small: it is better. 1.0 if all scores agree.
        num_better, num_worse: problems whose score is above, and below, the baseline's.
    """

    metric: str
    difference: Estimate
    share_not_better: float
    num_better: int
    num_worse: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        others = {name: getattr(self, name) for name in ("metric", "share_not_better", "num_better", "num_worse")}
        return {"difference": self.difference.to_dict(), **others}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """What the records add up to, as plain values.

    Args:
        records: of at least one problem, with as many outputs for each.

    Returns:
        num_problems, num_samples; `metrics`: each one's mean over outputs and interval; `pass_at_k`, if there are several
        outputs and the first metric is right or wrong; parse_failure_rate and truncation_rate, of the outputs that were
        written; num_too_long: problems whose prompt is longer than the context, which count as wrong; num_new_tokens,
        seconds and tokens_per_second of generation (None if nothing was written).

    Raises:
        ValueError: there is no record, or a problem has more outputs than another.
    """
    scores = scores_by_problem(records)
    metrics = list(scores)
    main = scores[metrics[0]]
    written = [record for record in records if not record.is_too_long]
    seconds = sum(record.seconds for record in written)
    num_new_tokens = sum(record.num_new_tokens for record in written)
    estimates = estimate(np.stack([scores[metric].mean(axis=1) for metric in metrics], axis=1))
    found: dict[str, Any] = {
        "num_problems": len(main),
        "num_samples": main.shape[1],
        "metrics": {metric: one.to_dict() for metric, one in zip(metrics, estimates, strict=True)},
        "parse_failure_rate": _share([record.parsed is None for record in written]),
        "truncation_rate": _share([record.is_truncated for record in written]),
        "num_too_long": sum(record.is_too_long for record in records) // main.shape[1],
        "num_new_tokens": num_new_tokens,
        "seconds": seconds,
        "tokens_per_second": num_new_tokens / seconds if seconds > 0 else None,
    }
    if main.shape[1] > 1 and bool(np.isin(main, (0, 1)).all()):
        found["pass_at_k"] = _pass_at_k(main)
    return found


def compare(records: Sequence[Record], baseline: Sequence[Record]) -> list[Comparison]:
    """The differences of two models' scores on the same problems, one for each metric.

    Both models met the same problems, some easy and some hard for both. So problems are drawn in pairs: what both have in
    common cancels out, and the interval is mostly narrower than those of the two scores would suggest.

    Raises:
        ValueError: they are not of the same problems, with as many outputs of each and the same metrics.

    Example::

        read = [read_answers(Path(folder) / "gsm8k.jsonl").records for folder in ("retrofitted", "base")]
        compare(*read)[0].difference
    """
    keys, others = ([(one.id, one.sample, one.answer) for one in each] for each in (records, baseline))
    if keys != others:
        place = next((i for i, pair in enumerate(zip(keys, others, strict=False)) if pair[0] != pair[1]), None)
        where = f"{len(keys)} outputs and {len(others)}" if place is None else f"{keys[place]} and {others[place]}"
        raise ValueError(
            f"the outputs are not of the same problems ({where}): compare finished ones of the same problems."
        )
    scores, base_scores = scores_by_problem(records), scores_by_problem(baseline)
    if scores.keys() != base_scores.keys():
        raise ValueError(f"the metrics differ ({', '.join(scores)} and {', '.join(base_scores)}): judge both alike.")
    return [_comparison(name, (scores[name] - base_scores[name]).mean(axis=1)) for name in scores]


def _comparison(metric: str, differences: Values) -> Comparison:
    means = bootstrap_means(differences[:, None])
    return Comparison(
        metric=metric,
        difference=_estimates(differences[:, None], means)[0],
        share_not_better=float((means <= 0).mean()),
        num_better=int((differences > 0).sum()),
        num_worse=int((differences < 0).sum()),
    )


def estimate(values: Values) -> list[Estimate]:
    """The mean over problems, with its interval, of each of M figures.

    Args:
        values: [N, M], a row for each problem.
    """
    return _estimates(values, bootstrap_means(values))


def _estimates(values: Values, means: Values) -> list[Estimate]:
    low, high = np.percentile(means, _MIDDLE, axis=0)
    return [Estimate(float(a), float(b), float(c)) for a, b, c in zip(values.mean(axis=0), low, high, strict=True)]


def bootstrap_means(values: Values, num_draws: int = NUM_DRAWS, seed: int = 0) -> Values:
    """Means [D, M] of problems drawn with replacement from values [N, M], the same ones for all M."""
    random = np.random.default_rng(seed)
    parts = [min(_AT_ONCE, num_draws - start) for start in range(0, num_draws, _AT_ONCE)]
    # Summed draw by draw in the order of the problems, so that equal values have exactly equal means.
    return np.concatenate(
        [values[random.integers(len(values), size=(part, len(values)))].mean(axis=1) for part in parts]
    )


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that one of k outputs is right, estimated without bias from n outputs of which c are right:
    1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n.
        num_right: c.
        k: from 1 to n.

    Raises:
        ValueError: k is not from 1 to n.

    Example:
        >>> pass_at_k(num_samples=4, num_right=1, k=2)
        0.5
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} is not allowed: give 1 to {num_samples}, the number of outputs.")
    if num_samples - num_right < k:
        return 1.0
    missed = np.arange(num_samples - num_right + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / missed))


def _pass_at_k(right: Values) -> dict[str, dict[str, float]]:
    """For k = 1, 2, 4, ... and S."""
    num_samples = right.shape[1]
    ks = sorted({2**power for power in range(num_samples.bit_length()) if 2**power < num_samples} | {num_samples})
    values = np.array([[pass_at_k(num_samples, int(count), k) for k in ks] for count in right.sum(axis=1)])
    return {str(k): one.to_dict() for k, one in zip(ks, estimate(values), strict=True)}


def scores_by_problem(records: Sequence[Record]) -> dict[str, Values]:
    """Each metric's scores [N, S].

    Raises:
        ValueError: there is no record, or a problem has more outputs than another.
    """
    by_problem: dict[str, list[Record]] = {}
    for record in records:
        by_problem.setdefault(record.id, []).append(record)
    counts = {len(outputs) for outputs in by_problem.values()}
    if len(counts) != 1:
        raise ValueError(
            "there is no record."
            if not counts
            else f"problems have from {min(counts)} to {max(counts)} outputs: finish the evaluation first."
        )
    return {
        metric: np.array(
            [[output.scores[metric] for output in outputs] for outputs in by_problem.values()], dtype=float
        )
        for metric in records[0].scores
    }


def _share(flags: list[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
