"""One model out of a checkpoint of a run on text, whose weights may lie in shards."""

from pathlib import Path

import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.torch import load_model

from crosscurrent.data.shards import PreparedText
from crosscurrent.experiments.saving import check_target, save_model
from crosscurrent.experiments.text_of_run import build_text_model
from crosscurrent.experiments.text_run import TextRunFolder
from crosscurrent.training.checkpoints import checkpoint_folder, complete_steps

_SHARDS = "pytorch_model_fsdp_0"  # accelerate's name for the folder of the shards


def consolidate(run: Path, output: Path, step: int | None = None, overwrite: bool = False) -> int:
    """Save the model of a checkpoint as one, for `from_pretrained`. Shards take one process, and the model's size in memory.

    The shards are read by torch.distributed.checkpoint, whose index is a pickle: consolidate runs of your own only.

    Args:
        run: the folder of a run on text, as `crosscurrent train` writes it.
        output: the folder to write.
        step: of the checkpoint; None: the last complete one.
        overwrite: replace a model that is there.

    Returns:
        The step.

    Raises:
        ValueError: there is no such complete checkpoint, or something is in the way.
        OSError: something cannot be read or written.

    Example::

        consolidate(Path("runs/mine"), Path("model-at-1000"), step=1000)
    """
    if output.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{output} is inside of the run: give another folder.")
    check_target(output, overwrite)
    folder = TextRunFolder(run)
    if not folder.recipe_file.exists():
        raise ValueError(f"{run} is no folder of a run (it has no {folder.recipe_file.name}).")
    steps = complete_steps(folder.checkpoints)
    if not steps or (step is not None and step not in steps):
        wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        raise ValueError(f"{run} has no {wanted}. It has: {', '.join(map(str, steps)) or 'none'}.")
    chosen = steps[-1] if step is None else step
    checkpoint, recipe = checkpoint_folder(folder.checkpoints, chosen), folder.recipe()
    text = PreparedText(recipe.folder)
    model = build_text_model(recipe, text)
    if (checkpoint / _SHARDS).is_dir():
        state = {"model": model.state_dict()}
        distributed_checkpoint.load(state, checkpoint_id=checkpoint / _SHARDS, no_dist=True)
        model.load_state_dict(state["model"])
    else:
        load_model(model, checkpoint / "model.safetensors")
    save_model(model, text.tokenizer(), output, overwrite)
    return chosen
