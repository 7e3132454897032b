"""The tables that `crosscurrent evaluate` prints of reasoning tasks."""

from typing import Any


def answer_table(facts: dict[str, Any]) -> str:
    """Scores of each task, and the differences to a baseline if there is one.

    Args:
        facts: as scores.json holds them.
    """
    tasks = facts["tasks"]
    width = max(14, *map(len, tasks)) + 1
    lines = [
        _model_line(facts),
        "",
        f"{'task':<{width}}{'problems':>9}  {'metric':<14}{'score':>8}{'95 % interval':>19}{'no answer':>11}{'cut off':>9}"
        f"{'too long':>10}{'tokens/s':>10}",
    ]
    for name, found in tasks.items():
        for place, (metric, score) in enumerate(_scores(found)):
            first = f"{name:<{width}}{found['num_problems']:>9,}" if place == 0 else " " * (width + 9)
            lines.append(f"{first}  {metric:<14}{_figures(score)}{_outputs(found) if place == 0 else ''}".rstrip())
    lines += ["", _asked(tasks)]
    if any("comparison" in found for found in tasks.values()):
        lines += ["", *_comparison(tasks, width)]
    return "\n".join(lines)


def _model_line(facts: dict[str, Any]) -> str:
    recurrence = next(iter(facts["tasks"].values()))["recurrence"]
    how = "no recurrence"
    if recurrence is not None:
        prompts = "recurrent" if recurrence["prompt_recurrence"] else "not recurrent"
        how = f"solver {recurrence['solver']['name']}, prompts {prompts}"
    return f"{facts['model']}: {facts['model_class']}, {facts['num_parameters']:,} parameters, {facts['dtype']}, {how}"


def _scores(found: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    passes = found.get("pass_at_k", {})
    return [*found["metrics"].items(), *((f"pass@{k}", score) for k, score in passes.items())]


def _figures(score: dict[str, float], sign: str = "") -> str:
    interval = f"[{score['low']:{sign}.1%}, {score['high']:{sign}.1%}]"
    return f"{score['mean']:>{sign}8.2%}{interval:>19}"


def _outputs(found: dict[str, Any]) -> str:
    speed = found["tokens_per_second"]
    rates = f"{_share(found['parse_failure_rate']):>11}{_share(found['truncation_rate']):>9}"
    return f"{rates}{found['num_too_long']:>10,}{'' if speed is None else f'{speed:,.1f}':>10}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _asked(tasks: dict[str, Any]) -> str:
    settings = next(iter(tasks.values()))["settings"]
    lengths = sorted({found["settings"]["max_new_tokens"] for found in tasks.values()})
    length = f"at most {' or '.join(f'{each:,}' for each in lengths)} new tokens"
    if settings["temperature"] == 0:
        return f"greedy, {length}"
    return (
        f"{settings['num_samples']} outputs of each problem, temperature {settings['temperature']}, "
        f"top_p {settings['top_p']}, seed {settings['seed']}, {length}"
    )


def _comparison(tasks: dict[str, Any], width: int) -> list[str]:
    lines = [
        f"{'less the baseline':<{width}}{'':>9}  {'metric':<14}{'':>8}{'95 % interval':>19}{'better':>11}{'worse':>9}"
        f"{'not better':>12}"
    ]
    for name, found in tasks.items():
        for one in found["comparison"]["differences"]:
            lines.append(
                f"{name:<{width}}{found['num_problems']:>9,}  {one['metric']:<14}{_figures(one['difference'], '+')}"
                f"{one['num_better']:>11,}{one['num_worse']:>9,}{one['share_not_better']:>12.1%}"
            )
    lines += ["", "better, worse: problems; not better: share of the bootstrap's draws without a gain"]
    return lines
