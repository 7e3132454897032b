"""Settings of the solver that change in the course of training, for any Trainer of transformers or TRL."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.wrapped import recurrent_model
from crosscurrent.recurrence import Implicit, Jacobi, as_solver
from crosscurrent.training.schedules import Ramp, Steps

Count = int | Steps | Ramp


class SolverSchedule(TrainerCallback):
    """Trains with another number of Jacobi iterations as training goes on.

    Before each step it sets `model.config.solver`; all other settings of that solver stay. The values depend on the step
    alone, so a run that is resumed goes on as if it had not stopped. Evaluation uses the solver of the step before it.
    Nothing is set back at the end: each checkpoint, and the final model, is saved with the solver that its last step was
    trained with.

    Args:
        iterations: d_forward; a number, or one that changes with the step (values of a `Ramp` are rounded).
        backward_iterations: d_backward, in the same way: gradients then flow through the last passes. None: as the
            model's solver has it.

    Raises:
        ValueError: at some step a value is not allowed, such as more backward iterations than iterations; or, when
            training starts, the model is not recurrent or its solver is not Jacobi.

    Example:
        >>> schedule = SolverSchedule(iterations=Steps([(0, 4), (1000, 16)]), backward_iterations=Ramp(1, 4, 2000))
        >>> schedule.at(0), schedule.at(1000)
        ((4, 1), (16, 2))
        >>> SolverSchedule(iterations=Steps([(0, 4), (1000, 2)]), backward_iterations=4)
        Traceback (most recent call last):
        ValueError: from step 1000 on: backward_iterations=4 is not allowed: give 1 to iterations=2.
    """

    def __init__(self, iterations: Count, backward_iterations: Count | None = None):
        self.iterations, self.backward_iterations = iterations, backward_iterations
        for step in self._change_points():
            try:
                self.changed(Jacobi(1, gradient=Implicit()), step)
            except ValueError as error:
                raise ValueError(f"from step {step} on: {error}") from None

    def _change_points(self) -> list[int]:
        return sorted({*_change_points(self.iterations), *_change_points(self.backward_iterations)})

    def at(self, step: int) -> tuple[int, int | None]:
        """(iterations, backward_iterations) of the step after `step` steps."""
        return _value(self.iterations, step), _value(self.backward_iterations, step)

    def changed(self, solver: Jacobi, step: int) -> Jacobi:
        """The solver of the step after `step` steps, given the model's."""
        iterations, backward_iterations = self.at(step)
        if backward_iterations is None:
            return replace(solver, iterations=iterations)
        return replace(solver, iterations=iterations, backward_iterations=backward_iterations, gradient=None)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        for step in self._change_points():
            self.changed(self._solver_of(recurrent_model(model)), step)  # now, not in the middle of training
        self._set(recurrent_model(model), state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self._set(recurrent_model(model), state.global_step)

    def _set(self, model: RecurrentCausalLM, step: int) -> None:
        model.config.solver = self.changed(self._solver_of(model), step)  # type: ignore[attr-defined]

    def _solver_of(self, model: RecurrentCausalLM) -> Jacobi:
        solver = as_solver(model.config.solver)  # type: ignore[attr-defined]
        if not isinstance(solver, Jacobi):
            raise ValueError(
                f"the model's solver is {solver!r}, which has no iterations to change: set model.config.solver = "
                "cc.Jacobi(...), or train without SolverSchedule."
            )
        return solver


def _value(count: Count | None, step: int) -> Any:
    if isinstance(count, Ramp):
        return round(count(step))
    return count(step) if isinstance(count, Steps) else count


def _change_points(count: Count | None) -> Iterable[int]:
    """The steps at which the value may change, and 0."""
    if isinstance(count, Ramp):
        return range(count.num_steps + 1)
    return [start for start, _ in count.points] if isinstance(count, Steps) else [0]
