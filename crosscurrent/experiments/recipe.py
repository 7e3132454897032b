"""A recipe: everything that one run depends on, validated.

In YAML, as `crosscurrent train` takes it and as every run folder holds it::

    task: {name: parity, prefix_supervision: true}
    model: {architecture: rlt, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 2, intermediate_size: 168,
            num_decoder_layers: 2, feedback_interval: 1}
    training: {max_steps: 300, batch_size: 128, learning_rate: 0.001}
    seed: 42
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field, model_validator

from crosscurrent.evaluation.scoring import METRICS
from crosscurrent.experiments.architectures import (
    AnyRecipe,
    Count,
    ModelRecipe,
    RLTRecipe,
    Size,
    SolverSettings,
    T2MLRRecipe,
)
from crosscurrent.experiments.settings import Settings
from crosscurrent.suggestions import did_you_mean
from crosscurrent.tasks import Task, get_task
from crosscurrent.tasks.splits import Split
from crosscurrent.training.schedules import Growth, Ramp, Steps

Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]  # what numpy takes
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]


class TaskRecipe(Settings):
    """Which task, and which of its examples. What is left out, or null, is as in the published study.

    Attributes:
        name: of a registered task.
        prefix_supervision: whether the loss covers the answer to every prefix.
        train_lengths, validation_lengths, test_lengths: of the payloads.
        num_validation, num_test: examples per length.
    """

    name: str
    prefix_supervision: Annotated[bool, Field(strict=True)]
    train_lengths: tuple[int, ...]
    validation_lengths: tuple[int, ...]
    test_lengths: tuple[int, ...]
    num_validation: Count
    num_test: Count

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            return given  # what is wrong with it is said below
        task = get_task(given["name"])
        published = {
            "prefix_supervision": task.prefix_supervision,
            "train_lengths": task.lengths.train,
            "validation_lengths": task.lengths.validation,
            "test_lengths": task.lengths.test,
            "num_validation": task.num_validation,
            "num_test": task.num_test,
        }
        return published | {key: value for key, value in given.items() if value is not None or key not in published}

    @model_validator(mode="after")
    def _lengths_exist(self) -> "TaskRecipe":
        for split, lengths in self.lengths.items():
            if not lengths or len(set(lengths)) < len(lengths):
                raise ValueError(f"{split}_lengths={list(lengths)}: give at least one length, and each once.")
            for length in lengths:
                self.task.check_length(length, split)
        unknown = next((metric for metric in self.task.metrics if metric not in METRICS), None)
        if unknown is not None:
            raise ValueError(f"{self.name} has a metric {unknown!r} that there is not.{did_you_mean(unknown, METRICS)}")
        return self

    @property
    def lengths(self) -> dict[Split, tuple[int, ...]]:
        """Of the payloads, by split."""
        return {"train": self.train_lengths, "validation": self.validation_lengths, "test": self.test_lengths}

    @property
    def task(self) -> Task:
        return get_task(self.name)


class OptimizationRecipe(Settings):
    """How any model is trained: AdamW, a warm-up, a cosine to `min_learning_rate`.

    Attributes:
        max_steps: optimizer steps.
        batch_size: examples (of texts: rows) per step, over all processes.
        microbatch_size: examples per forward call of a process; null: the batch divided by the processes.
        learning_rate, min_learning_rate, warmup_steps: rise in a straight line, then a cosine that ends at the minimum.
        weight_decay: of matrices.
        adam_beta1, adam_beta2: of AdamW.
        max_grad_norm: gradients are clipped to it.
        eval_steps: validation every so many steps.
        precision: "fp32", or autocast to "bf16" or "fp16" (on a GPU).
    """

    max_steps: Count
    batch_size: Count
    microbatch_size: Count | None = None
    learning_rate: Positive
    min_learning_rate: Share = 0.0
    warmup_steps: Annotated[int, Field(ge=0, strict=True)] = 0
    weight_decay: Share = 0.1
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    max_grad_norm: Positive = 1.0
    eval_steps: Count = 100
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"

    @model_validator(mode="after")
    def _fits(self) -> "OptimizationRecipe":
        if self.microbatch_size is not None and self.batch_size % self.microbatch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of microbatch_size={self.microbatch_size}."
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate={self.min_learning_rate} is above learning_rate={self.learning_rate}.")
        return self


class TrainingRecipe(OptimizationRecipe):
    """How a model is trained on a task; each validation leaves a checkpoint.

    Attributes:
        mup_base_width: learning rates and starting weights as for this width (width-muP); null: no scaling.
        decay_steps: in place of the cosine the learning rate is constant, and falls to its minimum over so many steps at the
            end: once `curriculum.max_length` has grown to its last value and that is learned, or at
            `max_steps - decay_steps`. The run is over then. null: the cosine.
        decay_from_length: that fall begins once `curriculum.max_length` has grown to this length, and lengths go on growing
            in it; null: once the last is learned.
        decay_again_from: at the end of that fall there is another one, from this share of learning_rate, and so on, as long
            as the run is not solved (`solved_at`) and max_steps has room for a whole one. null: there is one.
        decay_shape: of that fall: "linear", a straight line, or "exponential", by the same factor in each step, so that more
            of the steps have a low rate.
        max_tokens: a forward call takes no more tokens: of longer examples it takes fewer than microbatch_size, but at least
            one. null: no limit.
        solved_at: the run is over once the task's first metric comes to this share at every validation length. null: it is
            not looked at.
        ema_decay: validated, tested and saved are not the weights of a step but their exponential moving average, in which
            what there is so far has this weight when another step is added. null: the weights of a step.
    """

    mup_base_width: Count | None = None
    decay_steps: Count | None = None
    decay_from_length: Count | None = None
    decay_again_from: Annotated[float, Field(gt=0, le=1)] | None = None
    decay_shape: Literal["linear", "exponential"] = "linear"
    max_tokens: Count | None = None
    solved_at: Annotated[float, Field(gt=0, le=1)] | None = None
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _decays_in_time(self) -> "TrainingRecipe":
        if self.decay_steps is not None and self.decay_steps > self.max_steps:
            raise ValueError(f"decay_steps={self.decay_steps} is above max_steps={self.max_steps}.")
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps} are together more than "
                f"max_steps={self.max_steps}: the learning rate would not come to what is asked for."
            )
        if self.decay_from_length is not None and self.decay_steps is None:
            raise ValueError("decay_from_length needs decay_steps: without them there is no final decay.")
        if self.decay_again_from is not None and (self.decay_steps is None or self.solved_at is None):
            raise ValueError(
                "decay_again_from needs decay_steps, and solved_at, which says when no other decay is needed."
            )
        if self.decay_again_from is not None and self.decay_again_from * self.learning_rate < self.min_learning_rate:
            raise ValueError(
                f"decay_again_from={self.decay_again_from} of learning_rate={self.learning_rate} is below "
                f"min_learning_rate={self.min_learning_rate}: there is nothing to fall."
            )
        if self.decay_shape == "exponential" and (self.decay_steps is None or self.min_learning_rate == 0):
            raise ValueError("decay_shape=exponential needs decay_steps, and a min_learning_rate above 0 to fall to.")
        return self


class Curve(Settings):
    """A value for every step: `{steps: [[0, 16], [100, 4], [200, 1]]}`, or `{ramp: [4, 32], num_steps: 500}`.

    Attributes:
        steps: (step, value) pairs; a value holds from its step on.
        ramp: first and last value of a straight line.
        num_steps: where the line ends.
    """

    steps: tuple[tuple[int, float], ...] | None = None
    ramp: tuple[float, float] | None = None
    num_steps: Count | None = None

    @model_validator(mode="after")
    def _is_one_form(self) -> "Curve":
        self._check_form()
        return self

    def _check_form(self) -> None:
        if (self.steps is None) == (self.ramp is None) or (self.ramp is None) != (self.num_steps is None):
            raise ValueError("give either steps, or ramp and num_steps.")
        self.of_step()

    @property
    def ends(self) -> tuple[float, ...]:
        """Values between which all others lie."""
        return self.ramp if self.ramp is not None else tuple(value for _, value in self.steps or ())

    def of_step(self) -> Callable[[int], float]:
        """The function that gives the value of a step."""
        if self.steps is not None:
            return Steps(self.steps)
        assert self.ramp is not None and self.num_steps is not None
        return Ramp(*self.ramp, self.num_steps)


class FeedbackCurriculum(Settings):
    """What changes in the course of training. Validation and tests see the model as `model` describes it.

    Attributes:
        feedback_interval: of rlt and t2mlr; rounded to whole numbers.
        feedback_scale: of rlt.
    """

    feedback_interval: Curve | None = None
    feedback_scale: Curve | None = None

    @model_validator(mode="after")
    def _counts(self) -> "FeedbackCurriculum":
        for name in {"feedback_interval", "max_length"} & set(type(self).model_fields):
            curve = getattr(self, name)
            strange = [value for value in curve.ends if not 1 <= value < 2**31] if curve is not None else []
            if strange:
                raise ValueError(f"{name}: {strange[0]} is not allowed: give values of at least 1.")
        return self

    def check_model(self, model: Size) -> None:
        """Raise ValueError if a model has not what is to change."""
        interval = getattr(model, "feedback_interval", None)
        if self.feedback_interval is not None and interval is None:
            raise ValueError(
                "curriculum.feedback_interval needs a model with feedback (rlt or t2mlr with an interval)."
            )
        if self.feedback_scale is not None and (not isinstance(model, RLTRecipe) or interval is None):
            raise ValueError("curriculum.feedback_scale needs an rlt with feedback.")


class GrowthSettings(Settings):
    """When the greatest length grows, along the training lengths: see `crosscurrent.training.schedules.Growth`.

    Attributes:
        first, last: of the training lengths that it takes.
        factor: from one to the next, rounded down, at least.
        loss_below: it grows when the smoothed training loss falls below this.
        smoothing: of the loss.
        min_steps: at each length.
    """

    first: Count
    last: Count
    factor: float
    loss_below: float
    smoothing: float = Growth.smoothing
    min_steps: Count = Growth.min_steps

    @model_validator(mode="after")
    def _is_allowed(self) -> "GrowthSettings":
        self.along((self.first, self.last))
        return self

    def along(self, lengths: Iterable[int]) -> Growth:
        """The growth from the first to the last of these lengths."""
        if self.last < self.first:
            raise ValueError(f"last={self.last} is below first={self.first}: a growth does not shrink.")
        values = tuple(sorted(length for length in set(lengths) if self.first <= length <= self.last))
        return Growth(values, self.factor, self.loss_below, self.smoothing, self.min_steps)


class LengthCurve(Curve):
    """As a Curve, or `{growth: {first: 2, last: 32, factor: 1.25, loss_below: 0.06}}`: as the loss allows.

    Attributes:
        growth: in place of steps or a ramp.
    """

    growth: GrowthSettings | None = None

    def _check_form(self) -> None:
        has_curve = (self.steps, self.ramp, self.num_steps) != (None, None, None)
        if has_curve == (self.growth is not None):
            raise ValueError("give either growth, or steps, or ramp and num_steps.")
        if has_curve:
            super()._check_form()


class CurriculumRecipe(FeedbackCurriculum):
    """What changes in the course of training on a task.

    Attributes:
        max_length: longer training lengths are not drawn yet.
        longest_share: so large a share of the microbatches has the greatest length there is at the time, the others any.
        state_noise: of rlt, as (greatest length, noise) pairs: from that greatest length on noise is so large, in place of
            `model.state_noise`.
    """

    max_length: LengthCurve | None = None
    state_noise: tuple[tuple[Count, Annotated[float, Field(ge=0, allow_inf_nan=False)]], ...] | None = None
    longest_share: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def growth(self) -> GrowthSettings | None:
        """Of the greatest length, if that follows the loss."""
        return None if self.max_length is None else self.max_length.growth


class EvaluationRecipe(Settings):
    """How models are validated and tested.

    Attributes:
        solver: of rlt and t2mlr, such as {name: sequential}; null: the one that the model is trained with.
        batch_size: examples per forward call.
        segment_length: longer examples are read in segments of so many tokens, which bounds the memory that they take; null:
            in one call. With a solver that is not exact, such as {name: jacobi}, scores are then those of the segments,
            whose starts are exact.
    """

    solver: SolverSettings | None = None
    batch_size: Count = 256
    segment_length: Count | None = None


class DataSeeds(Settings):
    """Seeds of the examples, which all runs of a study share; the defaults are the RLT report's."""

    train: Seed = 20260914
    validation: Seed = 20260915
    test: Seed = 20260916


