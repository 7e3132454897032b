"""Addition of decimal numbers, digits reversed, so that carries run in the direction of reading.

Reads `7 1 + 5 = 2 2` after BOS (17 + 5 = 22) and predicts `2 2 <eos>` from "=" on: the answer with its end, each token
from the right ones before it (teacher forcing). Every prefix: also, at each digit of the second number, the digit of
the sum there.

For training and validation each number has 1 to `length` digits, drawn at random; for test both have exactly `length`. No
number begins with a zero, but zero itself.

In `addition_places` attention is told a digit's place in its number as its position, not where it stands in the text. So
digits that are to be added stand at the same position, whatever the length of the numbers (position coupling, Cho et al.
2024, arXiv:2405.20671). In half of the training examples places are spread out at random, so that distances are seen which
short numbers do not have (random positions, Ruoss et al. 2023, arXiv:2305.16843).
"""

import random
from collections.abc import Sequence

from crosscurrent.tasks.splits import Split
from crosscurrent.tasks.task import BOS, Layout, Lengths, Symbols, Task

EOS = "<eos>"


class Addition(Task):
    """a + b, digit by digit."""

    name = "addition"
    vocabulary = (*"0123456789", "+", "=", EOS, BOS)
    chance = 0.1
    lengths = Lengths((8,), (8,), (9, 10, 11, 12, 14, 16, 32))
    num_test = 256
    min_length = 2  # a pair of shorter numbers may belong to any split
    min_held_out_length = 2
    max_length = 4000  # Python converts no longer numbers to text
    metrics = ("answer_tokens", "exact")

    def trained_range(self, lengths: Sequence[int]) -> tuple[int, int]:
        return 1, max(lengths)

    def draw(self, numbers: random.Random, length: int, split: Split) -> Symbols:
        a, b = (_number(numbers, length if split == "test" else numbers.randint(1, length)) for _ in range(2))
        return (*a, "+", *b)

    def layout(self, payload: Symbols, prefix_supervision: bool) -> Layout:
        middle = payload.index("+")
        a, b = payload[:middle], payload[middle + 1 :]
        answer = tuple(str(_value(a) + _value(b))[::-1])
        before = _digits_so_far(a, b) if prefix_supervision else [None] * len(b)
        return Layout(
            read=(*payload, "=", *answer),
            predict=(*[None] * (len(a) + 1), *before, *answer, EOS),
        )


class AdditionPlaces(Addition):
    """a + b, with the digits' places as positions.

    BOS and "+" stand at 0, digit i of both numbers at the i-th of a rising series of places. "=" and each digit of the
    answer stand at the place of the digit that is to be predicted there. The series is 1, 2, 3, ..., and in half
    of the training examples a random one up to `largest_place`.
    """

    name = "addition_places"
    has_positions = True
    largest_place = 64
    max_length = largest_place - 2  # the answer may have a digit more, and its end has a place

    def positions(self, numbers: random.Random, payload: Symbols, split: Split) -> tuple[int, ...]:
        middle = payload.index("+")
        a, b = payload[:middle], payload[middle + 1 :]
        num_places = max(len(a), len(b)) + 2
        is_spread = split == "train" and numbers.random() < 0.5
        largest = self.largest_place if is_spread else num_places
        places = sorted(numbers.sample(range(1, largest + 1), num_places))
        num_answers = len(str(_value(a) + _value(b))) + 1
        return (0, *places[: len(a)], 0, *places[: len(b)], *places[:num_answers])


def _number(numbers: random.Random, num_digits: int) -> str:
    smallest = 10 ** (num_digits - 1) if num_digits > 1 else 0
    return str(numbers.randrange(smallest, 10**num_digits))[::-1]


def _value(reversed_digits: Symbols) -> int:
    return int("".join(reversed(reversed_digits)))


def _digits_so_far(a: Symbols, b: Symbols) -> list[str | None]:
    """The digit of the sum in each place of b; it depends on that place and the earlier ones alone."""
    answer = str(_value(a) + _value(b))[::-1].ljust(len(b), "0")
    return list(answer[: len(b)])
