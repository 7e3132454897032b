"""How the carried state enters the stream: z_t = fuse(x_t, r).

Shapes: B rows, T tokens, D hidden_size.  x, z [B, T, D]; r [B, T, D] or [B, 1, D], which broadcasts over tokens.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from crosscurrent.recurrence.kernels import triton_for
from crosscurrent.recurrence.steps import apply_linear

GatesRead = Literal["state", "projected_state"]


class Fuse(Protocol):
    """What a solver needs of a fusion: the mix itself and the state read where there is no predecessor.

    Called without r it gives of_stream [B, T, N], what it makes of x alone, for all steps or passes to share. (It is called
    for that, too, since wrappers that shard a module have its weights at hand only while it is called.)
    """

    def __call__(self, x: Tensor, r: Tensor | None = None, of_stream: Tensor | None = None) -> Tensor: ...

    def initial_state(self, batch_size: int) -> Tensor: ...


class PairLinear(nn.Module):
    """A linear map of a pair, W [x; r] + b, as the sum of its two halves W_x x and W_r r + b.

    Apart, one state can serve a whole chunk of tokens, and what depends on x alone need not be computed again.

    Example:
        >>> linear = PairLinear(hidden_size=8)
        >>> linear(linear.of_stream(torch.randn(2, 3, 8)), torch.randn(2, 1, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.from_stream = nn.Linear(hidden_size, hidden_size, bias=False)
        self.from_state = nn.Linear(hidden_size, hidden_size)

    def of_stream(self, x: Tensor) -> Tensor:
        """W_x x."""
        return apply_linear(self.from_stream, x)

    def forward(self, of_stream: Tensor, r: Tensor) -> Tensor:
        """The sum, given `of_stream(x)` and r."""
        return of_stream + apply_linear(self.from_state, r)


class GatedFusion(nn.Module):
    """The fusion Phi of T2MLR (arXiv 2607.15178).

    With h the stream entering the recurrent range and R the state of the token before::

        Phi(h, R) = h + tanh(g_cur) * sigmoid(f_cur([h; R])) . h + tanh(g_rec) * sigmoid(f_rec([h; R])) . (W_rec R)

    Both scalars start at 0, so a new fusion returns h itself, bit for bit. Where there is no predecessor R = 0.

    Args:
        hidden_size: width D of the stream; the fusion adds 5 D^2 + 2 D + 2 parameters.
        initializer_range: standard deviation of the three matrices at the start.
        gates_read: what f_cur and f_rec see beside h: "state", R itself, as in the paper, or "projected_state", W_rec R, as
            in the authors' released code.

    Example:
        >>> fuse = GatedFusion(hidden_size=8)
        >>> h = torch.randn(2, 3, 8)
        >>> torch.equal(fuse(h, torch.randn(2, 3, 8)), h)
        True
    """

    def __init__(self, hidden_size: int, initializer_range: float = 0.02, gates_read: GatesRead = "state"):
        super().__init__()
        self.initializer_range, self.gates_read = initializer_range, gates_read
        self.current_gate = PairLinear(hidden_size)
        self.recurrent_gate = PairLinear(hidden_size)
        self.recurrent_projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.current_scale = nn.Parameter(torch.zeros(1))  # one number; FSDP cannot shard tensors without dimensions
        self.recurrent_scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, r: Tensor | None = None, of_stream: Tensor | None = None) -> Tensor:
        if of_stream is None:
            of_stream = torch.cat([gate.of_stream(x) for gate in (self.current_gate, self.recurrent_gate)], dim=-1)
        if r is None:
            return of_stream
        r = r.to(x.dtype)  # the state may be kept in a wider type than the stream
        projected = apply_linear(self.recurrent_projection, r)
        seen = projected if self.gates_read == "projected_state" else r
        kernels = triton_for(x, of_stream, projected, self.current_scale, self.recurrent_scale)
        if kernels is not None:
            of_state = (apply_linear(gate.from_state, seen) for gate in (self.current_gate, self.recurrent_gate))
            return kernels.gated_fusion(x, of_stream, *of_state, projected, self.current_scale, self.recurrent_scale)
        of_current, of_recurrent = of_stream.chunk(2, dim=-1)
        current = torch.sigmoid(self.current_gate(of_current, seen))
        recurrent = torch.sigmoid(self.recurrent_gate(of_recurrent, seen))
        kept = torch.tanh(self.current_scale) * current * x
        added = torch.tanh(self.recurrent_scale) * recurrent * projected
        return x + kept + added

    def initial_state(self, batch_size: int) -> Tensor:
        weight = self.recurrent_projection.weight  # maybe a shard, whose own new_zeros would be one
        return torch.zeros(batch_size, weight.shape[1], dtype=weight.dtype, device=weight.device)


class Merge(nn.Module):
    """The merge of RLT (equations 2.9 to 2.11 of its report).

    With e the encoder's output and s the decoder's last output::

        r = RMSNorm_s(s)                      (2.9)
        g = sigmoid(W_g [e; r] + b_g)         (2.10)
        u = e + alpha * g . (W_s r)           (2.11)

    Where there is no predecessor s is the learned vector s_*.

    Args:
        hidden_size: width D; the merge holds D^2 + (2 D^2 + D) + D + D parameters.
        feedback_scale: alpha.
        eps: of the RMSNorm.
        initializer_range: standard deviation of the matrices and of s_* at the start.

    Example:
        >>> merge = Merge(hidden_size=8, feedback_scale=0.0)
        >>> e = torch.randn(2, 3, 8)
        >>> torch.equal(merge(e, torch.randn(2, 1, 8)), e)
        True
    """

    def __init__(
        self, hidden_size: int, feedback_scale: float = 0.1, eps: float = 1e-6, initializer_range: float = 0.02
    ):
        super().__init__()
        self.feedback_scale = feedback_scale
        self.initializer_range = initializer_range
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.gate = PairLinear(hidden_size)
        self.state_projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.start_state = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor, r: Tensor | None = None, of_stream: Tensor | None = None) -> Tensor:
        if of_stream is None:
            of_stream = self.gate.of_stream(x)
        if r is None:
            return of_stream
        normalized = self.norm(r)
        projected = apply_linear(self.state_projection, normalized)
        kernels = triton_for(x, of_stream, projected)
        if kernels is not None:
            of_state = apply_linear(self.gate.from_state, normalized)
            return kernels.merge(x, of_stream, of_state, projected, self.feedback_scale)
        gate = torch.sigmoid(self.gate(of_stream, normalized))
        return x + self.feedback_scale * gate * projected

    def initial_state(self, batch_size: int) -> Tensor:
        return self.start_state.expand(batch_size, -1)
