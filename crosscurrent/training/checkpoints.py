"""Checkpoints that can be told complete from incomplete, so that a run may be killed while it writes one."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from crosscurrent.files import write_whole

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
    """Say that everything of a checkpoint has been written, and how large each file is."""
    checkpoint = checkpoint_folder(folder, step)
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / _COMPLETE]
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    write_whole(checkpoint / _COMPLETE, json.dumps(sizes) + "\n")


def complete_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that are complete and still have all their files, rising."""
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in _checkpoints(folder) if _is_whole(path))


def _is_whole(checkpoint: Path) -> bool:
    try:
        sizes = json.loads((checkpoint / _COMPLETE).read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]


def keep_only(folder: Path, steps: set[int]) -> None:
    """Delete all other checkpoints, the incomplete ones too."""
    kept = {checkpoint_folder(folder, step) for step in steps}
    for checkpoint in _checkpoints(folder):
        if checkpoint not in kept:
            (checkpoint / _COMPLETE).unlink(missing_ok=True)  # first, so that half of it never looks whole
            shutil.rmtree(checkpoint)
