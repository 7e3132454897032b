"""How much longer a training step takes with the recurrence than without.

Both are measured side by side, so that whatever else the machine does weighs on both alike.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.experiments.finetuning.run import build_finetuned, trainable
from crosscurrent.experiments.run_folder import read_json
from crosscurrent.files import write_whole

FILE = "step_time.json"
ROUNDS = 5


def step_time_ratio(recipe: FinetuneRecipe, baseline: FinetuneRecipe, output: Path) -> float:
    """Seconds of a step of `recipe` divided by those of a step of `baseline`: the median over rounds of both in turn.

    It is kept in OUTPUT/step_time.json, from which later calls read it, so that what follows from it does not change.

    Raises:
        ValueError: the file is damaged.
    """
    file = output / FILE
    if file.exists():
        return float(read_json(file, "ratio")["ratio"])
    steps = [_Step(one) for one in (recipe, baseline)]
    seconds: list[list[float]] = []
    with tqdm(total=ROUNDS + 1, desc="timing a step with and without recurrence", unit="round", leave=False) as bar:
        for _ in range(ROUNDS + 1):
            seconds.append([step.seconds() for step in steps])
            bar.update()
    seconds = seconds[1:]  # the first round warms up
    ratio = statistics.median(one / other for one, other in seconds)
    found: dict[str, Any] = {"ratio": round(ratio, 4), "seconds": [[round(one, 4) for one in pair] for pair in seconds]}
    output.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(found, indent=2) + "\n")
    tqdm.write(f"a step with recurrence takes {ratio:.2f} times as long as one without", file=sys.stderr)
    return float(found["ratio"])


class _Step:
    """The gradient of a training step, on the first batch: what takes a step's time."""

    def __init__(self, recipe: FinetuneRecipe):
        model, problems = build_finetuned(recipe)
        self.model: Any = trainable(model, recipe)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.model.to(device).train()
        training = recipe.training
        size = training.microbatch_size or training.batch_size
        rows = problems.train_rows
        starts = range(0, training.batch_size, size)
        batches = [problems.collate([rows[index] for index in range(start, start + size)]) for start in starts]
        self.batches = [{name: values.to(device) for name, values in batch.items()} for batch in batches]
        self.dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[training.precision]

    def seconds(self) -> float:
        self.model.zero_grad()
        started = time.perf_counter()
        for batch in self.batches:
            kind = batch["input_ids"].device.type
            with torch.autocast(kind, self.dtype, enabled=self.dtype is not None):
                loss = self.model(**batch, use_cache=False).loss
            loss.backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started
