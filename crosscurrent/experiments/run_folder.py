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
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from crosscurrent.experiments.recipe import Recipe, load_recipe
from crosscurrent.experiments.settings import write_yaml
from crosscurrent.training.telemetry import MetricsFile, write_whole
from crosscurrent.version import __version__

# A run begun with one version of these must not go on with another: its numbers would be those of neither.
_MUST_AGREE = ("crosscurrent", "torch", "transformers", "num_threads", "device")


class BusyError(OSError):
    """Another process is at work on the run."""


class RunFolder:
    """The files of one run.

    Args:
        path: of the folder; it need not exist.

    Example::

        folder = RunFolder(Path("runs/parity/rlt-1/seed-42"))
        folder.is_done, folder.metrics.rows()
    """

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

    @cached_property
    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl")

    def recipe(self) -> Recipe:
        """The recipe it was made with.

        Raises:
            ValueError: it is not a valid one.
            OSError: there is none.
        """
        return load_recipe(self.recipe_file)

    def versions(self) -> dict[str, Any]:
        """The versions it was made with."""
        return read_json(self.versions_file)

    def result(self) -> dict[str, Any]:
        """What `result.json` holds."""
        return read_json(self.result_file)

    def open(self, recipe: Recipe) -> None:
        """Begin the run, or make sure that the folder is this run's.

        Raises:
            ValueError: it is another recipe's, was begun with other versions, or holds something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: give the name of a folder.")
        if not self.recipe_file.exists():
            self._begin(recipe)
            return
        differing = differences(self.recipe().model_dump(mode="json"), recipe.model_dump(mode="json"))
        if differing:
            raise ValueError(
                f"{self.path} holds a run of another recipe ({'; '.join(differing[:3])}): give another folder, or delete "
                "this one to run again."
            )
        if not self.is_done:
            self._check_versions()

    def _begin(self, recipe: Recipe) -> None:
        strange = [entry.name for entry in _entries(self.path) if entry.name not in (".lock", "versions.json")]
        if strange:
            raise ValueError(f"{self.path} holds something else than a run ({strange[0]}): give another folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.versions_file, json.dumps(current_versions(), indent=2) + "\n")
        write_whole(self.recipe_file, write_yaml(recipe))

    def _check_versions(self) -> None:
        then, now = self.versions(), current_versions()
        changed = [f"{name} {then.get(name)} -> {now[name]}" for name in _MUST_AGREE if then.get(name) != now[name]]
        if changed:
            raise ValueError(
                f"{self.path} was begun with other versions ({', '.join(changed)}), and its numbers would be those of "
                "neither: go on with the old ones, or delete the folder to run again."
            )

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep all other processes out, also those of other machines that share the folder.

        The lock is the operating system's, so it ends with the process, however that ends.

        Raises:
            BusyError: another process has claimed it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: give the name of a folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise BusyError(f"{self.path}: another process is at work on this run.") from None
        try:
            yield
        finally:
            lock.release()


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
        "num_processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two nested values differ, as `key.key: old -> new`.

    Example:
        >>> differences({"a": {"b": 1}}, {"a": {"b": 2}})
        ['a.b: 1 -> 2']
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{path}: {old} -> {new}"]
    return [
        line
        for key in (*old, *(key for key in new if key not in old))
        for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    ]


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or delete the run's folder.") from None


def _entries(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.exists() else []
