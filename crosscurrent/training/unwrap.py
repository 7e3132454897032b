"""The recurrent model inside what a Trainer may have wrapped around it."""

from torch import nn

from crosscurrent.models.generation import RecurrentCausalLM


def recurrent_model(model: nn.Module) -> RecurrentCausalLM:
    """The recurrent model in `model`: itself, or what PEFT, data parallelism or `torch.compile` have wrapped.

    Raises:
        ValueError: there is none.
    """
    found = next((module for module in model.modules() if isinstance(module, RecurrentCausalLM)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} is no recurrent model: make one with crosscurrent.retrofit, or load one."
        )
    return found
