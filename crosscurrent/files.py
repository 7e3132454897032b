"""Files that are there whole or not at all, and folders that one process works in."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_file(folder: Path) -> None:
    """Raise ValueError if there is a file where the folder, or one above it, is to be."""
    found = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not found.is_dir():
        raise ValueError(f"{found} is a file: give the name of a folder.")


def partial_name(path: Path) -> Path:
    """Where to write what is to be moved to `path` when it is whole; another place at each call."""
    return path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:12]}")


def is_partial(name: str) -> bool:
    """Whether a file of this name is what `write_whole` left when it was killed."""
    return name.startswith(".") and ".partial-" in name


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was before."""
    partial = partial_name(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


LOCK = ".lock"


@contextmanager
def locked(folder: Path, busy: OSError) -> Iterator[None]:
    """Keep all other processes out of a folder, also those of other machines that share it.

    The lock is the operating system's, so it ends with the process, however that ends.

    Args:
        folder: that exists. The lock is a file in it.
        busy: raised if another process has locked it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder, OSError("somebody is at work")):
        ...     [entry.name for entry in folder.iterdir()]
        ['.lock']
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise busy from None
    try:
        yield
    finally:
        lock.release()
