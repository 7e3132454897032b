"""One run on text: train, keep checkpoints, and end with one model in one piece."""

import hashlib
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from crosscurrent.data.batches import collate_rows, collate_rows_for_attention
from crosscurrent.data.shards import PreparedText
from crosscurrent.experiments.architectures import RLTRecipe, T2MLRRecipe
from crosscurrent.experiments.processes import from_first, num_processes, rank
from crosscurrent.experiments.run_folder import MUST_AGREE_TO_COMPARE, RunFolder, read_json
from crosscurrent.experiments.running import Feedback, run_in_folder, training_arguments
from crosscurrent.experiments.saving import save_model
from crosscurrent.experiments.settings import read_yaml, validated
from crosscurrent.experiments.text_of_run import TextOfRun, build_text_model
from crosscurrent.experiments.text_recipe import TextRecipe
from crosscurrent.files import write_whole
from crosscurrent.recurrence import solver_from_dict
from crosscurrent.training.checkpoints import checkpoint_folder, complete_steps, keep_only, one_kind_of_write_error
from crosscurrent.training.liger import apply_liger_kernel, check_liger_kernel
from crosscurrent.training.monitoring import TrainDecodeGap
from crosscurrent.training.optimization import fusion_optimizer
from crosscurrent.training.sharding import shard
from crosscurrent.training.signals import StopOnSignal
from crosscurrent.training.text_trainer import SKIPPED, TextTrainer
from crosscurrent.training.throughput import Throughput
from crosscurrent.training.trainer import Curricula, Progress, Recorder


class TextRunFolder(RunFolder):
    """The files of one run on text: as of a run on a task, without predictions; the last checkpoints stay.

    A run may go on with another number of processes, or on another device: the rows it reads are the same. It is the same
    bit by bit only if nothing changes.
    """

    must_agree_to_go_on = (*MUST_AGREE_TO_COMPARE, "text")

    def __init__(self, path: Path, text: PreparedText | None = None):
        super().__init__(path)
        self.text = text

    def versions_now(self) -> dict[str, Any]:
        """With what tells one prepared text from another."""
        return super().versions_now() | ({} if self.text is None else {"text": self.text.fingerprint})

    @property
    def parts_of_finished(self) -> tuple[Path, ...]:
        return (self.model, self.metrics.path)

    def recipe(self) -> TextRecipe:
        return validated(TextRecipe, read_yaml(self.recipe_file), str(self.recipe_file))

    def result(self) -> dict[str, Any]:
        return read_json(self.result_file, "steps", "validation_loss", "num_parameters", "seconds_per_step")

    def tidy(self) -> None:
        """Nothing: checkpoints of a pretraining are worth keeping."""


def run_text(recipe: TextRecipe, path: str | Path, name: str = "") -> dict[str, Any] | None:
    """Do a run on text, or what is missing of it.

    If the process was stopped, at any moment and in any way, the same call goes on from the last complete checkpoint: bit
    for bit as if nothing had happened on a CPU with the same processes and threads, and with the same rows in the same
    order in any case.

    Args:
        recipe: what to do.
        path: its folder.
        name: shown beside the progress bars.

    Returns:
        What `result.json` holds; None in all processes but the first, if there are several.

    Raises:
        ValueError: the folder is another run's; the prepared text does not fit; a loss is not as it should be (see the
            recipe's `guard`).
        TerminatedError: a SIGTERM came; the checkpoint is written.
        BusyError: another process is at work on it.
        OSError: something cannot be written; the last checkpoint is intact.

    Example::

        result = run_text(recipe, Path("runs/mine"))
    """
    before = TextRunFolder(Path(path))
    if before.is_done:  # its text may be gone by now
        before.check_recipe(recipe)
        return before.result() if rank() == 0 else None
    _check_packages(recipe)
    text = TextOfRun(recipe)
    text.check()
    folder = TextRunFolder(Path(path), text.prepared)
    run = _Run(recipe, folder, text, _arguments(recipe, folder), name or folder.path.name)
    return run_in_folder(folder, recipe, train=run.train, finish=run.finish)


def _check_packages(recipe: TextRecipe) -> None:
    """Raise ValueError if a package is missing that the recipe asks for."""
    if "wandb" in recipe.training.report_to and find_spec("wandb") is None:
        raise ValueError("training.report_to: wandb is not installed: pip install wandb, or leave it out.")
    if recipe.training.liger_kernel:
        check_liger_kernel()


def _arguments(recipe: TextRecipe, folder: RunFolder) -> TrainingArguments:
    training = recipe.training
    more: dict[str, Any] = {
        "save_steps": training.save_steps,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "torch_compile": training.torch_compile,
        "dataloader_num_workers": recipe.data.num_workers,
    }
    names = {field.name for field in fields(TrainingArguments)}
    is_new = "activation_checkpointing" in names  # what transformers calls gradient_checkpointing by now
    if training.gradient_checkpointing:
        more["activation_checkpointing" if is_new else "gradient_checkpointing"] = True
    if training.sharding == "fsdp2":
        if num_processes() == 1:
            raise ValueError(
                "training.sharding=fsdp2 divides a model over several processes, and there is one: start it with torchrun, "
                "or set training.sharding=none."
            )
        more["fsdp"] = True if is_new else "full_shard"
        # The layers are divided by training/sharding.py, not by accelerate.
        more["fsdp_config"] = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "NO_WRAP"}
    return training_arguments(training, folder, recipe.seed, **more)


