"""Whether a model's weights are at hand between calls of its modules."""

from torch import nn
from torch.distributed.tensor import DTensor


def weights_come_and_go(module: nn.Module) -> bool:
    """Whether a parameter is whole only while the module that it belongs to is called: a shard of it (FSDP2) or nothing
    (offloading) is there in between."""
    return any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in module.parameters())
