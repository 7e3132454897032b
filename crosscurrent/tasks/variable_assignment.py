"""Variable assignment: follow a chain of aliases through shuffled lines to a digit."""

import random
import string
from dataclasses import dataclass

from crosscurrent.tasks.splits import Split, check_request, random_numbers, split_of

NUM_BASE_VARIABLES = 8
NUM_DISTRACTORS = 6
HARD_DEPTH = 5
MAX_DEPTH = len(string.ascii_lowercase) - NUM_BASE_VARIABLES - NUM_DISTRACTORS
CHANCE = 0.1


@dataclass(frozen=True)
class Example:
    """A problem as text, and its answer: one digit. The text ends where the answer is to follow."""

    prompt: str
    answer: str


def example(split: Split, index: int, seed: int = 0, depth: int = 2) -> Example:
    """The problem number `index` of a split.

    Base variables hold a random digit each. `depth` aliases lead from one of them to the variable asked for; the
    distractors are aliases of any variable that is defined without them. A problem belongs to one split whatever the
    seed and the order of its lines.

    Args:
        depth: number of aliases to follow; HARD_DEPTH in the hard case.

    Raises:
        ValueError: there is no such split, the index is negative, or the depth is not in 1..MAX_DEPTH.

    Example:
        >>> one = example("train", index=0)
        >>> print(one.prompt.splitlines()[-1] + one.answer)
        value of j: 9
    """
    check_request(split, index)
    check_depth(depth)
    numbers = random_numbers("variable_assignment", split, index, seed, depth)
    while True:
        lines, target, answer = _draw(numbers, depth)
        if split_of(f"{sorted(lines)} {target}") == split:
            return Example("\n".join([*lines, f"value of {target}: "]), answer)


def check_depth(depth: int) -> None:
    """Raise ValueError unless there are problems of that depth."""
    if type(depth) is not int or not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth={depth!r} is not allowed: give 1 to {MAX_DEPTH} (there are 26 names).")


def _draw(numbers: random.Random, depth: int) -> tuple[list[str], str, str]:
    """Lines in random order, the variable asked for, and its value."""
    names = numbers.sample(string.ascii_lowercase, NUM_BASE_VARIABLES + depth + NUM_DISTRACTORS)
    base, chain = names[:NUM_BASE_VARIABLES], names[NUM_BASE_VARIABLES : NUM_BASE_VARIABLES + depth]
    digits = {name: str(numbers.randrange(10)) for name in base}
    root = numbers.choice(base)
    aliases = dict(zip(chain, [root, *chain[:-1]], strict=True))
    for distractor in names[NUM_BASE_VARIABLES + depth :]:
        aliases[distractor] = numbers.choice([*base, *aliases])
    lines = [f"{name}={meaning}" for name, meaning in (digits | aliases).items()]
    numbers.shuffle(lines)
    return lines, chain[-1], digits[root]
