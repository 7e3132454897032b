"""The released SmolLM2-135M-Instruct as a folder: reading its GGUF file takes transformers 15 s, a folder less than one."""

from pathlib import Path
from typing import Any

from filelock import FileLock

import crosscurrent as cc
from crosscurrent.experiments.checks import fingerprint

FINGERPRINT = "fingerprint"  # of the weights as they came from the GGUF file


def unpack(folder: Path) -> None:
    """Save the packaged model and its tokenizer, if no other process of this run has done so."""
    with FileLock(f"{folder}.lock"):
        if not (folder / FINGERPRINT).exists():
            base: Any = cc.load_base("smollm2-135m")
            base.save_pretrained(folder)
            cc.load_tokenizer("smollm2-135m").save_pretrained(folder)
            (folder / FINGERPRINT).write_text(fingerprint(base))  # last, when all else is there
