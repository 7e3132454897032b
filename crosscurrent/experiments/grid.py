"""Doing the runs of a study: what is missing, nothing twice, alone or side by side with other processes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crosscurrent.experiments.kinds import folder_of, run_any, summary
from crosscurrent.experiments.processes import num_processes
from crosscurrent.experiments.run_folder import BusyError, read_json
from crosscurrent.experiments.study import PlannedRun, Study
from crosscurrent.files import refuse_file, write_whole

STUDY_FILE = "study.json"


@dataclass(frozen=True)
class GridReport:
    """What became of the runs: names, and for the failed ones the reason."""

    finished: tuple[str, ...]
    were_done: tuple[str, ...]
    busy: tuple[str, ...]
    failed: dict[str, str]


def open_grid(output: Path, name: str, study: Study, plan: list[PlannedRun]) -> None:
    """Make the folder of a study, or make sure that it is this study's and every run in it is as planned.

    Args:
        output: the folder.
        name: of the study.
        study: whose seeds and labels are noted in the folder, for reports.
        plan: its runs, or some of them.

    Raises:
        ValueError: it is another study's, or holds a run of another recipe.
    """
    file, content = output / STUDY_FILE, {"study": name, "seeds": list(study.seeds)}
    refuse_file(output)
    found = read_json(file, *content) if file.exists() else content
    if any(found[key] != content[key] for key in content):
        raise ValueError(
            f"{output} holds another study, {found['study']} with seeds {found['seeds']}: give another folder (--output)."
        )
    for planned in plan:
        folder_of(planned.recipe, output / planned.name).check_recipe(planned.recipe)
    output.mkdir(parents=True, exist_ok=True)
    content |= {"tasks": list(study.tasks), "models": list(study.models)}
    write_whole(file, json.dumps(content, indent=2) + "\n")


def run_grid(output: Path, plan: list[PlannedRun], tell: Callable[[str], None]) -> GridReport:
    """Do what is missing of a plan.

    Several processes, also on several machines that share the folder, may do this at once: each takes runs that no other
    is at work on. A run that fails does not keep the others from being done.

    Args:
        output: the study's folder, made by `open_grid`.
        plan: the runs.
        tell: called with a line of text for each run.

    Raises:
        OSError: something cannot be written; what is done stays, and the run can be gone on with.
    """
    if num_processes() > 1:
        raise ValueError(
            "a grid is not run under torchrun: start several processes of it side by side, which share the folder, or "
            "run single recipes under torchrun with `crosscurrent train`."
        )
    finished, were_done, busy, failed = [], [], [], {}
    for number, planned in enumerate(plan, start=1):
        place = f"[{number}/{len(plan)}] {planned.name}"
        if folder_of(planned.recipe, output / planned.name).is_done:
            were_done.append(planned.name)
            tell(f"{place}: done before")
            continue
        try:
            result = run_any(planned.recipe, output / planned.name, planned.name)
        except BusyError:
            busy.append(planned.name)
            tell(f"{place}: another process is at work on it")
        except ValueError as error:
            failed[planned.name] = str(error)
            tell(f"{place}: failed: {error}")
        else:
            assert result is not None
            finished.append(planned.name)
            tell(f"{place}: {summary(planned.recipe, result)}")
    return GridReport(tuple(finished), tuple(were_done), tuple(busy), failed)
