"""Checkpoints that can be told complete from incomplete, so that a run may be killed while it writes one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_COMPLETE = "complete"  # a file that is written last


@contextmanager
def one_kind_of_write_error(what: str) -> Iterator[None]:
    """Make an OSError of the errors that safetensors and torch raise on a full disk.

    Args:
        what: is being written.
    """
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"{what} cannot be written: {error}") from error


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Where transformers' Trainer keeps the checkpoint of a step."""
    return folder / f"checkpoint-{step}"


def mark_complete(folder: Path, step: int) -> None:
    """Say that everything of a checkpoint has been written."""
    (checkpoint_folder(folder, step) / _COMPLETE).touch()


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints, rising."""
    return sorted(int(marker.parent.name.rsplit("-", 1)[1]) for marker in folder.glob(f"checkpoint-*/{_COMPLETE}"))


def keep_only(folder: Path, steps: set[int]) -> None:
    """Delete all other checkpoints, the incomplete ones too."""
    kept = {checkpoint_folder(folder, step) for step in steps}
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint not in kept:
            (checkpoint / _COMPLETE).unlink(missing_ok=True)  # first, so that half of it never looks whole
            shutil.rmtree(checkpoint)
