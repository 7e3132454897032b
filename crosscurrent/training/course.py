"""The course of a training run, as far as it follows from what has been measured: lengths, the final decay, the end."""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosscurrent.training.schedules import Grown, Growth
from crosscurrent.training.trainer import validation_row


class Course:
    """Where a run stands. It follows from the rows of the metrics file alone, so a run that goes on reads them again and is
    where it was.

    Args:
        max_steps: the run is over then at the latest.
        decay_steps: the final decay takes so many steps, and the run is over after it; None: there is none.
        warmup_steps: the learning rate rises in a straight line to begin with.
        final_share: of the learning rate, at the end of the final decay.
        is_exponential: whether the final decay is one, and not a straight line; final_share is then above 0.
        growth: of the greatest length; None: it does not hang on losses.
        decay_from_length: the final decay begins when the growth has come to this length; None: when it is complete. Without
            a growth, or if it takes too long, it begins in time to end at max_steps.
        decay_again_from: share of the learning rate from which another decay begins at the end of one, as long as there are
            steps for a whole one; None: there is one decay.
        solved: for each name in a row of validation the value from which on it counts as solved. The run is over once all
            are reached; none: that does not end it.

    Example:
        >>> course = Course(max_steps=100, decay_steps=10, growth=Growth((2, 3), 1.5, loss_below=0.1, min_steps=1))
        >>> for step in (1, 2):
        ...     course.see({"step": step, "loss": 0.05})
        >>> course.max_length, [course.learning_rate_share(step) for step in (2, 7, 12)], course.is_over(12)
        (3, [1.0, 0.5, 0.0], True)
    """

    def __init__(
        self,
        max_steps: int,
        decay_steps: int | None = None,
        warmup_steps: int = 0,
        final_share: float = 0.0,
        is_exponential: bool = False,
        growth: Growth | None = None,
        decay_from_length: int | None = None,
        decay_again_from: float | None = None,
        solved: Mapping[str, float] | None = None,
    ):
        self.max_steps, self.decay_steps, self.warmup_steps = max_steps, decay_steps, warmup_steps
        self.final_share, self.is_exponential = final_share, is_exponential
        self.growth, self.decay_from_length, self.solved = growth, decay_from_length, dict(solved or {})
        self.decay_again_from = decay_again_from
        self._grown = None if growth is None else growth.start()
        self._decay_from = max(max_steps - (decay_steps or 0), 0)
        self._is_solved = False

    @property
    def max_length(self) -> int | None:
        """The greatest length there is now; None: nothing is said about it."""
        return None if self._grown is None else self._grown.value

    def see(self, row: Mapping[str, Any]) -> None:
        """Take note of a row of the metrics file: of a step with its `loss`, or of a validation."""
        if "loss" in row and self.growth is not None and self._grown is not None:
            self._grown = self.growth.after(self._grown, row["loss"])
            if self._begins_decay(self._grown):
                self._decay_from = min(self._decay_from, max(row["step"], self.warmup_steps))
        if self.solved and "validation_loss" in row:
            self._is_solved = all(row[name] >= share for name, share in self.solved.items())

    def _begins_decay(self, grown: Grown) -> bool:
        return grown.is_complete if self.decay_from_length is None else grown.value >= self.decay_from_length

    def is_over(self, step: int) -> bool:
        """Whether nothing is left to do after `step` steps."""
        return self._is_solved or step >= self.max_steps or self._has_decayed(step)

    def _has_decayed(self, step: int) -> bool:
        """Whether the last decay has come to its end after `step` steps."""
        if self.decay_steps is None or step < self._decay_from + self.decay_steps:
            return False
        into = (step - self._decay_from) % self.decay_steps
        return self.decay_again_from is None or (into == 0 and step + self.decay_steps > self.max_steps)

    def learning_rate_share(self, step: int) -> float:
        """Of the learning rate, in the step after `step` steps, if there is a final decay."""
        assert self.decay_steps is not None
        risen = min(step / self.warmup_steps, 1.0) if self.warmup_steps else 1.0
        first, decayed = 1.0, max(step - self._decay_from, 0) / self.decay_steps
        if self.decay_again_from is not None and decayed >= 1:
            first, decayed = self.decay_again_from, decayed % 1
        decayed = min(decayed, 1.0)
        if self.is_exponential:
            return risen * first * (self.final_share / first) ** decayed
        return risen * (first - decayed * (first - self.final_share))


class FollowsCourse(TrainerCallback):
    """Shows a course what is measured, and ends the training when it is over.

    Args:
        course: of the run.
    """

    def __init__(self, course: Course):
        self.course = course

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.course.is_over(state.global_step):
            control.should_evaluate = control.should_save = control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if "loss" in logs:
            self.course.see({"step": state.global_step, "loss": logs["loss"]})

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        self.course.see(validation_row(state.global_step, metrics))
        if self.course.is_over(state.global_step):
            control.should_save = control.should_training_stop = True
