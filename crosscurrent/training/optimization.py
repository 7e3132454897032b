"""A learning rate of its own for the fusion: new weights beside pretrained ones."""

import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.trainer_optimizer import is_optimizer_factory

from crosscurrent.models.t2mlr import T2MLRForCausalLM
from crosscurrent.models.wrapped import recurrent_model

_OWN_GROUPS = ("params", "model", "optimizer_dict")  # transformers' marks of an optimizer that groups parameters itself


def fusion_optimizer(args: TrainingArguments, fusion_learning_rate: float) -> tuple[Any, dict[str, Any]]:
    """What to pass to a Trainer as `optimizer_cls_and_kwargs`, to train the fusion at a rate of its own.

    The Trainer makes the optimizer itself, once it has wrapped the model (in a PEFT adapter, in shards). The rates start
    from `args.learning_rate` and `fusion_learning_rate` and follow the same schedule; the base's is the one that is
    logged, unless all of it is frozen. The authors of T2MLR train the fusion at 100 times the base's rate on GSM8K.

    Args:
        args: of the Trainer: optimizer, learning rate, weight decay.
        fusion_learning_rate: of all that is trained in `fusion` and `carry`, adapters on them included.

    Raises:
        ValueError: the rate is not positive, or, when training starts, as `optimizer_for`.

    Example:
        >>> import tempfile
        >>> args = TrainingArguments(tempfile.mkdtemp(), learning_rate=1e-4, report_to="none", use_cpu=True)
        >>> factory, settings = fusion_optimizer(args, fusion_learning_rate=1e-2)
        >>> settings["fusion_learning_rate"]
        0.01
    """
    _check_rate(fusion_learning_rate)
    return lambda: optimizer_for, {"args": args, "fusion_learning_rate": fusion_learning_rate}


def optimizer_for(model: nn.Module, args: TrainingArguments, fusion_learning_rate: float) -> Optimizer:
    """The optimizer that `args` describes, with a learning rate of its own for the fusion.

    Each trainable parameter is in it once. As in transformers, norms and biases do not decay; nor do scalars.

    Args:
        model: a retrofitted model, perhaps wrapped (PEFT, data parallelism).
        args, fusion_learning_rate: as in `fusion_optimizer`.

    Raises:
        ValueError: the rate is not positive, the model has no fusion, nothing of its fusion is trainable, or
            `args.optim` is one that groups parameters itself (GaLore, LOMO, Muon, ...).

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig
        >>> from crosscurrent import T2MLRConfig
        >>> base = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
        >>> model = T2MLRForCausalLM(T2MLRConfig(base_config=base, layer_start=0, layer_end=1))
        >>> args = TrainingArguments(tempfile.mkdtemp(), learning_rate=1e-4, report_to="none", use_cpu=True)
        >>> [group["lr"] for group in optimizer_for(model, args, 1e-2).param_groups]
        [0.0001, 0.0001, 0.01, 0.01]
    """
    _check_rate(fusion_learning_rate)
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
    if is_optimizer_factory(optimizer_class) or any(name in settings for name in _OWN_GROUPS):
        raise ValueError(
            f"optim={str(args.optim)!r} groups parameters itself, so the fusion cannot have a learning rate of its own. "
            "Take another one, such as 'adamw_torch'."
        )
    return optimizer_class(_groups(model, args, fusion_learning_rate), **settings)


def _check_rate(fusion_learning_rate: float) -> None:
    is_number = isinstance(fusion_learning_rate, int | float) and not isinstance(fusion_learning_rate, bool)
    if not is_number or not 0 < fusion_learning_rate <= sys.float_info.max:
        raise ValueError(
            f"fusion_learning_rate={fusion_learning_rate!r} is not allowed: give a positive number, or freeze the fusion."
        )


def _groups(model: nn.Module, args: TrainingArguments, fusion_learning_rate: float) -> list[dict[str, Any]]:
    """Base before fusion (the first group's rate is the one that is logged), each with and without decay."""
    of_fusion = _fusion_ids(model)
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not any(id(parameter) in of_fusion for _, parameter in named):
        raise ValueError(
            "nothing of the fusion is trainable, so fusion_learning_rate would have no effect: set requires_grad of the "
            "parameters of model.fusion and model.carry (with PEFT: modules_to_save=['fusion', 'carry']), or leave it out."
        )
    groups = [
        {
            "params": [
                parameter
                for name, parameter in named
                if (id(parameter) in of_fusion) == in_fusion and (name in decaying and parameter.numel() > 1) == decays
            ],
            "lr": fusion_learning_rate if in_fusion else args.learning_rate,
            "weight_decay": args.weight_decay if decays else 0.0,
        }
        for in_fusion in (False, True)
        for decays in (True, False)
    ]
    return [group for group in groups if group["params"]]


def _fusion_ids(model: nn.Module) -> set[int]:
    recurrent = recurrent_model(model)
    if not isinstance(recurrent, T2MLRForCausalLM):
        raise ValueError(f"{type(recurrent).__name__} has no fusion: only a retrofitted model (T2MLR) has one.")
    return {id(parameter) for part in (recurrent.fusion, recurrent.carry) for parameter in part.parameters()}
