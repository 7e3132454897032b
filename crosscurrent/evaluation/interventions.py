"""Greedy decoding of a recurrent model whose carried state is changed on its way from one token to the next.

What a token reads is the register of the cache's `RecurrentState`, and one-token calls are exact with every solver. So a
loop of one-token calls that puts another register into the cache before each call is all that an intervention takes: no
weight, no module and no attention entry is touched, and without a change it is `generate` with `solver=Sequential()`.

Shapes: B rows, D width of the state.
"""

import hashlib
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from crosscurrent.evaluation.probing import undisturbed
from crosscurrent.models.cache import RecurrentCache
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.inputs import positions_are_given
from crosscurrent.models.sharding import weights_come_and_go
from crosscurrent.models.wrapped import recurrent_model
from crosscurrent.recurrence.problem import check_count
from crosscurrent.recurrence.steps import fixed_weights


@dataclass(frozen=True)
class Moment:
    """What an intervention sees before a token.

    Attributes:
        registers: [B, D] the state that each row's next token would read.
        initial: [B, D] the state that is read where there is no predecessor.
        positions: [B] int64, how many tokens of its row come before the next one, prompt included and padding not.
        ids: of the rows' problems.
        partners: [B, D] as `registers`, of the rows' partners, if the intervention reads them.
    """

    registers: Tensor
    initial: Tensor
    positions: Tensor
    ids: Sequence[str]
    partners: Tensor | None = None


@dataclass(frozen=True)
class Intervention:
    """Nothing is changed. The others are subclasses.

    Attributes:
        name: of the condition, in file names too.
        is_recurrent: whether tokens read a state at all.
        reads_partners: whether a partner is decoded beside each row.

    Example:
        >>> Intervention().name, Reset(every=4).name
        ('intact', 'reset-4')
    """

    is_recurrent: ClassVar[bool] = True
    reads_partners: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "intact"

    def read(self, moment: Moment) -> Tensor:
        """[B, D] the state that the next token is to read."""
        return moment.registers


@dataclass(frozen=True)
class Off(Intervention):
    """No token is recurrent: none is fused with a state. Of a T2MLR this leaves the base's layers, as they were trained."""

    is_recurrent: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "off"


@dataclass(frozen=True)
class Reset(Intervention):
    """Tokens number 0, N, 2 N, ... of a row read the state of a token without predecessor. Prompt tokens count, padding not.

    They are fused all the same, with R = 0 in a T2MLR, whose gate on the stream still acts: `Reset(1)` is not `Off()`.

    Args:
        every: N. From the row's length on nothing is changed.

    Raises:
        ValueError: it is not an integer of at least 1.
    """

    every: int

    def __post_init__(self) -> None:
        check_count("every", self.every)

    @property
    def name(self) -> str:
        return f"reset-{self.every}"

    def read(self, moment: Moment) -> Tensor:
        is_reset = moment.positions % self.every == 0
        return torch.where(is_reset[:, None], moment.initial, moment.registers)


@dataclass(frozen=True)
class Other(Intervention):
    """A token reads the state that another problem's unchanged run has at the same distance from its prompt's end.

    Where the other prompt has not begun yet there is no predecessor, and after the other answer its last state stays.
    """

    reads_partners: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "other"

    def read(self, moment: Moment) -> Tensor:
        assert moment.partners is not None
        return moment.partners


@dataclass(frozen=True)
class Random(Intervention):
    """A token reads a vector of random direction and of its state's RMS norm, drawn for the problem and the token's number.

    Args:
        seed: of the draws.
    """

    seed: int = 0

    @property
    def name(self) -> str:
        return "random"

    def read(self, moment: Moment) -> Tensor:
        drawn = [
            self._draw(f"{self.seed} {one} {position}", moment.registers)
            for one, position in zip(moment.ids, moment.positions.tolist(), strict=True)
        ]
        directions = torch.stack(drawn)
        return directions * (moment.registers.norm(dim=-1) / directions.norm(dim=-1))[:, None]

    def _draw(self, of: str, like: Tensor) -> Tensor:
        """[D], the same for the same text on every device and in every batch."""
        seed = int.from_bytes(hashlib.sha256(of.encode()).digest()[:8], "big", signed=True)
        return torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(seed)).to(like)


