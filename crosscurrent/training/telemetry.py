"""What a run measures, step by step, in a file that survives being killed."""

import json
from pathlib import Path
from typing import Any

from crosscurrent.files import write_whole

Row = dict[str, Any]


class MetricsFile:
    """Lines of JSON: one row per training step, and one per validation.

    Rows of training have `loss`, rows of validation `validation_loss`; all have `step`. Rows are appended and flushed one
    by one. A process that is killed leaves at most one incomplete line at the end, which is passed over.

    Args:
        path: of the file; it need not exist.

    Example:
        >>> import tempfile
        >>> file = MetricsFile(Path(tempfile.mkdtemp()) / "metrics.jsonl")
        >>> file.append({"step": 1, "loss": 0.7})
        >>> file.append({"step": 2, "loss": 0.6})
        >>> file.cut_after(step=1)
        >>> file.rows()
        [{'step': 1, 'loss': 0.7}]
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, row: Row) -> None:
        """Add a row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[Row]:
        """All whole rows, in order.

        Raises:
            ValueError: something is wrong before the last line.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        rows: list[Row] = []
        for number, line in enumerate(lines, start=1):
            row = _parsed(line)
            if row is not None:
                rows.append(row)
            elif number < len(lines):
                raise ValueError(
                    f"{self.path}: line {number} is damaged: restore the file, or delete the run's folder."
                )
        return rows

    def covered_steps(self) -> set[int]:
        """The steps of validations before which no row is missing."""
        last = self.trained_until()
        return {row["step"] for row in self.validations() if row["step"] <= last}

    def trained_until(self) -> int:
        """The last step before which no row of training is missing; 0 if the first one is."""
        trained = {row["step"] for row in self.rows() if "loss" in row}
        return next(step for step in range(1, len(trained) + 2) if step not in trained) - 1

    def cut_after(self, step: int) -> None:
        """Leave out the rows of later steps, and what is incomplete."""
        kept = [row for row in self.rows() if row["step"] <= step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def validations(self) -> list[Row]:
        """The rows of validation."""
        return [row for row in self.rows() if "validation_loss" in row]


def _parsed(line: str) -> Row | None:
    if not line.endswith("\n"):
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if is_row and all(isinstance(value, int | float) for value in row.values()) else None


def best_step(validations: list[Row]) -> int:
    """The step of lowest validation loss, the earliest of equals.

    Raises:
        ValueError: there was no validation.

    Example:
        >>> best_step([{"step": 100, "validation_loss": 0.5}, {"step": 200, "validation_loss": 0.5}])
        100
    """
    if not validations:
        raise ValueError("there was no validation: a run validates every eval_steps and at its end.")
    return min(validations, key=lambda row: (row["validation_loss"], row["step"]))["step"]
