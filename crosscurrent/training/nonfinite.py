"""A training that stops, and says why, when a number is no longer finite."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crosscurrent.models.weight_names import list_names

_SHOWN = 5  # names in a message


class NonFiniteError(ValueError):
    """A loss, a gradient or a weight is NaN or infinite."""


class StopOnNonFinite(TrainerCallback):
    """Stops training before a loss or gradient that is not finite reaches the weights, and names the cause.

    For any Trainer of transformers or TRL. By default these leave such losses out of the log
    (`logging_nan_inf_filter`) and train on. Looked at are the loss of each microbatch, as the model returns it, and the
    gradients of each step before they are clipped. Where the Trainer computes the loss itself (label smoothing,
    `compute_loss_func`) the gradients alone tell. With fp16 the loss scaler answers for the gradients.

    Raises:
        NonFiniteError: names the step and the cause, the first that applies of: weights that are not finite, a carried
            state that overflowed, logits that did, the loss alone; or the parameters whose gradients are not finite.

    Example:
        >>> from transformers import TrainingArguments
        >>> callbacks = [StopOnNonFinite()]  # Trainer(..., callbacks=callbacks)
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._finite: dict[str, Tensor] = {}
        self._step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self._remove_hooks()
        names = _nonfinite_weights(model)
        if names:
            raise NonFiniteError(
                f"before step {state.global_step + 1} weights are not finite: {list_names(names, _SHOWN)}."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Hooks are there for a step only, so that none stay behind when something else ends the training."""
        self._remove_hooks()
        self._step = state.global_step + 1
        self._hooks.append(model.register_forward_hook(self._check_loss))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._noting(name)))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._remove_hooks()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if args.fp16:
            return  # the loss scaler leaves such steps out, and tries a smaller scale
        given = {name: _all_finite(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        if given and not bool(torch.stack(list(given.values())).all()):
            names = _not_finite(self._finite) or _not_finite(given)  # clipping has spread one parameter's NaN to all
            self._stop(f"gradients are not finite, of {list_names(names, _SHOWN)}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._remove_hooks()

    def _noting(self, name: str) -> Any:
        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._finite[name] = _all_finite(parameter.grad)  # read once per step: each read waits for the device

        return note

    def _check_loss(self, model: nn.Module, _: Any, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None and model.training and not bool(torch.isfinite(loss).all()):
            self._stop(f"the loss is {loss.detach().float().mean().item()}: {_cause(model, outputs)}")

    def _stop(self, what: str) -> None:
        self._remove_hooks()
        raise NonFiniteError(
            f"step {self._step}: {what}. The step was not made. Lower the learning rate, or look at this batch."
        )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._finite.clear()


def _cause(model: nn.Module, outputs: Any) -> str:
    names = _nonfinite_weights(model)
    if names:
        return f"weights are not finite, {list_names(names, _SHOWN)}"
    report = outputs.get("solver_report")
    if report is not None and not bool(torch.isfinite(report.residuals).all()):
        first = int((~torch.isfinite(report.residuals)).nonzero()[0])
        return f"the carried state is not finite from iteration {first + 1} of {report.iterations} on"
    logits = outputs.get("logits")
    if logits is not None and not bool(torch.isfinite(logits).all()):
        return "logits are not finite, though all weights and states are"
    return "the loss alone, logits are finite"


def _nonfinite_weights(model: nn.Module) -> list[str]:
    return _not_finite({name: _all_finite(parameter) for name, parameter in model.named_parameters()})


def _not_finite(flags: dict[str, Tensor]) -> list[str]:
    return [name for name, is_finite in flags.items() if not bool(is_finite)]


def _all_finite(tensor: Tensor) -> Tensor:
    """Whether all of a tensor is finite; of a shard, what lies on this process."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.isfinite(local.detach()).all()
