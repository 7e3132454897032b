"""Where along a sequence a model errs, how sure it is there, and how large what it carries has become.

Shapes: N examples, T positions (columns; BOS is 0), M supervised positions of a batch, B rows, V vocabulary, D hidden_size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from crosscurrent.data.generated import inputs_for
from crosscurrent.evaluation.probing import at_least_float32
from crosscurrent.evaluation.scoring import Examples
from crosscurrent.evaluation.telemetry import FINAL_NORMS
from crosscurrent.models.baselines import LSTMForCausalLM
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.rlt import RLTForCausalLM
from crosscurrent.models.t2mlr import T2MLRForCausalLM
from crosscurrent.tasks import IGNORED


@dataclass(frozen=True)
class Rate:
    """Events among chances: first errors, and the supervised positions at which one could have come.

    Example:
        >>> Rate(3, 600).value
        0.005
    """

    events: int
    chances: int

    @property
    def value(self) -> float | None:
        """None if there were no chances."""
        return self.events / self.chances if self.chances else None


@dataclass(frozen=True)
class AtPosition:
    """What N examples say at one position at which some are asked.

    Attributes:
        position: the column; BOS is 0.
        num_asked: supervised examples.
        right: their share that is right.
        without_error: share of all examples without an error so far, this position included.
        hazard: first errors here, among the examples asked here that had none before.
        margin_median, margin_low: median and 5 % quantile of the margin.
        margin_median_unerring: median over the examples that had no error before; None if there is none.
        norm_mean, norm_deviation: of the state's 2-norm: mean and standard deviation over examples.
    """

    position: int
    num_asked: int
    right: float
    without_error: float
    hazard: Rate
    margin_median: float
    margin_low: float
    margin_median_unerring: float | None
    norm_mean: float
    norm_deviation: float


@dataclass(frozen=True)
class Positions:
    """What a model said at every position of N examples of one length.

    Args:
        asked: [N, T] bool, the supervised positions; at least one.
        right: [N, T] bool, whether the likeliest token is the right one.
        margins: [N, T] float32, logit of the right token minus the largest other one.
        norms: [N, T] float32, 2-norm of the state after each position.

    What `right`, `margins` and `norms` hold where nothing is asked does not count.

    Example:
        >>> asked = torch.tensor([[False, True, True, True]])
        >>> right = torch.tensor([[False, True, False, True]])
        >>> found = Positions(asked, right, torch.ones(1, 4), torch.ones(1, 4))
        >>> found.first_errors.tolist(), found.right_after_error
        ([2], 1.0)
    """

    asked: Tensor
    right: Tensor
    margins: Tensor
    norms: Tensor

    @property
    def num_positions(self) -> int:
        return self.asked.shape[1]

    @cached_property
    def first_errors(self) -> Tensor:
        """[N] int64 the position of each example's first error; T if it has none."""
        wrong = self.asked & ~self.right
        return torch.where(wrong.any(dim=1), wrong.to(torch.int8).argmax(dim=1), self.num_positions)

    @cached_property
    def at_risk(self) -> Tensor:
        """[N, T] bool, asked and without an error before."""
        return self.asked & (torch.arange(self.num_positions) <= self.first_errors[:, None])

    @property
    def right_share(self) -> float:
        """Of all supervised positions."""
        return self.right[self.asked].double().mean().item()

    @property
    def without_error(self) -> float:
        """Share of examples without any error."""
        return (self.first_errors == self.num_positions).double().mean().item()

    @property
    def right_after_error(self) -> float | None:
        """Share right of what is asked after an example's first error; None if nothing is."""
        after = self.asked & (torch.arange(self.num_positions) > self.first_errors[:, None])
        return self.right[after].double().mean().item() if bool(after.any()) else None

    def erred_by(self, share: float) -> int | None:
        """The first position by which a share of the examples has had an error; None if it never comes to that."""
        num_needed = max(1, -int(-share * len(self.first_errors) // 1))
        position = int(self.first_errors.sort().values[num_needed - 1])
        return position if position < self.num_positions else None

    def hazard(self, start: int = 0, stop: int | None = None) -> Rate:
        """First errors at the positions [start, stop), among the examples asked there that had none before."""
        chances = self.at_risk[:, start:stop]
        return Rate(int((chances & ~self.right[:, start:stop]).sum()), int(chances.sum()))

    @property
    def halves(self) -> tuple[Rate, Rate]:
        """The hazard of earlier and of later positions, parted so that each has half of the chances of a first error.

        Parted by chances, not by position: where most examples err early, few are left for later positions to tell by.
        """
        chances = self.at_risk.sum(dim=0).cumsum(dim=0)
        middle = int((2 * chances < chances[-1]).sum()) + 1
        return self.hazard(0, middle), self.hazard(middle)

    @property
    def last_tenth(self) -> Tensor:
        """[N, T] bool, the supervised positions in the last tenth of those at which any example is asked."""
        columns = self.asked.any(dim=0).nonzero().flatten()
        first = columns[-max(1, len(columns) // 10)]
        return self.asked & (torch.arange(self.num_positions) >= first)

    def unerring_margin(self, among: Tensor) -> float | None:
        """Median margin at the positions `among` [N, T] of examples that had no error before; None if there are none."""
        chosen = self.margins[self.at_risk & among]
        return chosen.median().item() if len(chosen) else None

    @cached_property
    def by_position(self) -> tuple[AtPosition, ...]:
        """One entry per position at which an example is asked."""
        return tuple(self._at(position) for position in self.asked.any(dim=0).nonzero().flatten().tolist())

    def _at(self, position: int) -> AtPosition:
        asked = self.asked[:, position]
        margins, norms = self.margins[asked, position], self.norms[asked, position].double()
        unerring = self.margins[self.at_risk[:, position], position]
        return AtPosition(
            position=position,
            num_asked=int(asked.sum()),
            right=self.right[asked, position].double().mean().item(),
            without_error=(self.first_errors > position).double().mean().item(),
            hazard=self.hazard(position, position + 1),
            margin_median=margins.median().item(),
            margin_low=margins.quantile(0.05).item(),
            margin_median_unerring=unerring.median().item() if len(unerring) else None,
            norm_mean=norms.mean().item(),
            norm_deviation=norms.std(correction=0).item(),
        )


def state_of(model: PreTrainedModel) -> str:
    """What `measure_positions` takes the norm of, in words."""
    if isinstance(model, RLTForCausalLM) and model.config.feedback_interval is not None:
        return "decoder output, which is carried"
    if _keeps_registers(model):
        return "carried state"
    if isinstance(model, LSTMForCausalLM):
        return "last layer's output, which is carried"
    return "last hidden state, which is not carried" if _final_norm(model) else "input of the output matrix"


@torch.no_grad()
def measure_positions(
    model: PreTrainedModel, examples: Examples, length: int, on_batch: Callable[[], object] = lambda: None
) -> Positions:
    """Ask a model for the answers to the examples of one length, and keep what is needed of every position.

    Args:
        model: in evaluation mode.
        examples: what to ask. Their `batch_size` bounds the memory.
        length: of the payloads.
        on_batch: called after each batch.

    Example::

        found = measure_positions(model, examples, 512)
        found.without_error, found.halves
    """
    parts = []
    for batch in examples.of_length(length):
        parts.append(_measure_batch(model, batch, examples.options))
        on_batch()
    width = max(part.num_positions for part in parts)
    columns = ([F.pad(getattr(part, name), (0, width - part.num_positions)) for part in parts] for name in _FIELDS)
    return Positions(*(torch.cat(column) for column in columns))


_FIELDS = ("asked", "right", "margins", "norms")


def _measure_batch(model: PreTrainedModel, batch: dict[str, Tensor], options: dict[str, Any]) -> Positions:
    inputs = {name: values.to(model.device) for name, values in inputs_for(model, batch).items()}
    logits, norms = _run(model, inputs, options)
    asked = batch["labels"] != IGNORED
    targets, said = batch["labels"][asked][:, None], logits[asked]  # [M, 1] and [M, V]
    others = said.scatter(1, targets, -torch.inf).amax(dim=1)
    margins, right = torch.zeros(asked.shape), torch.zeros_like(asked)
    margins[asked] = said.gather(1, targets)[:, 0] - others
    right[asked] = said.argmax(dim=1) == targets[:, 0]
    return Positions(asked, right, margins, norms)


def _run(model: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] and norms of the state [B, T], both float32 on the CPU."""
    if _keeps_registers(model):
        cache = model.new_cache()
        cache.activate_past_recording()
        output = model(**inputs, **{CACHE_NAME: cache}, use_cache=True, **options)
        states = output[CACHE_NAME].registers[:, 1:]  # the first is that before the first position
    else:
        with _inputs_of(_final_norm(model) or model.get_output_embeddings()) as seen:
            output = model(**inputs, use_cache=False, **options)
        (states,) = seen
    return output.logits.float().cpu(), at_least_float32(states).norm(dim=-1).float().cpu()


def _keeps_registers(model: Any) -> bool:
    """T2MLR's state is no layer's output: its cache is asked for it."""
    return isinstance(model, T2MLRForCausalLM) and model.config.feedback_interval is not None


def _final_norm(model: Any) -> Any:
    return next((module for path, module in model.named_modules() if path in FINAL_NORMS), None)


@contextmanager
def _inputs_of(module: Any) -> Iterator[list[Tensor]]:
    """The first argument of each call of a module."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()


def attention_cuts(model: Any, num_tokens: int) -> dict[str, dict[str, int]]:
    """Settings of an RLT that keep its attention from reaching further back than `num_tokens`, by what they cut.

    Returns:
        "encoder", "memory", and "encoder and memory" where both reach further; none for other models.

    Example:
        >>> from crosscurrent.models.rlt import RLTConfig
        >>> config = RLTConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, memory_sliding_window=8)
        >>> attention_cuts(RLTForCausalLM(config), 41)
        {'encoder': {'encoder_sliding_window': 41}}
    """
    if not isinstance(model, RLTForCausalLM):
        return {}
    windows = {"encoder": "encoder_sliding_window"}
    if model.config.num_decoder_layers:
        windows["memory"] = "memory_sliding_window"
    reaching = {
        part: {name: num_tokens}
        for part, name in windows.items()
        if getattr(model.config, name) is None or getattr(model.config, name) > num_tokens
    }
    if len(reaching) > 1:
        reaching["encoder and memory"] = dict.fromkeys(windows.values(), num_tokens)
    return reaching


@contextmanager
def configured(model: PreTrainedModel, settings: dict[str, int]) -> Iterator[None]:
    """A model with other values in its configuration; afterwards it has its own again."""
    own = {name: getattr(model.config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(model.config, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(model.config, name, value)
