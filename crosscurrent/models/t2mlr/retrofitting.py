"""Makes a recurrent model of a pretrained one."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from crosscurrent.models.checkpoints import refuse_nonfinite_weights
from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.t2mlr.bases import base_class_of, find_layers
from crosscurrent.models.t2mlr.configuration_t2mlr import T2MLRConfig, check_layer_range
from crosscurrent.models.t2mlr.modeling_t2mlr import T2MLRForCausalLM, class_for
from crosscurrent.recurrence import Solver


def retrofit(
    base: PreTrainedModel,
    layer_start: int,
    layer_end: int,
    *,
    solver: Solver | None = None,
    feedback_interval: int | None = 1,
    prompt_recurrence: bool = True,
    detach_residual: bool = False,
    state_dtype: torch.dtype | str | None = None,
) -> T2MLRForCausalLM:
    """Add temporal recurrence to a causal language model. The result starts out computing exactly what `base` does.

    The result shares the base's layers: nothing is copied, and training one trains the other. `base` itself goes on
    computing what it did, but what is set on shared layers is set for both (attention implementation, vocabulary size,
    gradient checkpointing, hooks on layers). For an independent model retrofit `copy.deepcopy(base)`.

    Args:
        base: any transformers causal language model with a list of decoder layers.
        layer_start, layer_end: the recurrent range, half-open, counted from 0. The paper's best were the middle layers,
            about a fifth of the depth.
        solver, feedback_interval, prompt_recurrence, detach_residual, state_dtype: as in `T2MLRConfig`.

    Raises:
        ValueError: the range does not lie in the model, the model is not supported (the message says what is
            missing), or a weight is not finite.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> base = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                                     num_attention_heads=4))
        >>> model = retrofit(base, layer_start=1, layer_end=3)
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> torch.equal(model(ids).logits, base(ids).logits)
        True
    """
    _refuse_unsupported_base(base)
    check_layer_range(layer_start, layer_end, base.config.get_text_config(decoder=True).num_hidden_layers)
    refuse_nonfinite_weights(base, type(base).__name__)
    config = T2MLRConfig(
        base_config=base.config,
        layer_start=layer_start,
        layer_end=layer_end,
        solver=solver,
        feedback_interval=feedback_interval,
        prompt_recurrence=prompt_recurrence,
        detach_residual=detach_residual,
        state_dtype=state_dtype,
    )
    config.dtype = base.config.dtype
    base_name = base.config.name_or_path or ""
    config._base_was_local = bool(base_name) and Path(base_name).exists()  # known only now: a path may look like an id
    model = object.__new__(class_for(type(base)))
    model.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | set) else value for name, value in base.__dict__.items()
    }
    model.generation_config = copy.deepcopy(base.generation_config)
    if model.generation_config is not None:
        model.generation_config.cache_implementation = None  # Gemma's checkpoints ask for a kind of their own
    model._take_over(config)
    for module in (model.fusion, model.carry):
        model._init_weights(module)
        module.train(base.training)
    return model


def _refuse_unsupported_base(base: Any) -> None:
    if isinstance(base, T2MLRForCausalLM):
        raise ValueError("the base is a retrofitted model already: retrofit the model it was made from.")
    if isinstance(base, RecurrentCausalLM):
        raise ValueError(f"the base is a {type(base).__name__}, which is recurrent already.")
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"base is a {type(base).__name__}: give a transformers causal language model.")
    if base.config.is_encoder_decoder:
        raise ValueError(f"{type(base).__name__} is an encoder-decoder model: only decoder-only models are supported.")
    if type(base) is not base_class_of(base.config):
        raise ValueError(
            f"{type(base).__name__} is not the causal language model that transformers loads for a "
            f"{type(base.config).__name__} ({base_class_of(base.config).__name__}), so the result could not be loaded "
            "again. Load the base with AutoModelForCausalLM."
        )
    if "forward" in base.__dict__:
        raise ValueError(
            f"this {type(base).__name__}'s forward has been replaced (by device_map over several devices, or by another "
            "library). Load it on one device, retrofit, save, and load the retrofitted model with device_map."
        )
    find_layers(base)
