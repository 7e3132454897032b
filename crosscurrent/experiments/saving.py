"""Writing a model so that a folder is either complete or not there at all."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosscurrent.files import partial_name, refuse_file
from crosscurrent.models.model_card import write_model_card


def check_target(folder: Path, overwrite: bool) -> None:
    """Raise ValueError if a model cannot be saved there.

    A file is in the way, or a folder that is not empty; if overwriting is allowed, one that is no model's.
    """
    refuse_file(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"{folder} exists and is not empty: give another folder, or overwrite it (--overwrite).")
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds something else than a model, which is not overwritten: give another folder.")


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    overwrite: bool = False,
    command: str | None = None,
) -> None:
    """Save a model and its tokenizer, if it has one, for transformers to load from `folder`.

    The model card names the `command` that made the model.

    Everything is written beside the folder first and moved there when complete. If that fails, what was at `folder`
    before is still there.

    Raises:
        ValueError: something is there already (see `check_target`).

    Example::

        save_model(model, tokenizer, Path("retrofitted"))
    """
    check_target(folder, overwrite)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(folder)
    try:
        partial.mkdir()
        write_model_card(model, partial, command)
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        _replace(folder, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(folder: Path, complete: Path) -> None:
    if not folder.exists():
        complete.rename(folder)
        return
    old = partial_name(folder)
    folder.rename(old)
    try:
        complete.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)
