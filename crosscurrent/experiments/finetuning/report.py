"""What came out of runs of fine-tuning, side by side: a table, a figure, and the same as JSON."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from crosscurrent.evaluation.answering import Comparison, Record, compare, read_answers, refuse_incomparable, summary
from crosscurrent.experiments.drawing import COLOURS, draw_scores, save_figure
from crosscurrent.experiments.finetuning.comparing import BASELINE, UNTOUCHED
from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.experiments.finetuning.run import FinetuneRunFolder
from crosscurrent.experiments.run_folder import refuse_other_versions
from crosscurrent.files import write_whole
from crosscurrent.suggestions import differences


@dataclass(frozen=True)
class Entry:
    """A model of a comparison.

    Attributes:
        model: a label, from the folder's name.
        recipe: of its first seed; of the untouched base, that of a run beside it.
        results: of its seeds, as `result.json` holds them; none of the untouched base.
        records: of all seeds together, a seed's outputs beside those of the others.
        seeds: which.
    """

    model: str
    recipe: FinetuneRecipe
    results: tuple[dict[str, Any], ...]
    records: tuple[Record, ...]
    seeds: tuple[int, ...]


def finetune_folders(paths: Sequence[Path]) -> list[FinetuneRunFolder]:
    """The folders of runs of fine-tuning among some folders, and in them."""
    files = sorted({file for path in paths for file in path.rglob("recipe.yaml")})
    return [FinetuneRunFolder(file.parent) for file in files if "problems:" in file.read_text("utf-8").splitlines()]


def read_comparisons(paths: Sequence[Path]) -> dict[Path, list[Entry]]:
    """The finished runs below some folders, by the folder that they are compared in: FOLDER/MODEL/seed-N.

    Raises:
        ValueError: no run is finished, or runs of a folder do not belong together (other versions, other problems, recipes
            that differ in more than the seed).
    """
    found: dict[Path, dict[str, list[FinetuneRunFolder]]] = {}
    for folder in finetune_folders(paths):
        if folder.is_done:
            found.setdefault(folder.path.parent.parent, {}).setdefault(folder.path.parent.name, []).append(folder)
    if not found:
        raise ValueError("no run of fine-tuning is finished yet: there is nothing to show.")
    return {path: _entries(path, models) for path, models in found.items()}


def _entries(path: Path, models: dict[str, list[FinetuneRunFolder]]) -> list[Entry]:
    entries = [_entry(name, folders) for name, folders in models.items()]
    first = next(iter(models.values()))[0]
    for folder in (folder for folders in models.values() for folder in folders):
        _refuse_other_problems(folder, first)
    untouched = path / UNTOUCHED / "answers.jsonl"
    if untouched.exists():
        answers = read_answers(untouched)
        refuse_incomparable(answers.header, read_answers(first.answers_file).header, str(first.path))
        if answers.is_complete:
            entries.append(Entry(UNTOUCHED, first.recipe(), (), tuple(answers.records), ()))
        else:
            tqdm.write(
                f"{untouched} is not finished and left out: `crosscurrent finetune` goes on with it.", file=sys.stderr
            )
    order = {entry.model: number for number, entry in enumerate(entries)}
    return sorted(
        entries, key=lambda entry: (entry.model == UNTOUCHED, entry.model.startswith(BASELINE), order[entry.model])
    )


def _refuse_other_problems(folder: FinetuneRunFolder, first: FinetuneRunFolder) -> None:
    """Raise ValueError if two runs were tested on other problems, or made with other versions or other data."""
    refuse_other_versions(f"{folder.path} was made", folder.versions(), first.versions())
    headers = [read_answers(one.answers_file).header for one in (folder, first)]
    refuse_incomparable(headers[0], headers[1], str(first.path))
    # Of files all runs read the same; generated problems follow from recipe and version.
    is_generated = folder.recipe().problems.task.is_generated
    if not is_generated and folder.versions().get("problems") != first.versions().get("problems"):
        raise ValueError(
            f"{folder.path} was made with other data than {first.path} (the files have changed): they cannot stand in one "
            "table. Delete the runs with the old data, and start again."
        )


def _entry(name: str, folders: list[FinetuneRunFolder]) -> Entry:
    """Seeds become samples: the k-th seed's outputs are the k-th outputs of each problem."""
    for folder in folders[1:]:
        first, other = (one.recipe().model_dump(exclude={"seed"}) for one in (folders[0], folder))
        differing = differences(first, other)
        if differing:
            raise ValueError(
                f"{folder.path} is of another recipe than {folders[0].path} ({'; '.join(differing[:3])}): they cannot stand "
                "in one table."
            )
    answers = [read_answers(folder.answers_file).records for folder in folders]
    return Entry(
        model=name,
        recipe=folders[0].recipe(),
        results=tuple(folder.result() for folder in folders),
        records=_side_by_side(answers),
        seeds=tuple(folder.recipe().seed for folder in folders),
    )