class Recipe(Settings):
    """One run."""

    task: TaskRecipe
    model: ModelRecipe
    training: TrainingRecipe
    evaluation: EvaluationRecipe = EvaluationRecipe()
    curriculum: CurriculumRecipe = CurriculumRecipe()
    data_seeds: DataSeeds = DataSeeds()
    seed: Seed = 42

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        smallest = len(self.task.task.vocabulary)
        if self.model.vocab_size is not None and self.model.vocab_size < smallest:
            raise ValueError(f"model.vocab_size={self.model.vocab_size}: {self.task.name} needs at least {smallest}.")
        self.curriculum.check_model(self.model)
        self._check_growth()
        self._check_noise()
        self._check_positions()
        check_model(self.model, self.evaluation.solver)
        if self.training.mup_base_width is not None and self.model.architecture in ("lstm", "transformers"):
            raise ValueError(
                f"training.mup_base_width is not for architecture={self.model.architecture}: leave it null."
            )
        if isinstance(self.model, AnyRecipe):
            with one_kind_of_model_error():
                self.model.check_length(max(self._num_tokens()))
        refuse_impossible_sizes(type(self.model), self.model.model_dump_json(), self.vocab_size)
        return self

    def _check_growth(self) -> None:
        """Raise ValueError if the greatest length is to grow from or to one that there is not."""
        growth, lengths = self.curriculum.growth, self.task.train_lengths
        if growth is not None and not {growth.first, growth.last} <= set(lengths):
            raise ValueError(
                f"curriculum.max_length grows from {growth.first} to {growth.last}: both must be among task.train_lengths, "
                f"{list(lengths)}."
            )
        begin = self.training.decay_from_length
        if begin is not None and (growth is None or not growth.first < begin <= growth.last):
            grown = "does not grow with the loss" if growth is None else f"grows from {growth.first} to {growth.last}"
            raise ValueError(
                f"training.decay_from_length={begin}: curriculum.max_length {grown}. Give a length above the first, and "
                "no more than the last."
            )
        if self.training.decay_again_from is not None and growth is None:
            raise ValueError(
                "training.decay_again_from has no effect: without a growth of curriculum.max_length the one decay ends with "
                "the run."
            )
        if self.curriculum.longest_share and len(lengths) == 1:
            raise ValueError(f"curriculum.longest_share has no effect: task.train_lengths are {lengths[0]} alone.")

    def _check_noise(self) -> None:
        """Raise ValueError unless noise that changes with the greatest length has a model, and lengths to change at."""
        points = self.curriculum.state_noise
        if points is None:
            return
        if not isinstance(self.model, RLTRecipe) or self.model.feedback_interval is None:
            raise ValueError("curriculum.state_noise needs an rlt with feedback.")
        if self.model.solver["name"] != "sequential":
            raise ValueError(f"curriculum.state_noise needs the solver sequential, not {self.model.solver['name']}.")
        curve = self.curriculum.max_length
        if curve is None:
            raise ValueError("curriculum.state_noise goes with the greatest length: it needs curriculum.max_length.")
        ends = curve.ends if curve.growth is None else (curve.growth.first, curve.growth.last)
        shortest, longest = min(ends), max(ends)
        lengths = [length for length, _ in points]
        if not lengths or lengths != sorted(set(lengths)) or not shortest < lengths[0] or lengths[-1] > longest:
            raise ValueError(
                f"curriculum.state_noise={[list(point) for point in points]}: give [greatest length, noise] pairs whose "
                f"lengths rise, above {shortest:g}, where model.state_noise holds, and up to {longest:g}, as far as "
                "curriculum.max_length comes."
            )

    def _check_positions(self) -> None:
        """Raise ValueError unless the model takes the task's positions, and no others."""
        model, has_positions = self.model, self.task.task.has_positions
        if isinstance(model, RLTRecipe) and model.given_positions and not has_positions:
            raise ValueError(f"model.given_positions has no effect: {self.task.name} has no positions of its own.")
        if has_positions and not model.takes_positions:
            raise ValueError(
                f"{self.task.name} says where its tokens stand, and this model does not take that: allowed are "
                "architecture=rlt with given_positions=true, and architecture=transformer with positions=rope."
            )

    def _num_tokens(self) -> list[int]:
        """Of the longest examples of each split."""
        task = self.task.task
        return [len(task.example(split, max(lengths), 0).tokens) for split, lengths in self.task.lengths.items()]

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size or len(self.task.task.vocabulary)


