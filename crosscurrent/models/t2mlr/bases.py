"""Which models can be made recurrent, and where they keep their layers: all that differs between architectures."""

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from crosscurrent.models.t2mlr.configuration_t2mlr import T2MLRConfig
from crosscurrent.models.t2mlr.layer_range import CACHE_NAMES, layer_argument_names

# Where causal language models keep their list of decoder layers.
LAYER_LISTS = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers")

# What configurations call the epsilon of their norms.
NORM_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def base_class_of(config: PreTrainedConfig | None) -> type:
    """The causal language model class that transformers has for a configuration.

    Raises:
        ValueError: there is none.
    """
    mapping = AutoModelForCausalLM._model_mapping
    if config is None or type(config) not in mapping:
        raise ValueError(
            f"base_config is {type(config).__name__}, for which transformers has no causal language model of its own. "
            "Give the configuration of one (LlamaConfig, Qwen2Config, ...); code from a checkpoint is never run."
        )
    base_class: Any = mapping[type(config)]
    return base_class


def find_layers(model: nn.Module) -> tuple[nn.Module, str]:
    for path in LAYER_LISTS:
        owner_path, _, name = path.rpartition(".")
        try:
            owner = model.get_submodule(owner_path)
        except AttributeError:
            continue
        if isinstance(getattr(owner, name, None), nn.ModuleList):
            return owner, name
    raise ValueError(
        f"{type(model).__name__} keeps its decoder layers in none of the known places ({', '.join(LAYER_LISTS)}), so there "
        "is no list of layers to make recurrent."
    )


def refuse_unsupported_layers(layers: nn.ModuleList, config: T2MLRConfig) -> None:
    text = config.get_text_config(decoder=True)
    name = type(layers[0]).__name__
    if len(layers) != text.num_hidden_layers:
        raise ValueError(f"the list of layers has {len(layers)} and num_hidden_layers is {text.num_hidden_layers}.")
    arguments = layer_argument_names(layers[0])
    if "attention_mask" not in arguments or not set(CACHE_NAMES) & set(arguments):
        raise ValueError(
            f"{name} takes {', '.join(arguments) or 'nothing'} beside the stream: an attention_mask and a cache of keys "
            "and values are missing. Only stacks of attention layers are supported."
        )
    if getattr(text, "sliding_window", None) == 1:
        raise ValueError("sliding_window=1 is not supported: transformers' cache does not keep such a window.")
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ValueError(f"layers of type {sorted(unknown)} are not supported, only {sorted(_LAYER_TYPES)}.")
