"""The recurrent model inside what has been wrapped around it."""

from typing import Any

from torch import nn

from crosscurrent.models.generation import RecurrentCausalLM


def find_recurrent_model(model: Any) -> RecurrentCausalLM | None:
    """The recurrent model in `model`: itself, or what PEFT, data parallelism or `torch.compile` have wrapped; None if
    there is none."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, RecurrentCausalLM)), None)


def recurrent_model(model: Any) -> RecurrentCausalLM:
    """As `find_recurrent_model`.

    Raises:
        ValueError: there is none.
    """
    found = find_recurrent_model(model)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no recurrence: give a model made by crosscurrent.retrofit or loaded, or an RLT."
        )
    return found
