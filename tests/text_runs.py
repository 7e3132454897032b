"""Runs on text of seconds, for tests; as a program: those in several processes, and those that are killed.

python -m tests.text_runs FOLDER TEXT
"""

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from crosscurrent.data.prepare import prepare
from crosscurrent.data.sources import open_source
from crosscurrent.experiments.settings import merge, validated
from crosscurrent.experiments.text_recipe import TextRecipe
from crosscurrent.experiments.text_run import run_text
from crosscurrent.training.terminated import TerminatedError
from tests.tiny_texts import ending_tokenizer, write_jsonl

MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"architecture": "transformer", "num_key_value_heads": 1},
    "t2mlr": {
        "architecture": "t2mlr",
        "layer_start": 1,
        "layer_end": 2,
        "solver": {"name": "jacobi", "iterations": 3, "backward_iterations": 2},
    },
    "t2mlr-sequential": {
        "architecture": "t2mlr",
        "layer_start": 1,
        "layer_end": 2,
        "solver": {"name": "sequential"},
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


def prepared_text(folder: Path, seed: int = 1) -> Path:
    """Documents of words that go on from each other, some longer than a row."""
    source = random.Random(seed)
    texts = [" ".join(source.choices(["one", "two", "three"], k=source.randint(1, 9))) for _ in range(120)]
    file = write_jsonl(folder / "texts.jsonl", texts)
    output = folder / "tokens"
    prepare(open_source([str(file)]), ending_tokenizer(), output, tokenizer_name="letters", validation_share=0.2)
    return output


def tiny_text_values(text: Path, model: dict[str, Any], /, **changes: Any) -> dict[str, Any]:
    """A recipe of six steps as plain values."""
    return merge(_SMALL, {"data": {"prepared": str(text)}, "model": model}, changes)


def tiny_text_recipe(text: Path, model: str = "t2mlr", /, **changes: Any) -> TextRecipe:
    """A recipe of six steps."""
    return validated(TextRecipe, tiny_text_values(text, MODELS[model], **changes), "tiny")


def do(recipe: TextRecipe, path: Path, num_processes: int = 1, while_it_runs: Any = None) -> list[int]:
    """Do a run in processes of its own, as torchrun starts them, which need not import anything again.

    Args:
        while_it_runs: called with the numbers of the processes.

    Returns:
        Their exit codes; minus a signal's number if that ended one.
    """
    port, pids = _free_port(), []
    for rank in range(num_processes):
        pid = os.fork()
        if pid == 0:
            os.setpgrp()
            _be(rank, num_processes, port, lambda: run_text(recipe, path))
        pids.append(pid)
    if while_it_runs is not None:
        while_it_runs(pids)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _be(rank: int, num_processes: int, port: int, work: Callable[[], object]) -> None:
    if num_processes > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    code = 1
    try:
        work()
        code = 0
    except TerminatedError as error:
        code = 128 + error.signal_number
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def after_steps(path: Path, count: int, pids: list[int], which: list[int], number: int, group: bool = False) -> None:
    """Send a signal to some processes, or to the first and all that it has started, when so many steps are recorded."""
    metrics = path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < count:
        if any(os.waitpid(pid, os.WNOHANG)[0] for pid in pids[:1]):
            raise AssertionError("it ended by itself")
        time.sleep(0.01)
    for index in which:
        os.kill(pids[index], number)
    if group:
        os.killpg(pids[0], number)


def killed_while_saving(recipe: TextRecipe, path: Path) -> list[int]:
    """A process that kills itself when half of the optimizer's state of step 4 is written."""

    def half(state: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        whole(state, file, *args, **kwargs)
        if str(file).endswith("checkpoint-4/optimizer.pt"):
            os.truncate(file, os.path.getsize(file) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    whole = torch.save
    torch.save = half  # type: ignore[assignment]
    try:
        return do(recipe, path)
    finally:
        torch.save = whole


def main(folder: Path, text: Path) -> None:
    """All cases, each in a folder of its own; exit codes by case in codes.json."""
    torch.set_num_threads(1)
    plain, sharded = (tiny_text_recipe(text, training={"sharding": kind}) for kind in ("none", "fsdp2"))
    rlt = tiny_text_recipe(text, "rlt", training={"sharding": "fsdp2"})
    codes: dict[str, list[int]] = {}
    for name, recipe in {"ddp": plain, "fsdp2": sharded, "rlt-fsdp2": rlt}.items():
        codes[name] = do(recipe, folder / name, 2)
    for name, recipe, count in (("killed", plain, 1), ("fsdp2-killed", sharded, 2)):
        path = folder / name
        kill = partial(after_steps, path, 3, which=list(range(count)), number=signal.SIGKILL)
        codes[name] = do(recipe, path, count, kill) + do(recipe, path, count)
    path = folder / "killed-while-saving"
    codes[path.name] = killed_while_saving(plain, path) + do(plain, path)
    path = folder / "terminated"
    codes[path.name] = do(plain, path, 2, partial(after_steps, path, 3, which=[1], number=signal.SIGTERM))
    codes["gone-on-alone"] = do(plain, path, 1)
    # A launcher signals the workers that read rows, too.
    path, reading = folder / "terminated-with-workers", tiny_text_recipe(text, data={"num_workers": 1})
    codes[path.name] = do(reading, path, 1, partial(after_steps, path, 3, which=[], number=signal.SIGTERM, group=True))
    # Processes whose documents differ in whether any token reads a state.
    curriculum = {"feedback_interval": {"steps": [[0, 12], [5, 1]]}}
    for kind in ("none", "fsdp2"):
        training = {"sharding": kind, "microbatch_size": 1}
        rare = tiny_text_recipe(text, "t2mlr-sequential", training=training, curriculum=curriculum)
        codes[f"rare-{kind}"] = do(rare, folder / f"rare-{kind}", 2)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
