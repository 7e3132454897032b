"""Parity: is the number of ones so far odd? One bit of memory solves it at every length.

Shapes: B examples, T bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.tasks.splits import Split, check_request, random_numbers, split_of

BOS = 2  # after the two bits, which are their own token ids
VOCAB_SIZE = 3
CHANCE = 0.5
MIN_HELD_OUT_LENGTH = 8  # the few shorter sequences are all left to training


@dataclass(frozen=True)
class Example:
    """A sequence of bits and, for each of them, the parity of the bits up to and including it."""

    bits: tuple[int, ...]
    parities: tuple[int, ...]


def example(split: Split, length: int, index: int, seed: int = 0) -> Example:
    """The example number `index`, uniform over the sequences of `length` bits that belong to the split.

    A sequence belongs to one split whatever the seed, so no other seed can bring a test sequence into training.

    Raises:
        ValueError: there is no such split, the index is negative, or the length is below 1 (train) or
            MIN_HELD_OUT_LENGTH (validation and test).

    Example:
        >>> example("test", length=8, index=0)
        Example(bits=(0, 0, 0, 1, 0, 0, 0, 0), parities=(0, 0, 0, 1, 1, 1, 1, 1))
    """
    check_request(split, index)
    shortest = 1 if split == "train" else MIN_HELD_OUT_LENGTH
    if length < shortest:
        raise ValueError(f"length={length} is not allowed for the {split} split: give at least {shortest}.")
    numbers = random_numbers("parity", split, length, index, seed)
    while True:
        bits = f"{numbers.getrandbits(length):0{length}b}"
        if length < MIN_HELD_OUT_LENGTH or split_of(f"parity {bits}") == split:
            return Example(tuple(map(int, bits)), _parities(bits))


def batch(split: Split, length: int, indices: Iterable[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Examples of one length as token ids [B, 1 + T], BOS first, and the parities [B, T] (int64).

    Example:
        >>> tokens, parities = batch("train", length=5, indices=range(32))
        >>> tokens.shape, parities.shape
        (torch.Size([32, 6]), torch.Size([32, 5]))
    """
    examples = [example(split, length, index, seed) for index in indices]
    tokens = torch.tensor([(BOS, *one.bits) for one in examples])
    return tokens, torch.tensor([one.parities for one in examples])


def _parities(bits: str) -> tuple[int, ...]:
    parity, parities = 0, []
    for bit in bits:
        parity ^= int(bit)
        parities.append(parity)
    return tuple(parities)
