"""Kernels of liger-kernel, where it is installed."""

import warnings
from importlib.util import find_spec

import torch
from torch import nn


def check_liger_kernel() -> None:
    """Raise ValueError if liger-kernel is not installed."""
    if find_spec("liger_kernel") is None:
        raise ValueError(
            "training.liger_kernel=true needs the package liger-kernel and a GPU: pip install liger-kernel."
        )


def apply_liger_kernel(model: nn.Module, model_type: str) -> None:
    """Replace norms, rotary positions and feed-forwards of a model by those of liger-kernel, which runs on GPUs.

    The loss stays this library's: recurrent models have a forward pass of their own.

    Args:
        model: a causal language model of transformers, or one retrofitted from it.
        model_type: of the base, as in its config.json.

    Raises:
        ValueError: liger-kernel is not installed, or has nothing for this type.
    """
    check_liger_kernel()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"liger-kernel has nothing for models of type {model_type!r}: leave training.liger_kernel=false."
        )
    MODEL_TYPE_TO_APPLY_LIGER_FN[model_type](model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    if not torch.cuda.is_available():
        warnings.warn("liger-kernel runs on GPUs, and there is none here.", stacklevel=2)
