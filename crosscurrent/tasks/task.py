"""What every sequence task is: symbols in, one symbol to predict at each supervised position.

A task describes itself by class attributes and two methods: `draw` makes the payload, `layout` says what is read and what
is to be predicted where. The rest is shared: examples by index, splits that cannot overlap, token ids.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from crosscurrent.tasks.splits import Split, check_request, random_numbers, split_of

BOS = "<bos>"
IGNORED = -100  # no target here: torch's and transformers' value

Symbols = tuple[str, ...]

_MOST_DRAWS = 10_000  # a tenth of all payloads belongs to each held-out split, so a task that has some needs far fewer


@dataclass(frozen=True)
class Example:
    """Token ids as the model reads them, BOS first, and at each position the id to predict there, or IGNORED.

    Targets are not shifted: `targets[i]` is what the logits at position i should say. The first `num_prompt` tokens, BOS
    among them, are a prompt that is not recurrent; 0: all tokens are. `positions` are what attention is told of where each
    token stands; None: tokens are counted.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    num_prompt: int = 0
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """An example in symbols: what is read after BOS, and beside each symbol the one to predict there, or None.

    The first `num_prompt` symbols and the BOS before them are not recurrent; 0: all are, BOS too.
    """

    read: Symbols
    predict: tuple[str | None, ...]
    num_prompt: int = 0


@dataclass(frozen=True)
class Lengths:
    """Payload lengths of a task's protocol: training, validation and test."""

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]


class Task(ABC):
    """A generated problem. Subclasses are registered by name in `crosscurrent.tasks.registry`.

    Attributes:
        name: as recipes and the command line spell it.
        vocabulary: every symbol; a symbol's token id is its place. BOS is among them.
        chance: share of right final answers that guessing gives.
        lengths: those of the published study.
        num_validation, num_test: sequences per length in the published study.
        min_length, max_length: the shortest and the longest length there is.
        min_held_out_length: the shortest for validation and test; what is shorter is all left to training.
        metrics: what is reported, the first one first. See `crosscurrent.evaluation.scoring.METRICS`.
        prefix_supervision: whether the study supervises every prefix, not only the final answer.
        has_positions: whether it says itself where its tokens stand (see `positions`).
    """

    name: ClassVar[str]
    vocabulary: ClassVar[Symbols]
    chance: ClassVar[float]
    lengths: ClassVar[Lengths]
    num_validation: ClassVar[int] = 256
    num_test: ClassVar[int] = 1024
    min_length: ClassVar[int] = 1
    min_held_out_length: ClassVar[int] = 8
    max_length: ClassVar[int] = 2**16
    metrics: ClassVar[tuple[str, ...]] = ("final",)
    prefix_supervision: ClassVar[bool] = False
    has_positions: ClassVar[bool] = False

    @abstractmethod
    def draw(self, numbers: random.Random, length: int, split: Split) -> Symbols:
        """A payload of `length` symbols, uniform or as the task defines."""

    @abstractmethod
    def layout(self, payload: Symbols, prefix_supervision: bool) -> Layout:
        """What is read, and what is to be predicted where."""

    def positions(self, numbers: random.Random, payload: Symbols, split: Split) -> tuple[int, ...]:
        """Where each token stands, BOS first, for tasks that say so themselves (`has_positions`).

        As many as the layout reads, and one for BOS. In validation and test those of an answer that is to be generated rise
        by 1.
        """
        raise NotImplementedError

    def check_length(self, length: int, split: Split) -> None:
        """Raise ValueError unless the task has examples of this length in this split."""
        shortest = self.min_length if split == "train" else self.min_held_out_length
        if not isinstance(length, int) or not shortest <= length <= self.max_length:
            raise ValueError(
                f"length={length} is not allowed for the {split} split of {self.name}: give at least {shortest} and at most "
                f"{self.max_length}."
            )

    def trained_range(self, lengths: Sequence[int]) -> tuple[int, int]:
        """The shortest and the longest payload that training examples of these lengths have."""
        return min(lengths), max(lengths)

    def payload(self, split: Split, length: int, index: int, seed: int = 0) -> Symbols:
        """The payload number `index` of a split.

        It belongs to one split whatever the seed, so no other seed can bring a test sequence into training.

        Raises:
            ValueError: there is no such split, the index is negative, or the task has no such length there.
        """
        check_request(split, index)
        self.check_length(length, split)
        numbers = random_numbers(self.name, split, length, index, seed)
        for _ in range(_MOST_DRAWS):
            payload = self.draw(numbers, length, split)
            if length < self.min_held_out_length or split_of(f"{self.name} {''.join(payload)}") == split:
                return payload
        raise ValueError(
            f"{self.name} has too few payloads of length {length} to have some in the {split} split: raise its "
            "min_held_out_length."
        )

    def example(
        self, split: Split, length: int, index: int, seed: int = 0, prefix_supervision: bool | None = None
    ) -> Example:
        """The example number `index` of a split, as token ids.

        Args:
            split: "train", "validation" or "test".
            length: of the payload.
            index: from 0.
            seed: of the data.
            prefix_supervision: None: as in the published study.

        Raises:
            ValueError: as `payload`.

        Example:
            >>> from crosscurrent.tasks import get_task
            >>> example = get_task("parity").example("test", length=8, index=0)
            >>> example.tokens, example.targets
            ((2, 0, 0, 0, 1, 0, 0, 0, 0), (-100, -100, -100, -100, -100, -100, -100, -100, 1))
        """
        every_prefix = self.prefix_supervision if prefix_supervision is None else prefix_supervision
        payload = self.payload(split, length, index, seed)
        layout = self.layout(payload, every_prefix)
        targets = (IGNORED if symbol is None else self.ids[symbol] for symbol in layout.predict)
        num_prompt = layout.num_prompt and layout.num_prompt + 1  # with BOS
        positions = None
        if self.has_positions:
            numbers = random_numbers(f"positions of {self.name}", split, length, index, seed)
            positions = self.positions(numbers, payload, split)
            if len(positions) != len(layout.read) + 1:
                raise ValueError(
                    f"{self.name} gives {len(positions)} positions for {len(layout.read)} symbols and BOS: give one each."
                )
        return Example(self.encode(layout.read), (IGNORED, *targets), num_prompt, positions)

    def encode(self, symbols: Sequence[str]) -> tuple[int, ...]:
        """Token ids, BOS first.

        Raises:
            ValueError: a symbol is not in the vocabulary.
        """
        unknown = sorted(set(symbols) - set(self.ids))
        if unknown:
            raise ValueError(
                f"{self.name} has no symbol {unknown[0]!r}: its vocabulary is {' '.join(self.vocabulary)}."
            )
        return (self.ids[BOS], *(self.ids[symbol] for symbol in symbols))

    def decode(self, ids: Sequence[int]) -> Symbols:
        """The symbols of token ids.

        Raises:
            ValueError: one is not in the vocabulary.
        """
        outside = [token for token in ids if not 0 <= token < len(self.vocabulary)]
        if outside:
            raise ValueError(f"{self.name} has no token {outside[0]}: its ids are 0 to {len(self.vocabulary) - 1}.")
        return tuple(self.vocabulary[token] for token in ids)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token id of each symbol."""
        return {symbol: place for place, symbol in enumerate(self.vocabulary)}


def supervised(answers: Sequence[str | None], every_prefix: bool) -> tuple[str | None, ...]:
    """The answers to predict: all of them, or the final one alone."""
    return tuple(answers) if every_prefix else (*[None] * (len(answers) - 1), answers[-1])
