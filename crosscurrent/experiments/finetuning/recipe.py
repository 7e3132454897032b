"""A recipe of fine-tuning a pretrained model on a reasoning task.

In YAML, as `crosscurrent finetune` and `crosscurrent train` take it and as every run folder holds it::

    problems: {name: variable_assignment, options: {depth: 5}}
    base: {name: smollm2-135m, layer_start: 12, layer_end: 18}     # without the layers: the base as it is
    training: {method: full, max_steps: 200, batch_size: 16, learning_rate: 0.0001}
    seed: 42
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from crosscurrent.evaluation.answering import AnsweringSettings
from crosscurrent.experiments.architectures import Count, SolverSettings
from crosscurrent.experiments.recipe import OptimizationRecipe, Positive, Seed
from crosscurrent.experiments.settings import Settings
from crosscurrent.experiments.text_recipe import GuardRecipe
from crosscurrent.tasks.reasoning import ReasoningTask, get_reasoning_task
from crosscurrent.tasks.reasoning.task import Part, PromptFormat

Tokens = Annotated[int, Field(ge=2, lt=2**31, strict=True)]


class ProblemsRecipe(Settings):
    """What is learned and tested.

    Attributes:
        name: of a reasoning task.
        options: of the task, such as {depth: 5}.
        data: a folder or file with its data; null: the hub, or for generated tasks nothing.
        num_train: the first so many problems; null: all, of a generated task as many as are read.
        num_validation: problems whose loss is watched; null: the first 64, or fewer if there are fewer.
        num_test: problems that are answered in the end; null: all.
        prompt_format, loss_on, recurrent: null: as the task has them.
        max_length: longer examples are left out, and named; null: as long as the model takes.
        packed_length: examples share rows of so many tokens, each as if it were alone; null: they are padded.
        seed: of generated problems for validation and test; 0 is what `crosscurrent evaluate` asks, too.
    """

    name: str
    options: dict[str, Any] = {}
    data: str | None = None
    num_train: Count | None = None
    num_validation: Count | None = None
    num_test: Count | None = None
    prompt_format: PromptFormat | None = None
    loss_on: Part | None = None
    recurrent: Part | None = None
    max_length: Tokens | None = None
    packed_length: Tokens | None = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _exists(self) -> "ProblemsRecipe":
        assert self.task is not None  # raises if there is none
        if self.packed_length is not None and self.num_train is None and self.task.is_generated:
            raise ValueError(
                f"how many generated problems fill rows of packed_length={self.packed_length} is not known before: give "
                "num_train."
            )
        if self.packed_length is not None and self.max_length is not None and self.max_length > self.packed_length:
            raise ValueError(f"max_length={self.max_length} does not fit into packed_length={self.packed_length}.")
        return self

    @property
    def task(self) -> ReasoningTask:
        return get_reasoning_task(self.name, **self.options)

    @property
    def data_path(self) -> Path | None:
        return None if self.data is None else Path(self.data)


class BaseRecipe(Settings):
    """The pretrained model, and the recurrence that it is given.

    Attributes:
        name: smollm2-135m, a folder, or an id on the Hugging Face hub.
        layer_start, layer_end: the recurrent range, half-open, from 0; both null: none.
        solver: of the recurrence, in training and for prompts; null: the library's (docs/solvers.md).
        feedback_interval, detach_residual: as in `T2MLRConfig`.
    """

    name: str
    layer_start: Annotated[int, Field(ge=0, strict=True)] | None = None
    layer_end: Count | None = None
    solver: SolverSettings | None = None
    feedback_interval: Count = 1
    detach_residual: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _is_range_or_none(self) -> "BaseRecipe":
        if (self.layer_start is None) != (self.layer_end is None):
            raise ValueError("give both layer_start and layer_end, or neither.")
        if self.layer_start is not None and self.layer_end is not None and self.layer_start >= self.layer_end:
            raise ValueError(f"layer_start={self.layer_start} is not below layer_end={self.layer_end}.")
        if not self.is_recurrent:
            untouched = type(self)(name=self.name, layer_start=0, layer_end=1)
            for name in ("solver", "feedback_interval", "detach_residual"):
                if getattr(self, name) != getattr(untouched, name):
                    raise ValueError(f"{name} has no effect without a range: give layer_start and layer_end.")
        return self

    @property
    def is_recurrent(self) -> bool:
        return self.layer_start is not None

    @property
    def alone(self) -> "BaseRecipe":
        """Without the recurrence."""
        return BaseRecipe(name=self.name)


class LoraRecipe(Settings):
    """LoRA (PEFT) on the base's linear layers.

    Attributes:
        r, lora_alpha, lora_dropout: as in PEFT's `LoraConfig`.
    """

    r: Count = 16
    lora_alpha: Positive = 32
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class FinetuningRecipe(OptimizationRecipe):
    """How a pretrained model is fine-tuned.

    Attributes:
        method: "full": everything; "lora": adapters on the base, and the fusion; "fusion": the fusion alone.
        fusion_learning_rate: of what the retrofit added; null: 100 times the learning rate, as published.
        lora: of method lora.
        weight_decay: of all but norms, biases and scalars.
        save_steps: a checkpoint every so many steps; the last one is kept until the run is done.
        gradient_checkpointing: compute layers once more in the backward pass.
    """

    method: Literal["full", "lora", "fusion"] = "full"
    fusion_learning_rate: Positive | None = None
    lora: LoraRecipe | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    save_steps: Count = 200
    gradient_checkpointing: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _lora_has_effect(self) -> "FinetuningRecipe":
        if self.lora is not None and self.method != "lora":
            raise ValueError(f"lora has no effect with method={self.method}: leave it out, or take method=lora.")
        return self


class AnsweringRecipe(Settings):
    """How the fine-tuned model is tested: it writes its answers, greedily, unless a temperature is given.

    Attributes:
        batch_size: prompts at a time. It changes no answer but by rounding.
        max_new_tokens: null: as the task has it.
        num_samples, temperature, top_p: of pass@k.
        seed: of the samples.
    """

    batch_size: Count = 16
    max_new_tokens: Count | None = None
    num_samples: Count = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Seed = 0


class FinetuneRecipe(Settings):
    """One run of fine-tuning.

    Attributes:
        problems, base, training, evaluation: the parts.
        guard: what becomes of a step whose loss or gradient is not as it should be.
        seed: of the problems that are generated to learn from, of their order, and of the starting weights of what is new.
            Runs with one seed learn from the same, with and without recurrence.
    """

    problems: ProblemsRecipe
    base: BaseRecipe
    training: FinetuningRecipe
    evaluation: AnsweringRecipe = AnsweringRecipe()
    guard: GuardRecipe = GuardRecipe()
    seed: Seed = 42

    @model_validator(mode="after")
    def _fits_together(self) -> "FinetuneRecipe":
        if self.training.method == "fusion" and not self.base.is_recurrent:
            raise ValueError("training.method=fusion trains what a retrofit adds: give base.layer_start and layer_end.")
        if self.training.fusion_learning_rate is not None and not self.base.is_recurrent:
            raise ValueError("training.fusion_learning_rate has no effect without a range: leave it null.")
        if self.problems.recurrent is not None and not self.base.is_recurrent:
            raise ValueError("problems.recurrent has no effect without a range: leave it null.")
        assert self.answering is not None  # raises if the settings do not fit together
        return self

    @property
    def answering(self) -> AnsweringSettings:
        return AnsweringSettings(prompt_format=self.problems.prompt_format, **self.evaluation.model_dump())

    @property
    def part_that_recurs(self) -> Part:
        return self.problems.recurrent or self.problems.task.recurrent