def _side_by_side(answers: Sequence[Sequence[Record]]) -> tuple[Record, ...]:
    """Outputs of several runs on the same problems, problem by problem."""
    per_problem: dict[str, list[Record]] = {}
    for records in answers:
        for record in records:
            outputs = per_problem.setdefault(record.id, [])
            outputs.append(replace(record, sample=len(outputs)))
    return tuple(record for outputs in per_problem.values() for record in outputs)


def difference(entry: Entry, baseline: Entry) -> Comparison:
    """Of the first metric, paired by problem; over seeds that both have, or the only output of a model without seeds.

    Raises:
        ValueError: they have no seed in common.
    """
    ours, theirs = _matched(entry, baseline)
    return compare(ours, theirs)[0]


def _matched(entry: Entry, other: Entry) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    if entry.seeds == other.seeds:
        return entry.records, other.records
    common = [seed for seed in entry.seeds if seed in other.seeds]
    if common:
        return _of_seeds(entry, common), _of_seeds(other, common)
    if entry.seeds and other.seeds:
        raise ValueError(
            f"{entry.model} (seeds {list(entry.seeds)}) and {other.model} (seeds {list(other.seeds)}) have no seed in "
            "common: run both with the same ones."
        )
    copies = max(len(entry.seeds), len(other.seeds))  # a model without seeds answers the same way each time
    return _repeated(entry, copies), _repeated(other, copies)


def _of_seeds(entry: Entry, seeds: list[int]) -> tuple[Record, ...]:
    per_seed = len({record.sample for record in entry.records}) // len(entry.seeds)
    kept = [
        place * per_seed + number for seed in seeds for place in [entry.seeds.index(seed)] for number in range(per_seed)
    ]
    return tuple(replace(record, sample=kept.index(record.sample)) for record in entry.records if record.sample in kept)


def _repeated(entry: Entry, copies: int) -> tuple[Record, ...]:
    return entry.records if entry.seeds else _side_by_side([entry.records] * copies)


