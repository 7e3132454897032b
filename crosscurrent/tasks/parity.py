"""Parity: is the number of ones so far odd? One bit of memory solves it at every length.

Reads `0 1 1 0 1` after BOS and predicts `1` at the last bit (every prefix: `0 1 0 0 1`).
"""

import random
from itertools import accumulate
from operator import xor

from crosscurrent.tasks.splits import Split
from crosscurrent.tasks.task import BOS, Layout, Lengths, Symbols, Task, supervised


class Parity(Task):
    """Bits, and whether the number of ones is odd."""

    name = "parity"
    vocabulary = ("0", "1", BOS)
    chance = 0.5
    lengths = Lengths(tuple(range(3, 41)), (32, 36, 40), (32, 40, 48, 64, 96, 128, 192, 256))

    def draw(self, numbers: random.Random, length: int, split: Split) -> Symbols:
        return tuple(f"{numbers.getrandbits(length):0{length}b}")

    def layout(self, payload: Symbols, prefix_supervision: bool) -> Layout:
        parities = accumulate(map(int, payload), xor)
        return Layout(payload, supervised([str(parity) for parity in parities], prefix_supervision))
