"""What runs of all kinds share: their folder, their processes, and the settings of their Trainer."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from crosscurrent.experiments.processes import leave_together, num_processes, rank, wait_for_all
from crosscurrent.experiments.recipe import FeedbackCurriculum, OptimizationRecipe
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.experiments.saving import check_target
from crosscurrent.training.schedules import set_feedback


def run_in_folder(
    folder: RunFolder, recipe: Any, train: Callable[[], None], finish: Callable[[], None]
) -> dict[str, Any] | None:
    """Do what is missing of a run: train, in all processes, then finish, in the first one.

    Returns:
        What `result.json` holds; None in all processes but the first.

    Raises:
        ValueError: the folder is another run's, or the device is out of memory.
        BusyError: another process is at work on it.
    """
    try:
        if rank() != 0:
            wait_for_all()
            if not folder.is_done:
                train()
            leave_together()
            return None
        with folder.claimed():
            folder.open(recipe)
            wait_for_all()  # nobody writes into a folder that is being begun
            is_done = folder.is_done
            if not is_done:
                check_target(folder.model, overwrite=True)
                train()
            leave_together()
            if not is_done:
                finish()
            folder.tidy()
            return folder.result()
    except torch.OutOfMemoryError as error:
        raise ValueError(f"the device is out of memory: lower training.microbatch_size. ({error})") from error


def training_arguments(training: OptimizationRecipe, folder: RunFolder, seed: int, **more: Any) -> TrainingArguments:
    """The settings of transformers' Trainer.

    Args:
        training: the recipe's part.
        folder: of the run.
        seed: of the run.
        more: over what is set here.

    Raises:
        ValueError: a batch does not divide among the processes, or the precision needs another device.
    """
    microbatch = training.microbatch_size or max(training.batch_size // num_processes(), 1)
    if training.batch_size % (microbatch * num_processes()):
        raise ValueError(
            f"training.batch_size={training.batch_size} does not divide into microbatches of {microbatch} for "
            f"{num_processes()} processes: change training.microbatch_size."
        )
    if training.warmup_steps >= training.max_steps:
        warnings.warn(
            f"training.warmup_steps={training.warmup_steps} is not below max_steps={training.max_steps}: the learning rate "
            "does not come to what is asked for.",
            stacklevel=2,
        )
    if training.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("training.precision=fp16 needs a GPU: on a CPU take fp32, or bf16.")
    settings: dict[str, Any] = {
        "output_dir": str(folder.checkpoints),
        "max_steps": training.max_steps,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": training.batch_size // (microbatch * num_processes()),
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": training.min_learning_rate},
        "warmup_steps": training.warmup_steps,
        "max_grad_norm": training.max_grad_norm,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": training.eval_steps,
        "save_strategy": "steps",
        "save_steps": training.eval_steps,
        "train_sampling_strategy": "sequential",  # the dataset is in its order already
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        "report_to": "none",  # callbacks that report are given their folder by the run
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "seed": seed,
    }
    arguments = TrainingArguments(**(settings | more))
    # Of several GPUs one process uses one; transformers would spread each microbatch over all of them, and more of them
    # would make a step larger. torchrun starts a process for each.
    assert arguments.device is not None  # sets _n_gpu
    arguments._n_gpu = min(arguments._n_gpu, 1)
    return arguments


class Feedback:
    """The curricula of the feedback, applied to a model.

    Args:
        curriculum: what changes with the step.
        described: the recipe of the model, which validation and tests see.
        model: to be changed.
        state_noise: of the step after so many; None: it does not change.
    """

    def __init__(
        self,
        curriculum: FeedbackCurriculum,
        described: Any,
        model: PreTrainedModel,
        state_noise: Callable[[int], float] | None = None,
    ):
        self.model, self.described = model, described
        self.of_step: dict[str, Callable[[int], float]] = {}
        if curriculum.feedback_interval is not None:
            interval = curriculum.feedback_interval.of_step()
            self.of_step["feedback_interval"] = lambda step: max(1, round(interval(step)))
        if curriculum.feedback_scale is not None:
            self.of_step["feedback_scale"] = curriculum.feedback_scale.of_step()
        if state_noise is not None:
            self.of_step["state_noise"] = state_noise

    def values(self, step: int) -> dict[str, float]:
        """What holds in the step after `step` steps."""
        return {name: value(step) for name, value in self.of_step.items()}

    def apply(self, step: int) -> None:
        self._set(self.values(step))

    def restore(self) -> None:
        """As the recipe describes the model."""
        self._set({name: getattr(self.described, name) for name in self.of_step})

    def _set(self, values: dict[str, Any]) -> None:
        set_feedback(self.model, **values)
