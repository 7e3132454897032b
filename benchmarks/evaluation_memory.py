"""How much memory evaluation takes, by the length of the examples, whole and in segments.

    python benchmarks/evaluation_memory.py --lengths 1024,4096 --segment-length 256

Each figure is from a process of its own: the most that it held, less what it held before the first example. The models are
of the mini scale with random weights, which changes nothing of it.
"""

import argparse
import resource
import subprocess
import sys
from typing import Any

import torch

from crosscurrent.evaluation.scoring import Examples, predict
from crosscurrent.experiments.architectures import RLTRecipe, TransformerRecipe
from crosscurrent.tasks import get_task

SIZE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 168,
}
WINDOWS: dict[str, Any] = {"encoder_sliding_window": 8, "memory_sliding_window": 8}
RECIPES = {
    "transformer": TransformerRecipe(architecture="transformer", **SIZE),
    "rlt-1": RLTRecipe(architecture="rlt", num_decoder_layers=1, **SIZE),
    "rlt-1, windowed": RLTRecipe(architecture="rlt", num_decoder_layers=1, **SIZE, **WINDOWS),
}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(model_name: str, length: int, segment_length: int | None) -> float:
    """MiB that scoring 64 rows of a length adds, at most, in this process."""
    torch.set_num_threads(1)
    task = get_task("s5_standard")
    model = RECIPES[model_name].build(len(task.vocabulary)).eval()
    settings: dict[str, Any] = {"batch_size": 64, "segment_length": segment_length}
    for _ in predict(model, Examples(task, "test", (8,), 64, 1, **settings), generates=False):
        before = peak_mib()
    for _ in predict(model, Examples(task, "test", (length,), 64, 1, **settings), generates=False):
        pass
    return peak_mib() - before


def in_process(model_name: str, length: int, segment_length: int | None) -> str:
    command = [sys.executable, __file__, "--measure", model_name, str(length), str(segment_length or 0)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--segment-length", type=int, default=256)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, length, segment = options.measure
        print(f"{measure(name, int(length), int(segment) or None):.0f}")
        return
    print(f"| model | length | whole, MiB | segments of {options.segment_length}, MiB |\n| --- | --- | --- | --- |")
    for name in RECIPES:
        for length in map(int, options.lengths.split(",")):
            whole, parts = (in_process(name, length, segment) for segment in (None, options.segment_length))
            print(f"| {name} | {length:,} | {whole} | {parts} |", flush=True)


if __name__ == "__main__":
    main()
