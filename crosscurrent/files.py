"""Files that are there whole or not at all."""

import os
import uuid
from pathlib import Path


def partial_name(path: Path) -> Path:
    """Where to write what is to be moved to `path` when it is whole; another place at each call."""
    return path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:12]}")


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
