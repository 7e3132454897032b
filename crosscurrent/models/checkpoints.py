"""Loading that answers a broken checkpoint at once, in one message."""

import warnings
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from crosscurrent.suggestions import did_you_mean

_ALIGNMENT = 64  # bytes, of every block that torch allocates on a CPU


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


class CheckedLoading(PreTrainedModel):
    """`from_pretrained` that names what is wrong with a checkpoint."""

    def new_weight_names(self) -> set[str]:
        """The weights that a checkpoint may lack, all together, because it is the base model's: they start fresh."""
        return set()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            CheckpointError: a file is missing or cut short, a weight is missing, or one is not finite. It is a
                `ValueError` and an `OSError`.
        """
        source = str(pretrained_model_name_or_path)
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise CheckpointError(
                f"{source}: a .safetensors file cannot be read ({error}). It is cut short or damaged: copy it again."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{source}: {error}") from error
        model, info = loaded
        missing = set(info["missing_keys"])
        if missing and missing != model.new_weight_names():
            raise CheckpointError(
                f"{source}: weights are missing: {', '.join(sorted(missing))}. The checkpoint is incomplete."
            )
        refuse_nonfinite_weights(model, source)
        _align_weights(model)
        return (model, info) if wants_info else model


def _align_weights(model: nn.Module) -> None:
    """Move weights to memory as torch allocates it. Matrix products round differently on the odd addresses at which a
    file is mapped, so that a loaded model would not repeat the saved one bit for bit."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


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
