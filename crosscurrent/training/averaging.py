"""An exponential moving average of a model's weights, kept beside the weights that are trained."""

from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_model, save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosscurrent.training.checkpoints import checkpoint_folder, one_kind_of_write_error

_FILE = "average.safetensors"


class WeightAverage(TrainerCallback):
    """Averages the weights after each step, and puts the average into each checkpoint, beside what training goes on from.

    It begins with the weights of the first step. Its Trainer must know it before any callback that takes checkpoints for
    complete.

    Args:
        decay: the average's weight when another step's weights are added: it looks back over about 1 / (1 - decay) steps.
            Before so many it is mostly what it began with.

    Raises:
        ValueError: the decay is not between 0 and 1.

    Example::

        average = WeightAverage(0.995)
        trainer = Trainer(model, callbacks=[average], ...)
        trainer.train()
        average.model  # has the averaged weights
    """

    def __init__(self, decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay} is not allowed: give a number between 0 and 1, such as 0.995.")
        self.decay = decay
        self._averaged: AveragedModel | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model with the averaged weights, the buffers of the last step, and the settings that training began with.

        Raises:
            ValueError: training has not begun.
        """
        if self._averaged is None:
            raise ValueError(
                "there is no average before training begins: give this to a Trainer's callbacks, and train."
            )
        return cast(PreTrainedModel, self._averaged.module)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        if state.global_step:
            load_average(self.model, checkpoint_folder(Path(str(args.output_dir)), state.global_step))
            self._averaged.n_averaged += 1  # or the next weights would take its place

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        assert self._averaged is not None
        self._averaged.update_parameters(model)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            file = checkpoint_folder(Path(str(args.output_dir)), state.global_step) / _FILE
            with one_kind_of_write_error(str(file)):
                save_model(self.model, str(file))


def load_average(model: nn.Module, checkpoint: Path) -> None:
    """Give a model the averaged weights of a checkpoint.

    Args:
        model: of the same shape, and on any device.
        checkpoint: the folder, as a `WeightAverage` has filled it.
    """
    load_model(model, str(checkpoint / _FILE))