def model_with_feedback(model: Any) -> RecurrentCausalLM:
    """The recurrent model inside what PEFT or data parallelism has wrapped around it.

    Raises:
        ValueError: there is none, or it has no feedback.
    """
    inner = recurrent_model(model)
    if inner.config.feedback_interval is None:
        raise ValueError("this model has feedback_interval=None: no state is read, so there is none to change.")
    if positions_are_given(inner.config):
        raise ValueError("this model has given_positions=True, and prompts say nothing of where their tokens stand.")
    return inner


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    ids: Sequence[str],
    intervention: Intervention,
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    partners: Sequence[Sequence[int]] | None = None,
    prompt_recurrence: bool | None = None,
) -> list[list[int]]:
    """Continue prompts greedily under an intervention.

    A recurrent prompt goes token by token. One that is not recurrent reads no state that could be changed: it goes in one
    call.

    Args:
        model: a recurrent model with feedback. It is left as it was.
        prompts: B lists of token ids, without padding. A row's answer depends on no other row but by rounding.
        ids: B names, which random draws are seeded by.
        intervention: what is done to the state.
        max_new_tokens: of each row.
        eos_ids: tokens that end an answer; they are part of it.
        partners: B prompts whose unchanged runs `Other` reads from; for other interventions without effect.
        prompt_recurrence: whether prompt tokens are recurrent; None: as `config.prompt_recurrence` says.

    Returns:
        The new tokens of each row.

    Raises:
        ValueError: the model has no feedback, there is no prompt or an empty one, or a partner is missing.

    Example:
        >>> import crosscurrent as cc
        >>> model = cc.RLTForCausalLM(cc.RLTConfig(vocab_size=61, hidden_size=32, intermediate_size=64))
        >>> [len(answer) for answer in decode(model, [[1, 2, 3], [4]], ["a", "b"], Reset(every=2), max_new_tokens=5)]
        [5, 5]
    """
    inner = model_with_feedback(model)
    _check(prompts, ids, intervention, partners, max_new_tokens)
    if prompt_recurrence is None:
        prompt_recurrence = bool(getattr(inner.config, "prompt_recurrence", True))
    rows = [*prompts, *(partners if intervention.reads_partners and partners is not None else ())]
    with undisturbed(inner), nullcontext() if weights_come_and_go(inner) else fixed_weights():
        run = _Run(inner, intervention, ids)
        logits = run.read_prompts(rows, prompt_recurrence)
        answers: list[list[int]] = [[] for _ in rows]
        is_over = torch.zeros(len(rows), dtype=torch.bool)
        for number in range(max_new_tokens):
            # In float32, as `generate` compares them
            tokens = logits[:, -1].float().argmax(dim=-1).cpu()
            for row in (~is_over).nonzero()[:, 0].tolist():
                answers[row].append(int(tokens[row]))
                is_over[row] = answers[row][-1] in eos_ids
            if bool(is_over[: len(prompts)].all()) or number == max_new_tokens - 1:
                break
            # What comes after an answer is padding, which leaves a row's state as it is
            logits = run.step(tokens[:, None], ~is_over[:, None])
    return answers[: len(prompts)]


def _check(
    prompts: Sequence[Sequence[int]],
    ids: Sequence[str],
    intervention: Intervention,
    partners: Sequence[Sequence[int]] | None,
    max_new_tokens: int,
) -> None:
    check_count("max_new_tokens", max_new_tokens)
    if not prompts or not all(map(len, [*prompts, *(partners or ())])):
        raise ValueError("there is no prompt, or an empty one: give each row at least one token.")
    counts = [len(ids), *([len(partners or ())] if intervention.reads_partners else [])]
    if any(count != len(prompts) for count in counts):
        raise ValueError(
            f"{len(prompts)} prompts, {len(ids)} ids and {len(partners or ())} partners were given: each prompt needs an "
            "id and, under the condition 'other', a partner."
        )


class _Run:
    """Calls of a model that go on from one another, with an intervention between them. The last rows may be partners."""

    def __init__(self, model: RecurrentCausalLM, intervention: Intervention, ids: Sequence[str]):
        self.model, self.intervention, self.ids = model, intervention, ids
        self.cache: RecurrentCache = model.new_cache()
        self.mask: Tensor | None = None

    def read_prompts(self, prompts: Sequence[Sequence[int]], are_recurrent: bool) -> Tensor:
        """Logits [B, 1, V] after the prompts, padded on the left."""
        longest = max(map(len, prompts))
        tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        is_real = torch.tensor([[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in prompts])
        if not (are_recurrent and self.intervention.is_recurrent):
            return self._call(tokens, is_real, is_recurrent=False)
        for column in range(longest):
            logits = self.step(tokens[:, column : column + 1], is_real[:, column : column + 1])
        return logits

    def step(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Logits [B, 1, V] after one more token [B, 1] of each row."""
        state = self.cache.state
        if state is not None:
            num_rows = len(self.ids)
            own, partners = state.register[:num_rows], state.register[num_rows:]
            initial = self.model.start_state(num_rows).register  # type: ignore[operator]
            moment = Moment(own, initial.to(own), state.num_tokens[:num_rows], self.ids, partners)
            self.cache.state = replace(state, register=torch.cat([self.intervention.read(moment), partners]))
        return self._call(tokens, is_real, self.intervention.is_recurrent)

    def _call(self, tokens: Tensor, is_real: Tensor, is_recurrent: bool) -> Tensor:
        tokens, is_real = tokens.to(self.model.device), is_real.to(self.model.device)
        self.mask = is_real if self.mask is None else torch.cat([self.mask, is_real], dim=1)
        inputs: dict[str, Any] = {} if is_recurrent else {"recurrent_mask": torch.zeros_like(tokens)}
        output = self.model(
            input_ids=tokens,
            attention_mask=self.mask.long(),
            use_cache=True,
            return_dict=True,
            logits_to_keep=1,
            **{CACHE_NAME: self.cache},
            **inputs,
        )
        self.cache = getattr(output, CACHE_NAME)
        return output.logits
