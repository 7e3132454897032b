"""The Hugging Face Trainer with this project's targets, validation, curricula and telemetry."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from crosscurrent.data.generated import TrainingExamples, inputs_for
from crosscurrent.evaluation.scoring import Examples, metrics_of, predict
from crosscurrent.tasks import IGNORED
from crosscurrent.training.averaging import WeightAverage
from crosscurrent.training.checkpoints import keep_only, mark_complete, one_kind_of_write_error
from crosscurrent.training.telemetry import MetricsFile, best_step

PREFIX = "eval_"  # transformers' name for what validation measures


class RunTrainer(Trainer):
    """What Trainers of runs share: no output of their own, and one kind of error for what cannot be written.

    Args:
        restore: called before each validation, so that it sees the model as it is to be used.
        kwargs: as transformers' Trainer.
    """

    def __init__(self, restore: Callable[[], None] = lambda: None, **kwargs: Any):
        asked_for = kwargs["train_dataset"]  # transformers wants some dataset; `evaluate` has its own examples
        super().__init__(eval_dataset=asked_for, **kwargs)
        self.restore = restore
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As transformers, with one kind of error for what cannot be written."""
        with one_kind_of_write_error(f"the checkpoint of step {self.state.global_step}"):
            super()._save_checkpoint(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Validate the model as it is to be used."""
        self.restore()
        metrics = self.validate()
        refuse_nonfinite(metrics[f"{PREFIX}loss"], "validation loss", self.state.global_step)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def validate(self) -> dict[str, float]:
        """Measures, `eval_loss` among them; every process gets the same."""
        raise NotImplementedError


class TaskTrainer(RunTrainer):
    """Trains on targets that are not shifted, and validates length by length.

    Args:
        model: to train.
        examples: to train on.
        longest: how long examples may be in the step after so many; None: as long as there are.
        validation: the examples to validate on.
        logit_scale: a factor of the logits in the loss (see `crosscurrent.training.width`).
        average: of the weights, which is what is validated; None: the weights themselves.
        callbacks: as transformers' Trainer.
        kwargs: as RunTrainer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        examples: TrainingExamples,
        longest: Callable[[int], int | None],
        validation: Examples,
        logit_scale: float = 1.0,
        average: WeightAverage | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        super().__init__(
            model=model,
            compute_loss_func=self._loss,
            train_dataset=examples,
            data_collator=_numbers,
            # The average before others, which take the checkpoint for complete, or end the training.
            callbacks=[*([average] if average is not None else []), *callbacks],
            **kwargs,
        )
        self.examples, self.longest = examples, longest
        self.validation, self.logit_scale = validation, logit_scale
        self.average = average

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The microbatches of a step, and how many targets they have together, over all processes."""
        groups, _ = super().get_batch_samples(*args, **kwargs)
        longest = self.longest(self.state.global_step)
        batches = [self.examples.batch(group["indices"].tolist(), longest) for group in groups]
        count = sum((batch["labels"] != IGNORED).sum() for batch in batches)
        assert isinstance(count, Tensor)
        return batches, self.accelerator.gather(count.to(self.args.device)).sum()

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As transformers, from what of the batch the model takes."""
        taken = inputs_for(self.accelerator.unwrap_model(model), inputs)
        return super().compute_loss(model, taken | {"labels": inputs["labels"]}, *args, **kwargs)

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = outputs["logits"].float() * self.logit_scale
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        refuse_nonfinite(loss.item(), "loss", self.state.global_step + 1)
        return loss / num_items_in_batch

    def validate(self) -> dict[str, float]:
        """Loss over all validation examples, and the task's metrics for each length.

        Every process computes all of it, so that all decide alike.
        """
        model = self.accelerator.unwrap_model(self.model) if self.average is None else self.average.model
        model.eval()
        metrics: dict[str, float] = {}
        losses = []
        for length, answers in predict(model, self.validation, generates=False, logit_scale=self.logit_scale):
            losses.append(answers.loss)
            found = metrics_of(self.validation.task, answers)
            metrics |= {f"{PREFIX}{name}_{length}": value for name, value in found.items()}
        return {f"{PREFIX}loss": math.fsum(losses) / len(losses), **metrics}


def _numbers(indices: list[int]) -> dict[str, Tensor]:
    """A group of examples by their numbers, in the form in which loaders hand batches on."""
    return {"indices": torch.tensor(indices)}


def validation_row(step: int, measured: Mapping[str, float]) -> dict[str, float]:
    """The row of the metrics file for what a validation measured."""
    found = {name.replace(PREFIX, "validation_"): value for name, value in measured.items() if PREFIX in name}
    return {"step": step} | found


def refuse_nonfinite(loss: float, what: str, step: int) -> None:
    """Raise ValueError if a loss is NaN or infinite."""
    if not math.isfinite(loss):
        raise ValueError(f"the {what} is {loss} at step {step}: lower training.learning_rate.")


class Curricula(TrainerCallback):
    """Sets what changes in the course of training, before each step.

    Args:
        apply: called with the number of steps done.
    """

    def __init__(self, apply: Callable[[int], None]):
        self.apply = apply

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.apply(state.global_step)


class Recorder(TrainerCallback):
    """Writes every step and every validation into the metrics file, and says which checkpoints are complete.

    Args:
        metrics: the file.
        checkpoints: the folder of the checkpoints.
        extra: more values of a step, such as those of the curricula.
        kept: given the step of a new checkpoint, the steps of those to keep. None: it and the best one.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        checkpoints: Path,
        extra: Callable[[int], dict[str, float]],
        kept: Callable[[int], set[int]] | None = None,
    ):
        self.metrics, self.checkpoints, self.extra = metrics, checkpoints, extra
        self.kept = kept if kept is not None else lambda step: {step, best_step(metrics.validations())}
        self._started = time.perf_counter()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._seconds = time.perf_counter() - self._started
        if state.global_step >= state.max_steps:  # also if that is no multiple of eval_steps
            control.should_evaluate = control.should_save = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            step = state.global_step
            names = ("loss", "grad_norm", "learning_rate")
            row = {"step": step} | {name: value for name, value in logs.items() if name in names or "/" in name}
            self.metrics.append(row | self.extra(step - 1) | {"seconds": round(self._seconds, 6)})
        elif f"{PREFIX}loss" in logs:
            self.metrics.append(validation_row(state.global_step, logs))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.world_size > 1:
            torch.distributed.barrier()  # every process has written its part
        if state.is_world_process_zero:
            mark_complete(self.checkpoints, state.global_step)
            keep_only(self.checkpoints, self.kept(state.global_step))


class Progress(TrainerCallback):
    """A progress bar on stderr, with the last losses; a context, at whose end the bar closes.

    Args:
        description: what is being trained.
    """

    def __init__(self, description: str):
        self.description = description
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self.description, unit="step", leave=False
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        names = (("loss", "loss"), (f"{PREFIX}loss", "validation"))
        self._shown |= {name: f"{logs[key]:.4f}" for key, name in names if key in logs}
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update()
