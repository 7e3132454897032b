"""The names of weights, and what wrappers around a model put into them.

torch.compile, DistributedDataParallel, FSDP, activation checkpointing and PEFT hold the model as a part of themselves, so
that weights saved through them are called `_orig_mod.lm_head.weight`, `module.lm_head.weight` and so on.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# These may also stand in the middle, where a single layer was wrapped.
_ANYWHERE = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_AT_START = rf"^(?:{_ANYWHERE}|module\.|base_model\.model\.)+"

# In the form of the `key_mapping` of transformers' from_pretrained.
WITHOUT_WRAPPERS = {_AT_START: "", rf"(?:{_ANYWHERE})+": ""}


def unwrapped(name: str) -> str:
    """A weight's name without the wrappers in it.

    Example:
        >>> unwrapped("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    return re.sub(_ANYWHERE, "", re.sub(_AT_START, "", name))


def unwrap_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights under names without wrappers.

    Raises:
        ValueError: two weights would get the same name.
    """
    weights = {unwrapped(name): weight for name, weight in state_dict.items()}
    if len(weights) != len(state_dict):
        names = sorted(state_dict)
        twice = next(name for name in names if unwrapped(name) != name and unwrapped(name) in state_dict)
        raise ValueError(f"state_dict holds both {twice} and {unwrapped(twice)}: give each weight once.")
    return weights


def list_names(names: Iterable[str], most: int = 10) -> str:
    """Names for a message, sorted, the first `most` of them.

    Example:
        >>> list_names(["c", "a", "b"], most=2)
        'a, b and 1 more'
    """
    found = sorted(names)
    rest = len(found) - most
    return ", ".join(found[:most]) + (f" and {rest} more" if rest > 0 else "")
