"""Where recurrence helps: one model's answers to the same problems, its carried state left alone, cut off or exchanged."""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from crosscurrent.evaluation.answering import AnsweringSettings, Record, Session, compare
from crosscurrent.evaluation.answering.generating import Writer
from crosscurrent.evaluation.answering.records import RecordsFile
from crosscurrent.evaluation.interventions import (
    Intervention,
    Off,
    Other,
    Random,
    Reset,
    decode,
    model_with_feedback,
)
from crosscurrent.evaluation.solver_choice import EXACT
from crosscurrent.evaluation.telemetry import gate_openings
from crosscurrent.experiments.drawing import COLOURS, draw_scores, save_figure
from crosscurrent.files import locked, refuse_file, write_whole
from crosscurrent.models.t2mlr import T2MLRForCausalLM
from crosscurrent.suggestions import did_you_mean
from crosscurrent.tasks.reasoning import Problem, ReasoningTask
from crosscurrent.version import __version__

ABLATION = "ablation.json"
CONDITIONS = ("intact", "off", "reset", "other", "random")
RESETS = (1, 4, 16)
_OWN = re.compile(r"ablation\.json|accuracy\.(png|svg)|(intact|off|reset-[0-9]+|other|random)\.jsonl")
SHARED = ("task", "settings", "recurrence", "model", "data")  # by all conditions


def interventions_of(
    conditions: Sequence[str] = CONDITIONS, resets: Sequence[int] = RESETS, seed: int = 0
) -> list[Intervention]:
    """The interventions of some conditions, in the order of `CONDITIONS`. "intact" is always among them.

    Args:
        conditions: of `CONDITIONS`.
        resets: the N of "reset", which stands for one condition each.
        seed: of "random".

    Raises:
        ValueError: there is no such condition, or an N is below 1.

    Example:
        >>> [one.name for one in interventions_of(["reset", "other"], resets=[8, 2])]
        ['intact', 'reset-2', 'reset-8', 'other']
    """
    for name in conditions:
        if name not in CONDITIONS:
            raise ValueError(
                f"there is no condition {name!r}.{did_you_mean(name, CONDITIONS)} Conditions: {', '.join(CONDITIONS)}."
            )
    known: dict[str, list[Intervention]] = {
        "intact": [Intervention()],
        "off": [Off()],
        "reset": [Reset(every) for every in sorted(set(resets))],
        "other": [Other()],
        "random": [Random(seed)],
    }
    return [one for name in CONDITIONS if name in ("intact", *conditions) for one in known[name]]


def refuse_other_folder(output: Path) -> None:
    """Raise ValueError if a place for an ablation holds something else. An ablation is gone on with."""
    refuse_file(output)
    names = sorted(path.name for path in output.iterdir()) if output.exists() else []
    others = [name for name in names if not (name.startswith(".") or _OWN.fullmatch(name))]
    if others:
        raise ValueError(
            f"{output} holds something else ({others[0]}): give a new folder, or the one of this ablation."
        )


def run_ablation(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: ReasoningTask,
    problems: Sequence[Problem],
    interventions: Sequence[Intervention],
    output: Path,
    settings: AnsweringSettings | None = None,
    name: str = "",
) -> dict[str, Any]:
    """Put problems to a model under interventions on its state, and compare the scores with those without any.

    Answers are greedy and exact, prompts included: the model's own solver has no part in it.

    Args:
        model: a recurrent model with feedback, also wrapped by PEFT. It is left as it was.
        tokenizer: the model's.
        task: which says how problems are asked and judged.
        problems: of the task; ids must be unique.
        interventions: as `interventions_of` gives them: of different names, and `Intervention()` among them.
        output: a folder. It gets a .jsonl of records for each condition, which a call that was killed goes on from, then a
            figure (accuracy.png and .svg) and, last, ablation.json.
        settings: how problems are asked. Its solver has no effect, and it must be greedy.
        name: of the model, to be read by people.

    Returns:
        What is in ablation.json: `conditions` by name, each with what `summary` says of its records, the share of outputs
        that are not those of "intact" (`changed_rate`) and the paired differences to its scores (`compared_to_intact`).

    Raises:
        ValueError: the model has no feedback, there is no other problem to take a state from, or the interventions are not
            as above; what `answer_problems` raises.
        OSError: the folder cannot be written, or another process is at work in it.

    Example::

        task = get_reasoning_task("variable_assignment", depth=2)
        run_ablation(model, tokenizer, task, task.problems("test", count=200), interventions_of(), Path("ablation"))
    """
    refuse_other_folder(output)
    _check_interventions(interventions)
    inner = model_with_feedback(model)
    _warn_if_nothing_can_change(inner)
    settings = settings or AnsweringSettings()
    if not settings.is_greedy:
        raise ValueError(f"temperature={settings.temperature} is not allowed: an ablation decodes greedily, give 0.")
    session = Session(model, tokenizer, task, problems, replace(settings, solver=EXACT), name)
    headers = {one.name: {**session.header, "intervention": {"name": one.name, **asdict(one)}} for one in interventions}
    partners = _partners(session.prompts) if any(one.reads_partners for one in interventions) else {}
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, OSError(f"{output}: another process is at work there: wait for it, or give another folder.")):
        for condition, header in headers.items():  # what cannot be gone on from is said before hours of decoding
            RecordsFile(output / f"{condition}.jsonl").open(header)
        found: dict[str, list[Record]] = {}
        for intervention in tqdm(interventions, desc="conditions", unit="condition", leave=False):
            session.writer = _Writer(session, model, intervention, partners)
            session.header = headers[intervention.name]
            found[intervention.name] = session.answer(output / f"{intervention.name}.jsonl")
        facts = _facts(session, found)
        save_figure(draw(facts), output / "accuracy")
        write_whole(output / ABLATION, json.dumps(facts, indent=2) + "\n")
    return facts


