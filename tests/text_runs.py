"""Runs on text of seconds, for tests: what several processes do is at the end.

torchrun --nproc-per-node 2 --standalone -m tests.text_runs FOLDER TEXT
"""

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState

from crosscurrent.data.prepare import prepare
from crosscurrent.data.sources import open_source
from crosscurrent.experiments.settings import merge, validated
from crosscurrent.experiments.text_recipe import TextRecipe
from crosscurrent.experiments.text_run import run_text
from tests.tiny_texts import ending_tokenizer, write_jsonl

MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"architecture": "transformer", "num_key_value_heads": 1},
    "t2mlr": {
        "architecture": "t2mlr",
        "layer_start": 1,
        "layer_end": 2,
        "solver": {"name": "jacobi", "iterations": 3, "backward_iterations": 2},
    },
    "rlt": {"architecture": "rlt", "num_decoder_layers": 1, "sliding_window": 5},
}
_SMALL: dict[str, Any] = {
    "data": {"sequence_length": 15},
    "model": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24},
    "training": {
        "max_steps": 6,
        "batch_size": 8,
        "microbatch_size": 2,
        "learning_rate": 0.02,
        "eval_steps": 3,
        "save_steps": 2,
        "warmup_steps": 2,
        "report_to": [],
    },
    "seed": 5,
}


def prepared_text(folder: Path) -> Path:
    """Documents of words that go on from each other, some longer than a row."""
    source = random.Random(1)
    texts = [" ".join(source.choices(["one", "two", "three"], k=source.randint(1, 9))) for _ in range(120)]
    file = write_jsonl(folder / "texts.jsonl", texts)
    output = folder / "tokens"
    prepare(open_source([str(file)]), ending_tokenizer(), output, tokenizer_name="letters", validation_share=0.2)
    return output


def tiny_text_recipe(text: Path, model: str = "t2mlr", /, **changes: Any) -> TextRecipe:
    """A recipe of six steps."""
    values = merge(_SMALL, {"data": {"prepared": str(text)}, "model": MODELS[model]}, changes)
    return validated(TextRecipe, values, "tiny")


def several(folder: Path, text: Path) -> None:
    """Each case in two processes: plain, in shards, and stopped and gone on with in shards."""
    torch.set_num_threads(1)
    for model in ("t2mlr", "rlt"):
        for sharding in ("none", "fsdp2"):
            alone_again()
            run_text(tiny_text_recipe(text, model, training={"sharding": sharding}), folder / f"{model}-{sharding}")
    path = folder / "t2mlr-fsdp2-again"
    recipe = tiny_text_recipe(text, training={"sharding": "fsdp2"})
    if int(PROCESS["RANK"]) == 0:
        shutil.copytree(folder / "t2mlr-fsdp2", path)
        undo(path, 6)
    alone_again()
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()  # the folder is there
    run_text(recipe, path)


def undo(path: Path, step: int) -> None:
    """Make a finished run one that was killed while it wrote the checkpoint of a step."""
    (path / "result.json").unlink()
    shutil.rmtree(path / "model")
    (path / "checkpoints" / f"checkpoint-{step}" / "complete").unlink()


def alone_again() -> None:
    """Forget the group of processes that the run before has left."""
    AcceleratorState._reset_state()
    PartialState._reset_state()


if __name__ == "__main__":
    import os

    PROCESS = os.environ
    several(Path(sys.argv[1]), Path(sys.argv[2]))
