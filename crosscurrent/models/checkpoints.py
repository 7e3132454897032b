"""What is refused in a checkpoint and in its configuration."""

import warnings
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from crosscurrent.suggestions import did_you_mean

# What transformers itself puts into any configuration beside its declared fields.
_TRANSFORMERS_SETTINGS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "torch_dtype",
}


class CheckpointError(ValueError, OSError):
    """A checkpoint is missing, incomplete or holds values that are not finite."""


def refuse_nonfinite_weights(model: nn.Module, source: str) -> None:
    """Raise if a weight is NaN or infinite: such a model answers every question with NaN."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" and not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(
                f"{source}: the weight {name} holds NaN or infinite values. The file is damaged or the training that "
                "wrote it diverged: take an earlier checkpoint."
            )


def refuse_other_model_type(config_class: type[PreTrainedConfig], settings: dict[str, Any]) -> None:
    """Raise if a saved configuration is another kind of model's."""
    model_type = settings.get("model_type", config_class.model_type)
    if model_type != config_class.model_type:
        raise ValueError(
            f"this is the configuration of a {model_type!r} model, not of a {config_class.model_type!r} one. To make a "
            "pretrained model recurrent, load it with AutoModelForCausalLM and pass it to crosscurrent.retrofit."
        )


def refuse_misspelt_settings(config: PreTrainedConfig, unknown: dict[str, Any]) -> None:
    """Raise for a setting spelt almost like one of this configuration's own; warn of others that have no effect."""
    own = sorted(set(type(config).__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__))
    known = {*_TRANSFORMERS_SETTINGS, *GenerationConfig().to_dict()}
    for name in unknown:
        if isinstance(getattr(type(config), name, None), property) and name in ("num_hidden_layers", "head_dim"):
            raise ValueError(f"{type(config).__name__} derives {name} from its other settings: {own}.")
        hint = did_you_mean(name, own, cutoff=0.8)
        if hint:
            raise ValueError(f"{type(config).__name__} has no setting {name!r}.{hint} It has: {own}.")
        if name not in known and not name.startswith("_"):
            warnings.warn(f"{type(config).__name__} has no setting {name!r}: it has no effect.", stacklevel=4)