def write_comparison(entries: Sequence[Entry], output: Path) -> list[Path]:
    """Write comparison.json, comparison.md, comparison.png and comparison.svg.

    Raises:
        OSError: something cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    rows = [facts_of(entry, entries) for entry in entries]
    write_whole(output / "comparison.json", json.dumps(rows, indent=2) + "\n")
    write_whole(output / "comparison.md", f"{_heading(entries, rows)}\n\n{table(rows)}\n\n{_legend(entries)}\n")
    _draw(rows, output / "comparison")
    return [output / f"comparison.{kind}" for kind in ("json", "md", "png", "svg")]


def _heading(entries: Sequence[Entry], rows: Sequence[dict[str, Any]]) -> str:
    asked = entries[0].recipe
    options = ", ".join(f"{name}={value}" for name, value in asked.problems.options.items())
    task = f"{asked.problems.name} ({options})" if options else asked.problems.name
    steps = f"{asked.training.method} fine-tuning, batches of {asked.training.batch_size}"
    return f"{task}: {asked.base.name}, {steps}, {rows[0]['num_problems']:,} test problems"


def _legend(entries: Sequence[Entry]) -> str:
    ranges = [
        f"{entry.model} recurs in layers [{entry.recipe.base.layer_start}, {entry.recipe.base.layer_end})"
        for entry in entries
        if entry.recipe.base.is_recurrent and entry.results
    ]
    columns = (
        'Scores and differences in %, with 95 % intervals over problems; "less X": the difference to X, paired by problem; '
        "seconds a step: the median; unparsed: no answer could be read; cut off: no end within the allowed tokens."
    )
    return f"{'; '.join(ranges)}. {columns}" if ranges else columns


def facts_of(entry: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    """What a model's row says, as plain values: sizes and times are means over seeds, scores have 95 % intervals."""
    found = summary(entry.records)
    metric = next(iter(found["metrics"]))
    others = [other for other in entries if _is_baseline(other.model) and other.model != entry.model]
    by_seed = [result["test"]["metrics"][metric]["mean"] for result in entry.results]
    return {
        "model": entry.model,
        "seeds": list(entry.seeds),
        "num_parameters": entry.results[0]["num_parameters"] if entry.results else None,
        "steps": entry.results[0]["steps"] if entry.results else 0,
        "seconds_per_step": _mean([result["seconds_per_step"] for result in entry.results]),
        "training_seconds": _mean([result["training_seconds"] for result in entry.results]),
        "validation_loss": _mean([result["validation_loss"] for result in entry.results]),
        "metric": metric,
        "metrics": found["metrics"],
        "by_seed": by_seed,
        "differences": {other.model: difference(entry, other).to_dict() for other in others},
        **{name: found[name] for name in ("num_problems", "parse_failure_rate", "truncation_rate", "num_too_long")},
    }


def _is_baseline(model: str) -> bool:
    """Whether a label is that of a model to be compared with."""
    return model.startswith((BASELINE, UNTOUCHED))


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    metric = rows[0]["metric"]
    against = [row["model"] for row in rows if _is_baseline(row["model"])]
    names = ["model", "seeds", "steps", "seconds a step", "validation loss", f"{metric} (%)"]
    names += [f"less {model}" for model in against] + ["unparsed (%)", "cut off (%)"]
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    for row in rows:
        cells = [
            row["model"],
            str(len(row["seeds"]) or "-"),
            str(row["steps"]),
            "-" if row["seconds_per_step"] is None else f"{row['seconds_per_step']:.2f}",
            "-" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}",
            _percent(row["metrics"][metric], sign=False),
            *(_percent(row["differences"].get(model, {}).get("difference"), sign=True) for model in against),
            f"{100 * (row['parse_failure_rate'] or 0):.1f}",
            f"{100 * (row['truncation_rate'] or 0):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(found: dict[str, float] | None, sign: bool) -> str:
    if found is None:
        return ""
    plus = "+" if sign else ""
    mean, low, high = (100 * found[name] for name in ("mean", "low", "high"))
    return f"{mean:{plus}.1f} [{low:{plus}.1f}, {high:{plus}.1f}]"


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """With a mark for each seed."""
    metric = rows[0]["metric"]
    figure = draw_scores(
        {row["model"]: row["metrics"][metric] for row in rows},
        {row["model"]: COLOURS[3 if _is_baseline(row["model"]) else 0] for row in rows},
        title=f"{rows[0]['num_problems']:,} problems; marks: single seeds",
        label=metric,
    )
    for place, row in enumerate(rows):
        if len(row["by_seed"]) > 1:
            figure.axes[0].plot(
                [100 * value for value in row["by_seed"]], [place] * len(row["by_seed"]), "|", color="0.3"
            )
    save_figure(figure, path)
