"""What a model is made of, as plain numbers and names."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from crosscurrent.evaluation.telemetry import gate_openings
from crosscurrent.models.rlt import RLTForCausalLM
from crosscurrent.models.t2mlr import T2MLRForCausalLM

_RLT_SETTINGS = (
    "num_encoder_layers",
    "num_decoder_layers",
    "encoder_sliding_window",
    "memory_sliding_window",
    "sliding_window",
    "num_memory_groups",
    "feedback_scale",
    "state_noise",
    "tie_encoder_decoder",
    "given_positions",
)


def recurrent_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters that only the recurrence uses: fusion and carry of T2MLR, merge of RLT, none of other models."""
    if isinstance(model, T2MLRForCausalLM):
        return [*model.fusion.parameters(), *model.carry.parameters()]
    if isinstance(model, RLTForCausalLM) and model.model.merge is not None:
        return list(model.model.merge.parameters())
    return []


def num_recurrent_parameters(model: PreTrainedModel) -> int:
    """How many numbers `recurrent_parameters` hold."""
    return sum(parameter.numel() for parameter in recurrent_parameters(model))


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """What there is to know of a model at a glance, ready for JSON.

    Example:
        >>> import crosscurrent as cc
        >>> model = cc.RLTForCausalLM(cc.RLTConfig(vocab_size=61, hidden_size=32, intermediate_size=64))
        >>> describe(model)["num_encoder_layers"]
        4
    """
    config = model.config
    facts: dict[str, Any] = {"model_type": config.model_type, "model_class": type(model).__name__}
    if isinstance(model, T2MLRForCausalLM):
        current, recurrent = gate_openings(model)
        facts |= {
            "base_model": config.base_config.name_or_path,
            "base_model_type": config.base_config.model_type,
            "layer_start": config.layer_start,
            "layer_end": config.layer_end,
            "gate_opening_current": current,
            "gate_opening_recurrent": recurrent,
        }
    elif isinstance(model, RLTForCausalLM):
        facts |= {name: getattr(config, name) for name in _RLT_SETTINGS}
    if isinstance(model, T2MLRForCausalLM | RLTForCausalLM):
        facts |= {name: getattr(config, name) for name in ("feedback_interval", "prompt_recurrence", "solver")}
    return facts | {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_parameters": model.num_parameters(),
        "num_recurrent_parameters": num_recurrent_parameters(model),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
