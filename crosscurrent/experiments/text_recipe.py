"""A recipe of training on text.

In YAML, as `crosscurrent train` takes it and as every run folder holds it::

    data: {prepared: data/wikipedia, sequence_length: 256}     # `crosscurrent prepare` made the folder
    model: {architecture: t2mlr, hidden_size: 128, num_hidden_layers: 6, num_attention_heads: 4, intermediate_size: 352,
            layer_start: 2, layer_end: 4}
    training: {max_steps: 1000, batch_size: 16, learning_rate: 0.001}
    seed: 42
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from crosscurrent.experiments.architectures import (
    AnyRecipe,
    Count,
    LSTMRecipe,
    ModelRecipe,
    RLTRecipe,
    SolverSettings,
    T2MLRRecipe,
)
from crosscurrent.experiments.recipe import (
    FeedbackCurriculum,
    OptimizationRecipe,
    Positive,
    Seed,
    check_model,
    one_kind_of_model_error,
    refuse_impossible_sizes,
)
from crosscurrent.experiments.settings import Settings
from crosscurrent.training.guard import StepGuard


class TextDataRecipe(Settings):
    """What is read.

    Attributes:
        prepared: a folder that `crosscurrent prepare` made.
        sequence_length: tokens per row.
        num_workers: processes that read rows, beside each one that trains.
        seed: of the order of the documents.
    """

    prepared: str
    sequence_length: Annotated[int, Field(ge=2, lt=2**31, strict=True)]
    num_workers: Annotated[int, Field(ge=0, strict=True)] = 0
    seed: Seed = 20260914


class TextTrainingRecipe(OptimizationRecipe):
    """How a model is trained on text.

    Attributes:
        weight_decay: of all but norms, biases and (T2MLR) scalars.
        fusion_learning_rate: of a T2MLR's fusion; null: as everything else.
        save_steps: a checkpoint every so many steps, at the end, and when the run is told to end.
        keep_checkpoints: how many of the last ones are kept.
        sharding: "fsdp2" divides weights, gradients and optimizer over the processes; "none": each has all (DDP).
        gradient_checkpointing: compute layers, and the passes of the recurrence, once more in the backward pass.
        torch_compile: compile the model.
        liger_kernel: kernels of the package liger-kernel, for GPUs.
        report_to: where metrics go beside metrics.jsonl.
    """

    fusion_learning_rate: Positive | None = None
    save_steps: Count = 100
    keep_checkpoints: Count = 2
    sharding: Literal["none", "fsdp2"] = "none"
    gradient_checkpointing: Annotated[bool, Field(strict=True)] = False
    torch_compile: Annotated[bool, Field(strict=True)] = False
    liger_kernel: Annotated[bool, Field(strict=True)] = False
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)


class GuardRecipe(Settings):
    """What becomes of a step whose loss or gradient is not as it should be.

    Attributes:
        nonfinite: "stop", or "skip" the step.
        spike: of a loss above `spike_factor` times the median of the `spike_window` losses before it: "ignore", "skip" or
            "stop".
    """

    nonfinite: Literal["stop", "skip"] = "stop"
    spike: Literal["ignore", "skip", "stop"] = "ignore"
    spike_factor: float = 2.0
    spike_window: Count = 100

    @model_validator(mode="after")
    def _is_one(self) -> "GuardRecipe":
        self.guard()
        return self

    def guard(self) -> StepGuard:
        return StepGuard(self.nonfinite, self.spike, self.spike_factor, self.spike_window)


class TextEvaluationRecipe(Settings):
    """How models are validated.

    Attributes:
        solver: of rlt and t2mlr, such as {name: sequential}; null: the one that the model is trained with.
        max_rows: validate on the first so many rows of the held-out documents; null: on all.
        gap_rows, gap_length: the train/decode gap is measured every `training.eval_steps` on the first tokens of so many
            rows; 0 rows: it is not.
    """

    solver: SolverSettings | None = None
    max_rows: Count | None = None
    gap_rows: Annotated[int, Field(ge=0, strict=True)] = 0
    gap_length: Count = 64


class TextRecipe(Settings):
    """One run on text."""

    data: TextDataRecipe
    model: ModelRecipe
    training: TextTrainingRecipe
    evaluation: TextEvaluationRecipe = TextEvaluationRecipe()
    curriculum: FeedbackCurriculum = FeedbackCurriculum()
    guard: GuardRecipe = GuardRecipe()
    seed: Seed = 42

    @model_validator(mode="after")
    def _fits_together(self) -> "TextRecipe":
        self.curriculum.check_model(self.model)
        check_model(self.model, self.evaluation.solver)
        if isinstance(self.model, LSTMRecipe):
            raise ValueError(
                "model: an lstm carries its state over the documents of a row: it is not trained on text here."
            )
        if isinstance(self.model, AnyRecipe):
            with one_kind_of_model_error():
                self.model.check_length(self.data.sequence_length)
        self._check_switches()
        refuse_impossible_sizes(type(self.model), self.model.model_dump_json(), self.model.vocab_size or 2)
        return self

    def _check_switches(self) -> None:
        training = self.training
        if isinstance(self.model, RLTRecipe) and self.model.given_positions:
            raise ValueError("model.given_positions: text says nothing of where its tokens stand. Leave it false.")
        if training.fusion_learning_rate is not None and not isinstance(self.model, T2MLRRecipe):
            raise ValueError("training.fusion_learning_rate has no effect: only a t2mlr has a fusion. Leave it null.")
        if training.gradient_checkpointing and isinstance(self.model, RLTRecipe):
            raise ValueError(
                "training.gradient_checkpointing is not for an rlt: its solver keeps less with "
                "model.solver={name: sequential, recompute_every: 64}."
            )
        if self.evaluation.gap_rows and not isinstance(self.model, RLTRecipe | T2MLRRecipe):
            raise ValueError("evaluation.gap_rows has no effect on a model without recurrence: set it to 0.")
        if self.evaluation.gap_rows and self.evaluation.gap_length > self.data.sequence_length:
            raise ValueError(
                f"evaluation.gap_length={self.evaluation.gap_length} is above "
                f"data.sequence_length={self.data.sequence_length}."
            )

    @property
    def folder(self) -> Path:
        """Of the prepared text."""
        return Path(self.data.prepared)
