"""The folder of one run: what is in it, who may write to it, and whether it is this run's.

recipe.yaml         the resolved recipe
versions.json       of the software, and the kind of machine
metrics.jsonl       every step and every validation
checkpoints/        the best and the last, to go on from; deleted when the run is done
tensorboard/        the same as metrics.jsonl, for TensorBoard
model/              the selected weights, for AutoModelForCausalLM (after `import crosscurrent`)
predictions.safetensors   per length what the selected model said, and what was right
result.json         the selected step and the test scores; written last, so that it says the run is done
"""

import json
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from crosscurrent.experiments.processes import num_processes
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.settings import read_yaml, validated, write_yaml
from crosscurrent.files import LOCK, locked, refuse_file, write_whole
from crosscurrent.suggestions import differences
from crosscurrent.training.checkpoints import keep_only
from crosscurrent.training.telemetry import MetricsFile
from crosscurrent.version import __version__

# A run begun with one version of these must not go on with another: its numbers would be those of neither.
_MUST_AGREE_TO_GO_ON = ("crosscurrent", "torch", "transformers", "num_threads", "num_processes", "device")
# Runs made with different versions of these do not stand in one table.
MUST_AGREE_TO_COMPARE = ("crosscurrent", "torch", "transformers")


class BusyError(OSError):
    """Another process is at work on the run."""


class RunFolder:
    """The files of one run on a task.

    Args:
        path: of the folder; it need not exist.

    Example::

        folder = RunFolder(Path("runs/parity/rlt-1/seed-42"))
        folder.is_done, folder.metrics.rows()
    """

    must_agree_to_go_on: tuple[str, ...] = _MUST_AGREE_TO_GO_ON

    def __init__(self, path: Path):
        self.path = path
        self.recipe_file = path / "recipe.yaml"
        self.versions_file = path / "versions.json"
        self.result_file = path / "result.json"
        self.predictions_file = path / "predictions.safetensors"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"

    @property
    def is_done(self) -> bool:
        return self.result_file.exists()

    @property
    def parts_of_finished(self) -> tuple[Path, ...]:
        """What a finished run cannot lack."""
        return (self.model, self.predictions_file, self.metrics.path)

    @cached_property
    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl")

    def recipe(self) -> Any:
        """The recipe it was made with.

        Raises:
            ValueError: it is not a valid one.
            OSError: there is none.
        """
        return validated(Recipe, read_yaml(self.recipe_file), str(self.recipe_file))

    def versions(self) -> dict[str, Any]:
        """The versions it was made with."""
        return read_json(self.versions_file, "crosscurrent")

    def versions_now(self) -> dict[str, Any]:
        """Those it would be made with now."""
        return current_versions()

    def result(self) -> dict[str, Any]:
        """What `result.json` holds."""
        result = read_json(
            self.result_file, "selected_step", "validation", "test", "num_parameters", "seconds_per_step"
        )
        task = self.recipe().task
        for length in task.test_lengths:
            scores = result["test"].get(str(length), {}) if isinstance(result["test"], dict) else {}
            if any(not isinstance(scores.get(metric), int | float) for metric in task.task.metrics):
                raise ValueError(f"{self.result_file} is damaged (no scores at length {length}): restore it.")
        return result

    def open(self, recipe: Any) -> None:
        """Begin the run, or make sure that the folder is this run's.

        Raises:
            ValueError: it is another recipe's, was begun with other versions, or holds something else.
        """
        refuse_file(self.path)
        for leftover in self.path.glob(".*.partial-*"):  # of a process that was killed
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if not self.recipe_file.exists():
            self._begin(recipe)
            return
        self.check_recipe(recipe)
        if not self.is_done:
            refuse_other_versions(
                f"{self.path} was begun", self.versions(), self.versions_now(), self.must_agree_to_go_on
            )
        for part in self.parts_of_finished:
            if self.is_done and not part.exists():
                raise ValueError(
                    f"{part} is missing from a finished run: restore it, or delete the folder to run again."
                )

    def check_recipe(self, recipe: Any) -> None:
        """Raise ValueError if there is a run of another recipe, or a finished one of other versions."""
        if not self.recipe_file.exists():
            return
        differing = differences(self.recipe().model_dump(mode="json"), recipe.model_dump(mode="json"))
        if differing:
            raise ValueError(
                f"{self.path} holds a run of another recipe ({'; '.join(differing[:3])}): give another folder, or delete "
                "this one to run again."
            )
        if self.is_done:
            refuse_other_versions(f"{self.path} was made", self.versions(), current_versions())

    def _begin(self, recipe: Any) -> None:
        strange = [entry.name for entry in self.path.iterdir() if entry.name not in (LOCK, "versions.json")]
        if strange:
            raise ValueError(f"{self.path} holds something else than a run ({strange[0]}): give another folder.")
        write_whole(self.versions_file, json.dumps(self.versions_now(), indent=2) + "\n")
        write_whole(self.recipe_file, write_yaml(recipe))

    def tidy(self) -> None:
        """Leave out what a finished run does not need: its checkpoints."""
        if self.checkpoints.exists():
            keep_only(self.checkpoints, set())
            shutil.rmtree(self.checkpoints)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep all other processes out, also those of other machines that share the folder.

        Raises:
            BusyError: another process has claimed it.
        """
        refuse_file(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        busy = BusyError(f"{self.path}: another process is at work on this run. Wait for it, or stop it.")
        with locked(self.path, busy):
            yield


def current_versions() -> dict[str, Any]:
    """Versions of the software that results depend on, and the kind of machine."""
    packages = ("torch", "transformers", "accelerate", "safetensors", "numpy")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = "cpu" if accelerator is None else accelerator.type
    return {
        "crosscurrent": __version__,
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "num_threads": torch.get_num_threads(),
        "num_processes": num_processes(),
    }


def refuse_other_versions(
    what: str, then: dict[str, Any], now: dict[str, Any], names: tuple[str, ...] = MUST_AGREE_TO_COMPARE
) -> None:
    """Raise ValueError if some versions differ.

    Args:
        what: begins the message, as "runs/a was made".
        then, now: as `current_versions` gives them.
        names: of the versions that must agree.
    """
    changed = [f"{name} {then.get(name)} -> {now.get(name)}" for name in names if then.get(name) != now.get(name)]
    if changed:
        raise ValueError(
            f"{what} with other versions ({', '.join(changed)}), and their numbers do not mix: use the same versions, or "
            "another folder, or delete this one to run again."
        )


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it is damaged, or one of the keys is missing.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object")
        missing = [key for key in keys if key not in found]
        if missing:
            raise ValueError(f"without {missing[0]!r}")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or delete the run's folder.") from None
    return found
