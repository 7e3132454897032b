"""What messages to users are made of: what a misspelt name meant, and where two settings differ."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


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


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two nested values differ, as `key.key: old -> new`.

    Example:
        >>> differences({"a": {"b": 1}}, {"a": {"b": 2}})
        ['a.b: 1 -> 2']
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{path}: {old} -> {new}"]
    return [
        line
        for key in (*old, *(key for key in new if key not in old))
        for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    ]
