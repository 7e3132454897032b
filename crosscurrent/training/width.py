"""Learning rates and starting weights that carry over from one width to another (width-muP, for Adam).

With m = base / width, for every matrix that connects the stream with itself, the starting weights are multiplied by sqrt(m)
and the learning rate by m; the logits are multiplied by m, because the output matrix is the embedding. At the base
width nothing changes. (Yang et al., arXiv 2203.03466, table 8; the RLT report says "width-muP" without its base.)
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def parameter_groups(model: nn.Module, learning_rate: float, weight_decay: float, share: float) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices decay, vectors and scalars do not; matrices of the stream learn at `share` of the rate.

    The decay of a matrix is divided by `share`, so that learning rate times decay is the same for all.
    """
    embeddings = _embedding_ids(model)
    named = [(parameter, parameter.ndim >= 2) for parameter in model.parameters() if parameter.requires_grad]
    hidden = [parameter for parameter, is_matrix in named if is_matrix and id(parameter) not in embeddings]
    outer = [parameter for parameter, is_matrix in named if is_matrix and id(parameter) in embeddings]
    vectors = [parameter for parameter, is_matrix in named if not is_matrix]
    groups = [  # the first one's rate is the one that is logged
        {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
        {"params": outer, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": hidden, "lr": learning_rate * share, "weight_decay": weight_decay / share},
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def scale_start(model: PreTrainedModel, share: float) -> None:
    """Multiply the starting weights of the stream's matrices by sqrt(share)."""
    embeddings = _embedding_ids(model)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and id(parameter) not in embeddings:
            parameter.mul_(math.sqrt(share))


@torch.no_grad()
def fold_logit_scale(model: PreTrainedModel, scale: float) -> None:
    """Put a factor of the logits into the last norm, so that the saved model gives the logits it was trained with.

    Raises:
        ValueError: the model has no last norm.
    """
    final_norm(model).mul_(scale)


def final_norm(model: PreTrainedModel) -> Tensor:
    """The weight of the norm before the output matrix.

    Raises:
        ValueError: there is none.
    """
    norm = getattr(getattr(model, "model", None), "norm", None)
    if norm is None:
        raise ValueError(
            f"{type(model).__name__} has no norm before its output matrix, which mup_base_width needs: leave it out."
        )
    return norm.weight


def _embedding_ids(model: nn.Module) -> set[int]:
    assert isinstance(model, PreTrainedModel)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