def _check_interventions(interventions: Sequence[Intervention]) -> None:
    names = [one.name for one in interventions]
    if "intact" not in names or len(set(names)) < len(names):
        raise ValueError(
            f"the interventions are {', '.join(names)}: give each name once, and Intervention() among them."
        )


class _Writer(Writer):
    """Writes under an intervention, for which `generate` has no place."""

    def __init__(self, session: Session, model: Any, intervention: Intervention, partners: Mapping[str, list[int]]):
        self.num_new = session.settings.length_for(session.task)
        super().__init__(model, session.tokenizer, session.settings, self.num_new)
        self.intervention, self.partners = intervention, partners

    def write(self, prompts: Sequence[list[int]], keys: Sequence[tuple[str, int]]) -> list[list[int]]:
        ids = [problem for problem, _ in keys]
        return decode(
            self.model,
            prompts,
            ids,
            self.intervention,
            max_new_tokens=self.num_new,
            eos_ids=self.end_ids,
            partners=[self.partners[one] for one in ids] if self.intervention.reads_partners else None,
            prompt_recurrence=self.settings.prompt_recurrence,
        )


def _partners(prompts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """For each problem the prompt of the one after it; for the last, of the first. It does not depend on batches."""
    if len(prompts) < 2:
        raise ValueError("the condition 'other' takes states from another problem: give at least two, or leave it out.")
    after = [*list(prompts.values())[1:], next(iter(prompts.values()))]
    return dict(zip(prompts, after, strict=True))


def _warn_if_nothing_can_change(model: Any) -> None:
    if isinstance(model, T2MLRForCausalLM) and gate_openings(model)[1] == 0:
        warnings.warn(
            "the gate on the state is closed, as in a model fresh from retrofit: what is read changes nothing. Train it "
            "first.",
            stacklevel=3,
        )


def _facts(session: Session, found: Mapping[str, list[Record]]) -> dict[str, Any]:
    conditions = {}
    intact = found["intact"]
    shared = session.facts(intact)
    for name, records in found.items():
        facts = session.facts(records)
        conditions[name] = {key: value for key, value in facts.items() if key not in SHARED}
        if records is not intact:
            changed = [one.output != other.output for one, other in zip(records, intact, strict=True)]
            conditions[name]["changed_rate"] = sum(changed) / len(changed)
            conditions[name]["compared_to_intact"] = [one.to_dict() for one in compare(records, intact)]
    versions = {"crosscurrent": __version__} | {package: version(package) for package in ("torch", "transformers")}
    return {"format": 1, **{key: shared[key] for key in SHARED}, "conditions": conditions, "versions": versions}


def draw(facts: Mapping[str, Any]) -> Figure:
    """The task's first metric under each condition, with its interval.

    Args:
        facts: as `run_ablation` returns them.
    """
    conditions = facts["conditions"]
    metric, intact = next(iter(conditions["intact"]["metrics"].items()))
    figure = draw_scores(
        {name: found["metrics"][metric] for name, found in conditions.items()},
        {name: COLOURS[0 if name == "intact" else 3] for name in conditions},
        title=f"{facts['task']['name']}, {conditions['intact']['num_problems']:,} problems",
        label=metric,
    )
    figure.axes[0].axvline(100 * intact["mean"], color=COLOURS[0], linewidth=1, linestyle=":")
    figure.axes[0].set_xlim(-2, 102)
    return figure
