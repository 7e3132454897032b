"""Random draws that depend on nothing but the seed, the problem and which of its outputs it is.

Shapes: B rows, T tokens so far, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import TopPLogitsWarper


class SeededSampling(LogitsProcessor):
    """Makes greedy decoding draw at random: adds Gumbel noise, of which each row has a stream of its own.

    The largest of logits with such noise is a draw from their softmax (the Gumbel-max trick). So a row's draws are the same
    in every batch, and global random state is neither read nor changed.

    Args:
        keys: of the B rows, the problem's id and the output's number.
        temperature: that logits are divided by.
        top_p: draw among the likeliest tokens of this total share.
        seed: of all draws.
    """

    def __init__(self, keys: Sequence[tuple[str, int]], temperature: float, top_p: float, seed: int):
        self.temperature = temperature
        self.top_p = TopPLogitsWarper(top_p) if top_p < 1 else None
        self.generators = [torch.Generator().manual_seed(_seed(seed, *key)) for key in keys]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The logits [B, V] of the next token, warped and with noise."""
        warped: Tensor = scores.float() / self.temperature
        if self.top_p is not None:
            warped = self.top_p(input_ids, warped)  # type: ignore[arg-type]
        noise = torch.stack([_gumbel(warped.shape[1], generator) for generator in self.generators])
        return warped + noise.to(warped.device)


def _gumbel(count: int, generator: torch.Generator) -> Tensor:
    exponential = torch.empty(count).exponential_(generator=generator)
    return -exponential.clamp_min(torch.finfo(torch.float32).tiny).log()


def _seed(*parts: object) -> int:
    """The same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1
