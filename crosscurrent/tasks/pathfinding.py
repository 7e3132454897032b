"""Pathfinding: the one shortest path between two nodes of a graph that is given as shuffled edges."""

import random
from dataclasses import dataclass
from itertools import pairwise

from crosscurrent.tasks.splits import Split, check_request, random_numbers, split_of

NUM_LANES = 6
NUM_DEAD_ENDS = 6
MIN_STEPS, MAX_STEPS = 10, 18
LONGEST = 30

_CONSONANTS, _VOWELS, _ENDINGS = "bdfgklmnprstvz", "aeiou", "fkxz"
_NUM_SYLLABLES = len(_CONSONANTS) * len(_VOWELS)
NUM_NAMES = _NUM_SYLLABLES**2 * len(_ENDINGS)


@dataclass(frozen=True)
class Example:
    """A graph, and the only shortest path from its first to its last node.

    Attributes:
        edges: from a node to another, each once, in random order.
        path: names of the nodes, the first and the last included.
    """

    edges: tuple[tuple[str, str], ...]
    path: tuple[str, ...]


def name_of(index: int) -> str:
    """The invented name of that number: two syllables and an ending. No two numbers have the same.

    Example:
        >>> name_of(0), name_of(NUM_NAMES - 1), len({name_of(index) for index in range(NUM_NAMES)}) == NUM_NAMES
        ('babaf', 'zuzuz', True)
    """
    index, ending = divmod(index, len(_ENDINGS))
    first, second = divmod(index, _NUM_SYLLABLES)
    return f"{_syllable(first)}{_syllable(second)}{_ENDINGS[ending]}"


def _syllable(index: int) -> str:
    consonant, vowel = divmod(index, len(_VOWELS))
    return _CONSONANTS[consonant] + _VOWELS[vowel]


def example(split: Split, index: int, seed: int = 0, min_steps: int = MIN_STEPS, max_steps: int = MAX_STEPS) -> Example:
    """The problem number `index` of a split.

    The backbone leads from the first node to the last. Beside it run NUM_LANES lanes from the first node to the last,
    through nodes of their own, each 1 to 3 steps longer than the backbone. NUM_DEAD_ENDS chains of 1 to 3 steps leave
    nodes of the backbone and the lanes and lead nowhere. So the backbone is the only shortest path. A problem belongs to
    one split whatever the seed and the order of its edges.

    Args:
        min_steps, max_steps: of the backbone, drawn evenly between them.

    Raises:
        ValueError: there is no such split, the index is negative, or not 1 <= min_steps <= max_steps <= LONGEST.

    Example:
        >>> one = example("train", index=0)
        >>> one.path[:3], len(one.path) - 1, len(one.edges)
        (('tumef', 'fenif', 'gukoz'), 11, 96)
    """
    check_request(split, index)
    check_steps(min_steps, max_steps)
    numbers = random_numbers("pathfinding", split, index, seed, min_steps, max_steps)
    while True:
        one = _draw(numbers, numbers.randint(min_steps, max_steps))
        if split_of(f"{sorted(one.edges)} {one.path[0]} {one.path[-1]}") == split:
            return one


def check_steps(min_steps: int, max_steps: int) -> None:
    """Raise ValueError unless there are backbones of that many steps."""
    if type(min_steps) is not int or type(max_steps) is not int or not 1 <= min_steps <= max_steps <= LONGEST:
        raise ValueError(
            f"min_steps={min_steps!r}, max_steps={max_steps!r} is not allowed: "
            f"give 1 <= min_steps <= max_steps <= {LONGEST}."
        )


def _draw(numbers: random.Random, steps: int) -> Example:
    lane_steps = [steps + numbers.randint(1, 3) for _ in range(NUM_LANES)]
    dead_steps = [numbers.randint(1, 3) for _ in range(NUM_DEAD_ENDS)]
    num_nodes = steps + 1 + sum(lane_steps) - NUM_LANES + sum(dead_steps)
    names = map(name_of, numbers.sample(range(NUM_NAMES), num_nodes))

    def fresh(count: int) -> list[str]:
        return [next(names) for _ in range(count)]

    path = fresh(steps + 1)
    chains = [path, *([path[0], *fresh(length - 1), path[-1]] for length in lane_steps)]
    joints = sorted({node for chain in chains for node in chain} - {path[-1]})
    chains += [[numbers.choice(joints), *fresh(length)] for length in dead_steps]
    edges = [edge for chain in chains for edge in pairwise(chain)]
    numbers.shuffle(edges)
    return Example(tuple(edges), tuple(path))
