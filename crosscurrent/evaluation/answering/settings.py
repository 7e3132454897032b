"""How problems are put to a model."""

import math
from dataclasses import dataclass
from typing import Any, get_args

from crosscurrent.evaluation.solver_choice import CONFIGURED, scoring_solver
from crosscurrent.recurrence import Solver
from crosscurrent.tasks.reasoning import ReasoningTask
from crosscurrent.tasks.reasoning.task import PromptFormat


@dataclass(frozen=True)
class AnsweringSettings:
    """How problems are put to a model, and how it answers.

    Attributes:
        batch_size: outputs per call of `generate`. It changes an output by rounding only.
        max_new_tokens: how long an output may be; None: as long as the task says.
        prompt_format: "chat" or "plain"; None: the task's.
        prompt_recurrence: whether prompt tokens are recurrent; None: as the model's `config.prompt_recurrence` says, which
            fine-tuning sets to what it trained. The task has no say here: it says what to train.
        solver: of the prompt, as `scoring_solver` takes it. Answers are written token by token, exactly, with every solver.
        num_samples: outputs of each problem.
        temperature: 0: the likeliest token each time (greedy); above 0: drawn at random, 1.0 as the model says.
        top_p: draw among the likeliest tokens of this total share.
        seed: of the draws.

    Raises:
        ValueError: a value is not allowed, or several outputs or a top_p are asked for without a temperature.

    Example:
        >>> AnsweringSettings(num_samples=8, temperature=0.7, top_p=0.95).is_greedy
        False
    """

    batch_size: int = 8
    max_new_tokens: int | None = None
    prompt_format: PromptFormat | None = None
    prompt_recurrence: bool | None = None
    solver: str | dict[str, Any] | Solver = CONFIGURED
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens", "num_samples"):
            value = getattr(self, name)
            if not (value is None and name == "max_new_tokens") and not (type(value) is int and value >= 1):
                raise ValueError(f"{name}={value!r} is not allowed: give a whole number of at least 1.")
        if self.prompt_format not in (None, *get_args(PromptFormat)):
            raise ValueError(
                f"prompt_format={self.prompt_format!r} is not allowed: give one of {', '.join(get_args(PromptFormat))}."
            )
        if self.prompt_recurrence not in (None, True, False):
            raise ValueError(f"prompt_recurrence={self.prompt_recurrence!r} is not allowed: give True, False or None.")
        scoring_solver(self.solver)
        self._check_sampling()

    def _check_sampling(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} is not allowed: give 0 for greedy, or a number above 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not allowed: give a number above 0 and up to 1.")
        if type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} is not allowed: give a whole number.")
        if self.is_greedy and self.num_samples > 1:
            raise ValueError(
                f"num_samples={self.num_samples} greedy outputs would all be the same: give a temperature, such as 0.7."
            )
        if self.is_greedy and self.top_p < 1:
            raise ValueError(f"top_p={self.top_p} has no effect without a temperature: give one, such as 0.7.")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0

    def length_for(self, task: ReasoningTask) -> int:
        """How many tokens an output to the task may have."""
        return task.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens

    def text_settings(self, task: ReasoningTask) -> dict[str, Any]:
        """What decides which text is asked for, whatever the model: plain values."""
        return {
            "max_new_tokens": self.length_for(task),
            "prompt_format": self.prompt_format or task.prompt_format,
            "num_samples": self.num_samples,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": None if self.is_greedy else self.seed,
        }
