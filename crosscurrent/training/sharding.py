"""Which parts of a model are divided over processes by themselves (FSDP2).

A module that is divided by itself gathers its weights at every call and sends its gradients away after every backward
pass through it. The layers of a recurrence are called as often as its solver sees fit, which depends on the documents that a
process happens to have: processes would wait for each other for ever. So these belong to the root, whose weights are
gathered once per step. It costs their size in memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from crosscurrent.models.rlt import RLTForCausalLM
from crosscurrent.models.rlt.layers import EncoderLayer
from crosscurrent.models.t2mlr import T2MLRForCausalLM


def shard(model: Any, dtype: torch.dtype) -> None:
    """Divide a causal language model over all processes, in place.

    Args:
        model: on every process the same.
        dtype: to compute in; weights, gradients and what the optimizer keeps stay as they are.

    Raises:
        ValueError: it is not known what the layers of the model are.

    Example::

        shard(model, torch.bfloat16)  # within torchrun, before the optimizer is made
    """
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in parallel_layers(model):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def parallel_layers(model: Any) -> Iterator[nn.Module]:
    """The layers that run exactly once per forward call."""
    if isinstance(model, RLTForCausalLM):
        kept_whole = model.config.tie_encoder_decoder  # then they are the decoder's too
        yield from () if kept_whole else (module for module in model.modules() if isinstance(module, EncoderLayer))
        return
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names and _is_layer(module)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not say what its layers are: it cannot be divided (sharding: none)."
        )
    if isinstance(model, T2MLRForCausalLM):
        layers = layers[: model.config.layer_start] + layers[model.config.layer_end :]
    yield from layers


def _is_layer(module: nn.Module) -> bool:
    """Not a part of the recurrence, which its model names beside the layers."""
    return not type(module).__module__.startswith("crosscurrent.recurrence")
