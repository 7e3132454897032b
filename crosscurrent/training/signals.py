"""A training that is told to end (SIGTERM) and ends well: after the step it is in, with a checkpoint."""

import signal
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosscurrent.training.terminated import TerminatedError


class StopOnSignal(TrainerCallback):
    """Ends training at a SIGTERM, which batch systems and torchrun send before they kill.

    The step that is running is finished and a checkpoint is written, in all processes if any of them got the signal. A
    context, outside of which signals do what they did before::

        with StopOnSignal() as stop:
            Trainer(..., callbacks=[stop]).train()
        if stop.step is not None:
            ...

    Attributes:
        step: after which training ended; None if no signal came.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._is_wanted = False

    def __enter__(self) -> "StopOnSignal":
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """A signal that came after the last step is not lost: what comes next is told to end."""
        signal.signal(signal.SIGTERM, self._before)
        if self._is_wanted and self.step is None:
            signal.raise_signal(signal.SIGTERM)

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        self._is_wanted = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if self._anybody_wants(args.device):
            self.step = state.global_step
            control.should_save = control.should_training_stop = True
        return control

    def _anybody_wants(self, device: torch.device) -> bool:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self._is_wanted
        wanted = torch.tensor(int(self._is_wanted), device=device)
        torch.distributed.all_reduce(wanted, torch.distributed.ReduceOp.MAX)
        return bool(wanted)

    def check(self, what: str) -> None:
        """Raise TerminatedError if a signal ended the training of `what`, be it in its last step."""
        if self.step is not None:
            raise TerminatedError(
                f"{what} was told to end (SIGTERM): the checkpoint of step {self.step} is written, and the same command "
                "goes on from it.",
                signal.SIGTERM,
            )
