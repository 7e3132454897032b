"""Measurements that show whether two models are the same.

Shapes: B rows, T tokens, V vocabulary.
"""

import hashlib

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def logits_of(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Logits [B, T, V] in evaluation mode, for input_ids [B, T]; the model's mode is left as it was."""
    was_training = model.training
    model.eval()
    logits: Tensor = model(input_ids, use_cache=False).logits
    model.train(was_training)
    return logits


def max_logit_difference(first: PreTrainedModel, second: PreTrainedModel, input_ids: Tensor) -> float:
    """The largest absolute difference between two models' logits for input_ids [B, T].

    Example::

        max_logit_difference(base, cc.retrofit(base, 12, 18), input_ids)  # 0.0
    """
    return (logits_of(first, input_ids) - logits_of(second, input_ids)).abs().max().item()


def fingerprint(model: PreTrainedModel) -> str:
    """A checksum of all weights and their names: equal only if every bit of every weight is."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
