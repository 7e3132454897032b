"""The machines, from their makers' data sheets, and what is assumed about how well they are used."""

from dataclasses import dataclass

import torch

from crosscurrent.training.flops import peak_flops

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """A GPU and how it is connected.

    Attributes:
        name: as `flops.peak_flops` knows it.
        memory: bytes.
        bandwidth: bytes per second at which its memory is read.
        within_node: bytes per second and direction between the GPUs of a node.
        between_nodes: bytes per second and direction of each GPU's network card.
    """

    name: str
    memory: float
    bandwidth: float
    within_node: float
    between_nodes: float

    @property
    def peak(self) -> float:
        """Dense bfloat16 products, FLOP/s."""
        found = peak_flops(self.name, torch.bfloat16)
        assert found is not None
        return found


GPUS = {
    "a100": Gpu("A100", 80e9, 2.0e12, 300e9, 25e9),
    "h100": Gpu("H100", 80e9, 3.35e12, 450e9, 50e9),
    "h200": Gpu("H200", 141e9, 4.8e12, 450e9, 50e9),
    "l40s": Gpu("L40S", 48e9, 0.864e12, 32e9, 25e9),
}


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet tells. None of it was measured on a GPU.

    Attributes:
        efficiency: of the peak, that products and all between them reach together while the GPU is busy.
        usable_memory: share that the model gets; the rest is the driver's, the allocator's and the network library's.
        link_efficiency: of a link's speed, that a collective operation reaches.
        exposed: the least share of communication that nothing hides. More is exposed where it takes longer than the
            backward pass.
        hop_latency: seconds for each GPU of a ring that a gather or a scatter passes.
        operation_latency: seconds until the host has started the next operation.
        operations_per_layer: that the host starts for one run of a layer, forward and backward.
    """

    efficiency: float = 0.4
    usable_memory: float = 0.9
    link_efficiency: float = 0.8
    exposed: float = 0.1
    hop_latency: float = 4e-6
    operation_latency: float = 5e-6
    operations_per_layer: int = 230

    def __post_init__(self) -> None:
        for name in ("efficiency", "usable_memory", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: give a share, above 0 and at most 1.")
