"""The three things that a language model is made to do: a training step, a prefill, and the next tokens.

Shapes: B batch size, T tokens.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList

from crosscurrent.experiments.bench.case import Conditions, Dtype, Workload
from crosscurrent.experiments.bench.timing import now, seconds_of
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.recurrence import fixed_weights


def random_tokens(vocab_size: int, batch_size: int, num_tokens: int, device: str) -> Tensor:
    """[B, T] int64, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, vocab_size, (batch_size, num_tokens), generator=generator).to(device)


def training_step(
    model: nn.Module, loss_of: Callable[[], Tensor], conditions: Conditions, dtype: Dtype | None = None
) -> Workload:
    """Forward and backward pass; gradients are dropped after each, outside of the timing.

    Args:
        model: whose gradients they are.
        loss_of: the forward pass.
        conditions: device and autocast.
        dtype: in place of that of the conditions.
    """

    def step() -> None:
        with conditions.autocast(dtype):
            loss = loss_of()
        loss.backward()

    def run() -> float:
        seconds = seconds_of(step, conditions.device)
        model.zero_grad()
        return seconds

    model.train()
    return Workload(run, model)


def loss_of(model: nn.Module, ids: Tensor, **settings: Any) -> Callable[[], Tensor]:
    """The language-model loss on ids [B, T]; `settings` go to the model."""
    return lambda: model(ids, labels=ids, **settings).loss


def prefill(model: nn.Module, ids: Tensor, conditions: Conditions, **settings: Any) -> Workload:
    """One call over ids [B, T] that fills a cache and computes the last token's logits; `settings` go to the model."""
    model.eval()

    @torch.no_grad()
    def run() -> float:
        with conditions.autocast():
            work = lambda: model(ids, use_cache=True, logits_to_keep=1, **settings)  # noqa: E731
            return seconds_of(work, conditions.device)

    return Workload(run, model)


def token_by_token(model: nn.Module, ids: Tensor, conditions: Conditions) -> Workload:
    """The same as `prefill`, one token a call."""
    model.eval()

    def feed() -> None:
        cache = None
        for token in ids.split(1, dim=1):
            cache = model(token, use_cache=True, **{CACHE_NAME: cache})[CACHE_NAME]

    @torch.no_grad()
    def run() -> float:
        with conditions.autocast():
            return seconds_of(feed, conditions.device)

    return Workload(run, model)


def decode(model: nn.Module, prompt: Tensor, num_new: int, conditions: Conditions) -> Workload:
    """Seconds per token of greedy decoding after a prompt [B, T], in a plain loop: one call per token.

    The prompt's cache is made once; each run continues a copy of it, in `fixed_weights`, after a token that is not timed.
    """
    model.eval()
    with torch.no_grad(), conditions.autocast():
        start = model(prompt, use_cache=True, logits_to_keep=1)

    def continue_from(cache: Any, num_tokens: int) -> None:
        token = start.logits[:, -1:].argmax(dim=-1)
        for _ in range(num_tokens):
            token = model(token, use_cache=True, **{CACHE_NAME: cache}).logits[:, -1:].argmax(dim=-1)

    @torch.no_grad()
    def run() -> float:
        with conditions.autocast(), fixed_weights():
            continue_from(copy.deepcopy(start[CACHE_NAME]), 1)
            cache = copy.deepcopy(start[CACHE_NAME])
            return seconds_of(lambda: continue_from(cache, num_new), conditions.device) / num_new

    return Workload(run, model)


class TokenClock:
    """Notes when logits arrive, one time per generated token, wherever a `generate` lets one look at them."""

    def __init__(self, device: str):
        self.device = device
        self.times: list[float] = []

    def note(self) -> None:
        self.times.append(now(self.device))

    def seconds_per_token(self) -> float:
        """From the first to the last: the prompt is not in it."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def generate(model: Any, prompt: Tensor, num_new: int, conditions: Conditions) -> Workload:
    """Seconds per token of transformers' greedy `generate` after a prompt [B, T], the prompt's own time left out."""
    model.eval()

    def run() -> float:
        clock = TokenClock(conditions.device)

        def look(ids: Tensor, scores: Tensor) -> Tensor:
            clock.note()
            return scores

        with conditions.autocast():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_new + 1,
                do_sample=False,
                logits_processor=LogitsProcessorList([look]),
            )
        return clock.seconds_per_token()

    return Workload(run, model)
