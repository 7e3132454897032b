"""The running product of permutations of five things: state tracking in S5, which no fixed depth of attention can do.

Reads `10234 01243` after BOS and predicts `10234 10243`: after every input the product so far. A permutation is
written as what it puts in places 0 to 4. Composition runs from left to right, state <- state then input: the product of p
and q puts p[q[i]] in place i, that is, q rearranges what p has arranged. (This project's choice.)
"""

import itertools
import random
from typing import ClassVar

from crosscurrent.tasks.splits import Split
from crosscurrent.tasks.task import BOS, Layout, Lengths, Symbols, Task, supervised

PERMUTATIONS: Symbols = tuple("".join(places) for places in itertools.permutations("01234"))
IDENTITY = PERMUTATIONS[0]
# Those that leave all but at most two things in place: the identity and the 10 transpositions.
SWAPS: Symbols = tuple(p for p in PERMUTATIONS if sum(a != b for a, b in zip(p, IDENTITY, strict=True)) <= 2)


def then(state: str, permutation: str) -> str:
    """The state after the permutation has rearranged it.

    Example:
        >>> then("10234", "01243")
        '10243'
        >>> then("12340", "10234") == then("10234", "12340")
        False
    """
    return "".join(state[int(place)] for place in permutation)


_PRODUCTS = {(state, p): then(state, p) for state in PERMUTATIONS for p in PERMUTATIONS}


class RunningProduct(Task):
    """Permutations drawn uniformly from `inputs`, and their product after each."""

    inputs: ClassVar[Symbols]
    vocabulary = (*PERMUTATIONS, BOS)
    chance = 1 / len(PERMUTATIONS)
    lengths = Lengths((32,), (32,), (32, 48, 64, 96, 128, 192, 256, 512))
    metrics = ("final", "prefix", "sequence")
    prefix_supervision = True

    def draw(self, numbers: random.Random, length: int, split: Split) -> Symbols:
        return tuple(numbers.choices(self.inputs, k=length))

    def layout(self, payload: Symbols, prefix_supervision: bool) -> Layout:
        state, products = IDENTITY, []
        for permutation in payload:
            state = _PRODUCTS[state, permutation]
            products.append(state)
        return Layout(payload, supervised(products, prefix_supervision))


class S5Standard(RunningProduct):
    """All 120 permutations."""

    name = "s5_standard"
    inputs = PERMUTATIONS


class S5Swaps(RunningProduct):
    """The identity and the 10 transpositions."""

    name = "s5_swaps"
    inputs = SWAPS
