"""How much longer a training step takes with the recurrence than without.

Both are measured side by side, so that whatever else the machine does weighs on both alike.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.experiments.finetuning.run import build_finetuned, trainable
from crosscurrent.experiments.run_folder import BusyError, read_json
from crosscurrent.files import locked, write_whole
from crosscurrent.suggestions import differences

FILE = "step_time.json"
ROUNDS = 5


def step_time_ratio(recipe: FinetuneRecipe, baseline: FinetuneRecipe, output: Path) -> float:
    """Seconds of a step of `recipe` divided by those of a step of `baseline`: the median over rounds of both in turn.

    It is kept in OUTPUT/step_time.json, from which later calls read it, so that what follows from it does not change.

    Raises:
        ValueError: the file is damaged.
        BusyError: another process is timing.
    """
    file = output / FILE
    busy = BusyError(f"{output}: another process is timing steps there. Wait for it, and start again.")
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, busy):
        if not file.exists():
            _measure(recipe, baseline, file)
    found = read_json(file, "ratio", "of")
    refuse_others(file, found["of"], _of(recipe, baseline))
    if not isinstance(found["ratio"], float) or not 0 < found["ratio"] < math.inf:
        raise ValueError(f"{file} is damaged (ratio {found['ratio']!r}): restore it, or delete it to measure again.")
    return found["ratio"]


def refuse_others(file: Path, found: Any, wanted: dict[str, Any]) -> None:
    """Raise ValueError if a file is not of what is wanted."""
    differing = differences(found if isinstance(found, dict) else {}, wanted)
    if differing:
        raise ValueError(
            f"{file} is of another recipe ({'; '.join(differing[:3])}): give another folder, or delete the file to make it "
            "again."
        )


def _of(recipe: FinetuneRecipe, baseline: FinetuneRecipe) -> dict[str, Any]:
    """What a step's time depends on; the seed is left out."""
    kept = {"problems", "base", "training"}
    return {name: one.model_dump(mode="json", include=kept) for name, one in (("with", recipe), ("without", baseline))}


def _measure(recipe: FinetuneRecipe, baseline: FinetuneRecipe, file: Path) -> None:
    steps = [_Step(one) for one in (recipe, baseline)]
    seconds: list[list[float]] = []
    with tqdm(total=ROUNDS + 1, desc="timing a step with and without recurrence", unit="round", leave=False) as bar:
        for number in range(ROUNDS + 1):
            seconds.append([step.seconds(number) for step in steps])
            bar.update()
    seconds = seconds[1:]  # the first round warms up
    ratio = statistics.median(one / other for one, other in seconds)
    found: dict[str, Any] = {"ratio": round(ratio, 4), "seconds": [[round(one, 4) for one in pair] for pair in seconds]}
    found["of"] = _of(recipe, baseline)
    write_whole(file, json.dumps(found, indent=2) + "\n")
    tqdm.write(f"a step with recurrence takes {ratio:.2f} times as long as one without", file=sys.stderr)


class _Step:
    """Training steps on the batches that a run begins with: forward and backward pass, clipping, and the optimizer."""

    def __init__(self, recipe: FinetuneRecipe):
        model, self.problems = build_finetuned(recipe)
        self.training = recipe.training
        self.model: Any = trainable(model, recipe)
        self.device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.model.to(self.device).train()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=recipe.training.learning_rate, fused=True)
        self.dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.training.precision]

    def seconds(self, number: int) -> float:
        """Of step `number` of the run."""
        batches = self._batches(number)
        started = time.perf_counter()
        for batch in batches:
            with torch.autocast(batch["input_ids"].device.type, self.dtype, enabled=self.dtype is not None):
                loss = self.model(**batch, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _batches(self, number: int) -> list[dict[str, Tensor]]:
        size, rows = self.training.microbatch_size or self.training.batch_size, self.problems.train_rows
        first = number * self.training.batch_size
        starts = range(first, first + self.training.batch_size, size)
        batches = [
            self.problems.collate([rows[index % len(rows)] for index in range(start, start + size)]) for start in starts
        ]
        return [{name: values.to(self.device) for name, values in batch.items()} for batch in batches]
