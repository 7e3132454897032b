"""What was meant by a misspelt name."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(given: object, allowed: Iterable[object], most: int = 1, cutoff: float = 0.6) -> str:
    """A question with the nearest names, after a space; nothing if none is near.

    Args:
        given: the misspelt name.
        allowed: the valid ones.
        most: how many of them to name.
        cutoff: how near they must be, from 0 to 1.

    Example:
        >>> did_you_mean("partiy", ["parity", "addition"])
        " Did you mean 'parity'?"
        >>> did_you_mean("x", ["parity"])
        ''
    """
    near = get_close_matches(str(given), [str(name) for name in allowed], n=most, cutoff=cutoff)
    return f" Did you mean {', '.join(map(repr, near))}?" if near else ""