@dataclass
class _Run:
    """A run in its folder."""

    recipe: TextRecipe
    folder: TextRunFolder
    text: TextOfRun
    arguments: TrainingArguments
    name: str

    def train(self) -> None:
        """Train to the end, from the last complete checkpoint that the metrics lead up to, if there is one."""
        done = self._steps_done()
        if rank() == 0:
            self.folder.metrics.cut_after(done)
            keep_only(
                self.folder.checkpoints, {step for step in complete_steps(self.folder.checkpoints) if step <= done}
            )
            self._tell_start(done)
        with Progress(self.name) as progress, StopOnSignal() as stop:
            trainer = self._trainer(done, progress, stop)
            checkpoint = checkpoint_folder(self.folder.checkpoints, done)
            trainer.train(resume_from_checkpoint=str(checkpoint) if done else None)
        stop.check(self.name)
        self._save_whole(trainer)

    def _steps_done(self) -> int:
        """Where the first process finds that the run can go on: several might see a shared folder at different moments."""
        last = self.folder.metrics.trained_until()
        done = max((step for step in complete_steps(self.folder.checkpoints) if step <= last), default=0)
        return from_first(done)

    def _tell_start(self, done: int) -> None:
        training, data = self.recipe.training, self.recipe.data
        tokens = training.max_steps * training.batch_size * data.sequence_length
        begins = f"goes on from step {done}" if done else "begins"
        tqdm.write(
            f"{self.name} {begins}: {training.max_steps} steps of {training.batch_size} x {data.sequence_length} tokens, "
            f"{tokens:,} in all, {self.text.num_epochs:.2f} epochs",
            file=sys.stderr,
        )

    def _trainer(self, done: int, progress: Progress, stop: StopOnSignal) -> TextTrainer:
        recipe, training = self.recipe, self.recipe.training
        model: Any = build_text_model(recipe, self.text.prepared)
        if training.liger_kernel:
            base = model.config.base_config if isinstance(recipe.model, T2MLRRecipe) else model.config
            apply_liger_kernel(model, base.model_type)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[training.precision]
        throughput = Throughput(model, training.batch_size, recipe.data.sequence_length, num_processes(), dtype)
        feedback = Feedback(recipe.curriculum, recipe.model, model)
        is_recurrent = isinstance(recipe.model, T2MLRRecipe | RLTRecipe)
        if training.sharding == "fsdp2":
            shard(model, dtype)
        more: dict[str, Any] = {}
        if isinstance(recipe.model, T2MLRRecipe):  # so that its scalars do not decay
            rate = training.fusion_learning_rate or training.learning_rate
            more["optimizer_cls_and_kwargs"] = fusion_optimizer(self.arguments, rate)
        trainer = TextTrainer(
            model=model,
            validation=self.text.validation_rows,
            validation_solver=None if recipe.evaluation.solver is None else solver_from_dict(recipe.evaluation.solver),
            guard=recipe.guard.guard(),
            throughput=throughput,
            restore=feedback.restore,
            args=self.arguments,
            train_dataset=self.text.train_rows,
            data_collator=collate_rows if is_recurrent else collate_rows_for_attention,
            callbacks=[
                Curricula(feedback.apply),
                Recorder(self.folder.metrics, self.folder.checkpoints, feedback.values, self._kept),
                progress,
                stop,
                *(self._reporters(done) if rank() == 0 else ()),
            ],
            **more,
        )
        if recipe.evaluation.gap_rows:
            TrainDecodeGap(self.text.gap_batches(), every=training.eval_steps).attach_to(trainer)
        return trainer

    def _reporters(self, done: int) -> list[TrainerCallback]:
        reporters: list[TrainerCallback] = []
        if "tensorboard" in self.recipe.training.report_to:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(self.folder.tensorboard), purge_step=done + 1)
            reporters.append(TensorBoardCallback(writer))
        if "wandb" in self.recipe.training.report_to:
            from transformers.integrations import WandbCallback

            # The same command goes on with the same run there, too.
            os.environ.setdefault(
                "WANDB_RUN_ID", hashlib.sha256(str(self.folder.path.resolve()).encode()).hexdigest()[:16]
            )
            os.environ.setdefault("WANDB_RESUME", "allow")
            reporters.append(WandbCallback())
        return reporters

    def _kept(self, step: int) -> set[int]:
        """The last so many complete checkpoints, the new one among them."""
        steps = sorted({*complete_steps(self.folder.checkpoints), step})
        return set(steps[-self.recipe.training.keep_checkpoints :])

    def _save_whole(self, trainer: TextTrainer) -> None:
        """Put the shards together, in all processes, and save the model in the first one."""
        trainer.restore()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(trainer.model_wrapped, options=options)
        if rank() == 0:
            model = build_text_model(self.recipe, self.text.prepared)
            model.load_state_dict(state)
            with one_kind_of_write_error(str(self.folder.model)):
                save_model(model, self.text.prepared.tokenizer(), self.folder.model, overwrite=True)

    def finish(self) -> None:
        """Write the result."""
        rows = self.folder.metrics.rows()
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        validation = self.folder.metrics.validations()[-1]
        training, data = self.recipe.training, self.recipe.data
        with torch.device("meta"):  # to be counted only
            model = build_text_model(self.recipe, self.text.prepared)
        result = {
            "steps": training.max_steps,
            "tokens": training.max_steps * training.batch_size * data.sequence_length,
            "epochs": self.text.num_epochs,
            "validation_loss": validation["validation_loss"],
            "validation_perplexity": validation["validation_perplexity"],
            "num_parameters": model.num_parameters(),
            "num_skipped_steps": sum(SKIPPED in row for row in rows),
            "seconds_per_step": statistics.median(seconds),
            "training_seconds": round(math.fsum(seconds), 3),
        }
        write_whole(self.folder.result_file, json.dumps(result, indent=2) + "\n")