def check_model(model: Size, evaluation_solver: SolverSettings | None) -> None:
    """Raise ValueError if the layers of a model do not fit together, or it cannot be evaluated with a solver."""
    if evaluation_solver is not None and not isinstance(model, RLTRecipe | T2MLRRecipe):
        raise ValueError(f"evaluation.solver has no meaning for architecture={getattr(model, 'architecture', None)}.")
    if isinstance(model, RLTRecipe) and model.state_noise and model.solver["name"] != "sequential":
        raise ValueError(
            f"model.state_noise={model.state_noise} needs the solver sequential in training, not {model.solver['name']}: "
            "each of its passes would see other states. evaluation.solver may be another one."
        )
    if isinstance(model, RLTRecipe) and model.num_decoder_layers >= model.num_hidden_layers:
        raise ValueError(
            f"model.num_decoder_layers={model.num_decoder_layers} leaves no encoder layer of "
            f"num_hidden_layers={model.num_hidden_layers}: at least one is needed."
        )
    if isinstance(model, T2MLRRecipe) and not model.layer_start < model.layer_end <= model.num_hidden_layers:
        raise ValueError(
            f"model.layer_start={model.layer_start}, layer_end={model.layer_end}: allowed is "
            f"0 <= layer_start < layer_end <= num_hidden_layers={model.num_hidden_layers}."
        )


@cache
def refuse_impossible_sizes(kind: type[Size], settings: str, vocab_size: int) -> None:
    """Raise ValueError unless a model of these sizes can be built, which is tried without memory for its weights.

    Args:
        kind, settings: the model's recipe, as JSON: runs of a study that share it are checked once.
    """
    with torch.device("meta"), one_kind_of_model_error():
        kind.model_validate_json(settings).build(vocab_size)


@contextmanager
def one_kind_of_model_error() -> Iterator[None]:
    """Make a ValueError of whatever a model's class says to settings that do not fit."""
    strange = (StrictDataclassError, ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError)
    try:
        yield
    except strange as error:
        raise ValueError(f"model: these settings do not make a model: {' '.join(str(error).split())}") from error
