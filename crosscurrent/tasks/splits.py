"""What the generators share: reproducible random numbers, and splits that cannot overlap."""

import hashlib
import random
from typing import Literal, get_args

Split = Literal["train", "validation", "test"]

# Of ten equal shares of all possible examples; the rest is for training.
_SHARES: dict[int, Split] = {0: "validation", 1: "test"}


def random_numbers(*key: object) -> random.Random:
    """A generator that the key alone determines, on every machine.

    Example:
        >>> random_numbers("parity", "train", 0).random() == random_numbers("parity", "train", 0).random()
        True
    """
    return random.Random("/".join(map(str, key)))


def split_of(content: str) -> Split:
    """The split that an example belongs to, decided by what it says, so that no example can be in two.

    Example:
        >>> split_of("1011") == split_of("1011")
        True
    """
    share = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8]) % 10
    return _SHARES.get(share, "train")


def check_request(split: str, index: int) -> None:
    """Raise ValueError unless there is such a split and the index is not negative."""
    if split not in get_args(Split):
        raise ValueError(f"split={split!r} is not allowed: give one of {', '.join(map(repr, get_args(Split)))}.")
    if index < 0:
        raise ValueError(f"index={index} is not allowed: examples are numbered from 0.")
