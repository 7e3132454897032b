"""The recurrent path in float32 beside a base in 16 bits."""

import torch
from torch import Tensor

from crosscurrent.recurrence import GatedFusion


class InStreamDtype:
    """A fusion computed in the dtype of the stream, whatever its parameters are kept in: what autocast does.

    Args:
        fusion: to call.
    """

    def __init__(self, fusion: GatedFusion):
        self.fusion, self.initial_state = fusion, fusion.initial_state

    def __call__(self, x: Tensor, r: Tensor | None = None, of_stream: Tensor | None = None) -> Tensor:
        if x.dtype == self.fusion.current_scale.dtype or x.dtype.itemsize != 2:
            return self.fusion(x, r, of_stream)
        with torch.autocast(x.device.type, x.dtype):
            return self.fusion(x, r, of_stream).to(x.dtype)
