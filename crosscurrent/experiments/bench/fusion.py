"""Benchmark of fusions and carries alone: plain PyTorch against the Triton kernels, so that one sees whether those pay."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosscurrent.experiments.bench.case import Case, Conditions, Ratio, Subject, UnavailableError, Workload
from crosscurrent.experiments.bench.timing import seconds_of
from crosscurrent.recurrence import GatedFusion, Merge, NormalizedSum
from crosscurrent.recurrence.kernels import triton_for, use_triton

OPEN = 0.5  # of both scalars of the gated fusion
WAYS = {"plain": False, "Triton": True}


class T2MLRPass(nn.Module):
    """What a Jacobi pass does beside its layers: every token is fused, and leaves a state."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.fuse, self.carry = GatedFusion(hidden_size), NormalizedSum(hidden_size)
        nn.init.constant_(self.fuse.current_scale, OPEN)
        nn.init.constant_(self.fuse.recurrent_scale, OPEN)

    def forward(self, x: Tensor, r: Tensor, of_stream: Tensor) -> Tensor:
        return self.carry(self.fuse(x, r, of_stream), r, torch.ones_like(x[..., :1], dtype=torch.bool))


class RLTStep(nn.Module):
    """What a step of RLT does beside its layers: a chunk of tokens merges with one state."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.fuse = Merge(hidden_size)

    def forward(self, x: Tensor, r: Tensor, of_stream: Tensor) -> Tensor:
        return self.fuse(x, r, of_stream)


def _kinds(figures: Mapping[str, Any]) -> dict[str, tuple[Callable[[int], Any], int, int]]:
    """By name: the module, its tokens and its states."""
    num_tokens = figures["num_tokens"]
    return {
        "T2MLR pass": (T2MLRPass, num_tokens, num_tokens),
        "T2MLR step": (T2MLRPass, 1, 1),
        "RLT-1 step": (RLTStep, 1, 1),
        "RLT-2 (4) step": (RLTStep, 4, 1),
    }


def _workload(conditions: Conditions, figures: Mapping[str, Any], kind: str, with_triton: bool) -> Workload:
    make, num_tokens, num_states = _kinds(figures)[kind]
    torch.manual_seed(42)
    module = make(figures["hidden_size"]).to(conditions.device)
    x, r = (
        torch.randn(figures["batch_size"], count, figures["hidden_size"], device=conditions.device, requires_grad=True)
        for count in (num_tokens, num_states)
    )
    if with_triton:
        _check_triton(x)
    with conditions.autocast():
        of_stream = module.fuse(x).detach().requires_grad_()  # solvers compute it once for all passes and steps

    def work() -> None:
        for _ in range(figures["num_calls"]):
            with conditions.autocast():
                out = module(x, r, of_stream)
            out.backward(torch.ones_like(out))

    def run() -> float:
        with use_triton(with_triton):
            seconds = seconds_of(work, conditions.device) / figures["num_calls"]
        for tensor in (x, r, of_stream):
            tensor.grad = None
        module.zero_grad()
        return seconds

    return Workload(run, module)


def _check_triton(x: Tensor) -> None:
    try:
        with use_triton():
            is_used = triton_for(x) is not None
    except ValueError as error:
        raise UnavailableError("not installed: pip install 'crosscurrent[gpu]'") from error
    if not is_used:
        raise UnavailableError("needs a GPU: --device cuda")


FUSION = Case(
    name="fusion",
    summary="forward and backward pass of fusion and carry alone, with plain operations and with Triton kernels",
    unit="call",
    sizes={
        "tiny": {"batch_size": 2, "num_tokens": 5, "hidden_size": 32, "num_calls": 2},
        "standard": {"batch_size": 8, "num_tokens": 128, "hidden_size": 576, "num_calls": 10},
        "large": {"batch_size": 32, "num_tokens": 1024, "hidden_size": 576, "num_calls": 50},
    },
    repeats=7,
    has_memory=False,
    subjects=lambda conditions, figures: [
        Subject(f"{kind}, {way}", partial(_workload, conditions, figures, kind, with_triton))
        for kind in _kinds(figures)
        for way, with_triton in WAYS.items()
    ],
    ratios=lambda figures: [Ratio(f"{kind}, Triton", f"{kind}, plain") for kind in _kinds(figures)],
)
