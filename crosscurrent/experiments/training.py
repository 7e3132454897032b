"""A plain training loop, for experiments small enough to read in one sitting."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

FINAL_SHARE = 0.1  # of the learning rate, reached in a straight line
MAX_GRADIENT_NORM = 1.0


def train(
    model: nn.Module,
    groups: list[dict[str, Any]],
    loss_of: Callable[[int], Tensor],
    steps: int,
    warm_up_steps: int,
    weight_decay: float = 0.0,
) -> Iterator[float]:
    """Train for `steps` steps, yielding the loss of each one after its update.

    AdamW (0.9, 0.95); the learning rates rise and fall linearly; gradients are clipped. A loss that
    is not finite stops the training before it reaches the weights.

    Args:
        model: put into training mode here, and left in evaluation mode.
        groups: parameters with their learning rates, as torch's optimizers take them.
        loss_of: the loss of step number 0, 1, ...
        warm_up_steps: over which the learning rates rise.
        weight_decay: of AdamW.

    Raises:
        ValueError: a loss is not finite.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(1, 1)
        >>> groups = [{"params": list(model.parameters()), "lr": 0.1}]
        >>> losses = list(train(model, groups, lambda step: model(torch.ones(1, 1)).square().sum(), 20, warm_up_steps=2))
        >>> losses[-1] < losses[0]
        True
    """
    optimizer = AdamW(groups, betas=(0.9, 0.95), weight_decay=weight_decay)
    schedule = LambdaLR(optimizer, lambda step: _share(step, steps, warm_up_steps))
    model.train()
    for step in range(steps):
        loss = loss_of(step)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()} at step {step + 1}: lower the learning rate.")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        yield loss.item()
    model.eval()


def _share(step: int, steps: int, warm_up_steps: int) -> float:
    warm_up = min(1.0, (step + 1) / warm_up_steps)
    return warm_up * (1.0 - (1.0 - FINAL_SHARE) * step / steps)
