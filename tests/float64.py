"""Holds transformers' models to float64. Their norms, rotary embeddings and softmax compute in float32 whatever the
weights are, which would hide everything below 1e-7 from the exact laws."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LOW = (torch.float32, torch.float)


class KeepFloat64(TorchFunctionMode):
    """Conversions of float64 tensors to float32 do nothing while this is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.matmul and torch.float64 in {arg.dtype for arg in args}:  # frequencies and positions
            return func(*(arg.double() for arg in args))
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to and (
                kwargs.get("dtype") in _LOW or any(a in _LOW for a in args[1:] if a is not None)
            ):
                return args[0]
            if kwargs.get("dtype") in _LOW:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)
