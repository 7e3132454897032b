"""Callbacks of transformers' Trainer that measure the recurrence while a model is trained.

What they measure joins the training loss in the same log: `state.log_history`, the console, TensorBoard.
"""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosscurrent.evaluation.gap import Gap, train_decode_gap
from crosscurrent.evaluation.probing import Batch, in_order, read_inputs
from crosscurrent.evaluation.telemetry import measure_recurrence, t2mlr_model
from crosscurrent.models.wrapped import recurrent_model

Self = TypeVar("Self", bound="Monitor")


class Monitor(TrainerCallback):
    """Measures at every `every`-th log of the training loss, starting with the first, and adds the values to that log.

    A Trainer asks its callbacks in their order, and those passed to it come after the ones that write to TensorBoard and
    the console. So a monitor is put before them with `attach_to`, which returns it::

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        RecurrenceTelemetry(probe).attach_to(trainer)
        trainer.train()

    Passed as `callbacks=[...]` its values reach `state.log_history` only, and it warns.

    Measuring leaves training as it was: no gradients, evaluation mode for its duration, the random state restored. Every
    process measures, since where layers are sharded all have to take part.

    Args:
        every: measure at every so many logs (which come every `logging_steps`).
    """

    prefix: str

    def __init__(self, every: int = 1):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} is not allowed: give an integer of at least 1.")
        self.every = every
        self._num_logs = 0
        self._is_first = False

    def attach_to(self: Self, trainer: Trainer) -> Self:
        """Join a Trainer, before the callbacks that write logs somewhere.

        Raises:
            ValueError: the model that it trains cannot be measured on what is given.
        """
        self.check(trainer.model)
        trainer.pop_callback(self)  # in case it was passed to the Trainer as well
        trainer.callback_handler.callbacks.insert(0, self)
        self._is_first = True
        return self

    def check(self, model: Any) -> None:
        """Raise ValueError if the model cannot be measured on what is given."""
        raise NotImplementedError

    def measure(self, model: Any) -> dict[str, float]:
        """The values, by name."""
        raise NotImplementedError

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self.check(model)
        self._num_logs = sum("loss" in row for row in state.log_history)  # of the run that this one resumes
        if not self._is_first:
            warnings.warn(
                f"{type(self).__name__} was passed to the Trainer as a callback, so its values reach state.log_history "
                f"but neither console nor TensorBoard: use {type(self).__name__}(...).attach_to(trainer) instead.",
                stacklevel=2,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: Any = None,
        **_: Any,
    ) -> None:
        if "loss" not in logs:  # of an evaluation, or the summary at the end
            return
        if self._num_logs % self.every == 0:
            values = {f"{self.prefix}/{name}": value for name, value in self.measure(model).items()}
            logs.update(values)
            state.log_history[-1].update(values)  # which holds a copy of the logs
        self._num_logs += 1


class RecurrenceTelemetry(Monitor):
    """Logs what a T2MLR model's recurrence does on a probe batch (`crosscurrent.evaluation.telemetry`).

    The values are `recurrence/` and current_gate, recurrent_gate, current_opening, recurrent_opening, stream_norm,
    state_norm, change, residual_1 ..., effective_memory, effective_memory_clean. The last two, in tokens, are left out
    while the memory is longer than the horizon.

    Args:
        batch: the probe: token ids [B, T], or a mapping with `input_ids`, `attention_mask`, ... Keep it small: it costs
            about T + 3 * horizon single-token steps each time.
        every: measure at every so many logs.
        horizon: watch a perturbation of the state for at most so many tokens.

    Raises:
        ValueError: every is below 1, or the model that is trained is not a T2MLR model with feedback.

    Example::

        RecurrenceTelemetry(tokenizer("The capital of France", return_tensors="pt"), every=10).attach_to(trainer)
    """

    prefix = "recurrence"

    def __init__(self, batch: Batch, every: int = 1, horizon: int = 32):
        super().__init__(every)
        self.batch, self.horizon = batch, horizon

    def check(self, model: Any) -> None:
        read_inputs(t2mlr_model(model), self.batch)

    def measure(self, model: Any) -> dict[str, float]:
        return measure_recurrence(model, self.batch, self.horizon).named()


class TrainDecodeGap(Monitor):
    """Logs the train/decode gap of the model's configured solver on examples (`crosscurrent.evaluation.gap`).

    The values are `gap/` and loss (the difference of the two losses), training_loss, exact_loss, token_agreement,
    mean_difference, max_difference, residual_1, ... (the
    mean over those batches that ran so many iterations: where short ones drop out it may jump).

    Args:
        examples: one batch, or a sequence of batches or of single examples, as `train_decode_gap` takes them. Keep them
            few: they are scored token by token each time.
        every: measure at every so many logs.

    Raises:
        ValueError: every is below 1, there are no examples, or the model that is trained is not recurrent.

    Example::

        TrainDecodeGap(validation_set.select(range(8)), every=10).attach_to(trainer)
    """

    prefix = "gap"

    def __init__(self, examples: Batch | Sequence[Batch], every: int = 1):
        super().__init__(every)
        if len(examples) == 0:
            raise ValueError("there are no examples to measure the gap on: give at least one.")
        self.examples = examples

    def check(self, model: Any) -> None:
        inner = recurrent_model(model)
        for batch in in_order(self.examples):
            read_inputs(inner, batch)

    def measure(self, model: Any) -> dict[str, float]:
        gap: Gap = train_decode_gap(model, self.examples)
        names = ("exact_loss", "token_agreement", "mean_difference", "max_difference")
        values = {"loss": gap.loss_difference, "training_loss": gap.loss}
        values |= {name: getattr(gap, name) for name in names}
        return values | {f"residual_{place}": value for place, value in enumerate(gap.mean_residuals, start=1)}
