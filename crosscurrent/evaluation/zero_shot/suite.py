"""The zero-shot tasks: lm-evaluation-harness's own, on the hub's data sets or on local files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import Dataset
from lm_eval.tasks import TaskManager

from crosscurrent.evaluation.zero_shot.local_files import LOCAL_FILES, LocalFile, read_rows
from crosscurrent.suggestions import did_you_mean
from crosscurrent.tasks.reasoning import reasoning_task_names

SUITE = "zero_shot"
# In the order of tables. Each with the folder of the harness's tasks that defines it: reading all of them takes long.
TASKS = {
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "winogrande": "winogrande",
    "openbookqa": "openbookqa",
    "boolq": "super_glue/boolq",
}


def task_names(words: Sequence[str]) -> list[str]:
    """The tasks that are meant, each once, in the order given.

    Args:
        words: names of tasks; "zero_shot" stands for all seven.

    Raises:
        ValueError: one is unknown, or there is none.

    Example:
        >>> task_names(["piqa", "piqa", "boolq"])
        ['piqa', 'boolq']
        >>> len(task_names(["zero_shot"]))
        7
    """
    known, reasoning = [*TASKS, SUITE], reasoning_task_names()
    for word in words:
        if word not in known:
            raise ValueError(
                f"task {word!r} is not known: give some of {', '.join(known)}, or of the reasoning tasks "
                f"{', '.join(reasoning)}.{did_you_mean(word, [*known, *reasoning])} All others of "
                "lm-evaluation-harness run by its own command (docs/evaluation.md)."
            )
    if not words:
        raise ValueError(f"no task is given: give some of {', '.join(known)}.")
    return list(dict.fromkeys(name for word in words for name in (TASKS if word == SUITE else [word])))


def load_tasks(names: Sequence[str], folder: Path | None = None) -> dict[str, Any]:
    """The harness's tasks, by name, without examples in the prompt.

    Prompts, choices, preprocessing and metrics are the harness's. From local files only the rows come.

    Args:
        names: of tasks.
        folder: with files as in `LOCAL_FILES`; None: the data sets come from the hub.

    Raises:
        ValueError: a task has no local form, a file is not laid out as it should be, or the hub cannot be reached.
        OSError: a file is missing or cannot be read.

    Example::

        score_tasks(lm, load_tasks(task_names(["zero_shot"])))
        score_tasks(lm, load_tasks(["piqa"], Path("folder")), limit=100)
    """
    home = Path(lm_eval.tasks.__file__).parent
    manager = TaskManager(
        include_path=[home / part for part in {TASKS[name] for name in names}], include_defaults=False
    )
    changes = [{"task": name, "num_fewshot": 0} | ({} if folder is None else _local(name, folder)) for name in names]
    try:
        return manager.load({"group": SUITE, "task": changes})["tasks"]
    except OSError as error:
        raise ValueError(
            f"a data set could not be read from the hub ({error}). Without a network, give a folder of local files: they "
            f"serve {', '.join(LOCAL_FILES)}."
        ) from error


def _local(name: str, folder: Path) -> dict[str, Any]:
    """What replaces the hub's data set in a task's configuration."""
    if name not in LOCAL_FILES:
        raise ValueError(
            f"there is no local form of {name}: it needs the hub. From files: --tasks {','.join(LOCAL_FILES)}."
        )
    source = LOCAL_FILES[name]
    rows = read_rows(source, folder)

    def dataset(**_: Any) -> dict[str, Dataset]:
        return {source.split: Dataset.from_list(rows)}

    return {"custom_dataset": dataset} | _only(source)


def _only(source: LocalFile) -> dict[str, str | None]:
    """The splits of a task that has but one."""
    return {f"{kind}_split": None for kind in ("training", "validation", "test")} | {
        f"{source.split}_split": source.split
    }
