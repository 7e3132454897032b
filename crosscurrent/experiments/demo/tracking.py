"""Demonstration 1: a recurrent state follows parity far beyond the training lengths; attention alone is compared.

Two cells of the study `rlt/mini`, run and shown by the same pieces as the whole study.
"""

import json
from pathlib import Path
from typing import Any

from crosscurrent.experiments.aggregate import Collection, collect
from crosscurrent.experiments.drawing import save_figure
from crosscurrent.experiments.kinds import run_any
from crosscurrent.experiments.report.figures import draw_generalisation
from crosscurrent.experiments.report.tables import score_table
from crosscurrent.experiments.study import find_recipe
from crosscurrent.files import write_whole

MODELS = ("rlt-1-encoder-window-8", "transformer")


def run_tracking(output: Path, seed: int = 42, changes: dict[str, Any] | None = None) -> Collection:
    """Train a small RLT-1 and a Transformer on the same parities, score both, and save what was measured.

    Writes `tracking.png`, `tracking.svg` and `tracking.json` into the folder `output`, and the runs below `tracking/`. Runs
    that are there already are not done again.

    Args:
        output: the folder.
        seed: of the starting weights.
        changes: a part of a recipe, on top of both.

    Example::

        collection = run_tracking(Path("demo-output"), seed=1)
    """
    runs = output / "tracking" / f"seed-{seed}"
    for model in MODELS:
        _, recipe = find_recipe(f"rlt/mini/parity/{model}", {**(changes or {}), "seed": seed})
        run_any(recipe, runs / "parity" / model, model)
    collection = collect([runs])
    task = collection.runs[0].recipe.task
    trained = task.task.trained_range(task.train_lengths)
    figure = draw_generalisation(collection.scores("parity"), "parity", task.task.chance, trained, MODELS)
    save_figure(figure, output / "tracking")
    write_whole(output / "tracking.json", json.dumps(score_table(collection), indent=1) + "\n")
    return collection


def report(collection: Collection) -> str:
    """The measurements as a table, and one sentence that states them for the longest sequences."""
    recipe = collection.runs[0].recipe
    lengths, trained = recipe.task.test_lengths, recipe.task.train_lengths
    lines = [
        f"Parity of bit sequences. Both models: {recipe.training.max_steps} steps of {recipe.training.batch_size} "
        f"sequences, lengths {min(trained)}-{max(trained)}, every prefix supervised.",
        f"Final parity right, in % of {recipe.task.num_test} test sequences per length (chance "
        f"{recipe.task.task.chance:.0%}):",
        "",
        _row("model", "parameters", "seconds", [f"{length} bits" for length in lengths]),
    ]
    shares: dict[str, dict[int, float]] = {}
    for one in collection.finished:
        assert one.result is not None
        shares[one.model] = {length: 100 * one.result["test"][str(length)]["final"] for length in lengths}
        size, seconds = f"{one.result['num_parameters']:,}", f"{one.result['training_seconds']:.0f}"
        lines.append(_row(one.model, size, seconds, [f"{share:.1f}" for share in shares[one.model].values()]))
    longest = max(lengths)
    found = ", ".join(f"{model} {share[longest]:.1f} %" for model, share in shares.items())
    return "\n".join(
        [*lines, "", f"At {longest} bits, {longest / max(trained):.1f} times the longest training length: {found}."]
    )


def _row(name: str, parameters: str, seconds: str, scores: list[str]) -> str:
    return f"{name:<24}{parameters:>11}{seconds:>9}" + "".join(f"{score:>10}" for score in scores)
