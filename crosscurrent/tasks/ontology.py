"""New questions in the style of ProsQA: which of two concepts a person belongs to, by chains of "Every X is a Y."

The names are those of the published problems, so that a model trained on these can be asked those. The numbers below were
fitted to the 800 published validation and test problems; `docs/reasoning/graphs.md` compares the two.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from crosscurrent.tasks.splits import Split, check_request, random_numbers, split_of

PERSONS = (
    *("Alex", "Bob", "Carol", "Davis", "Eva", "Fae", "Gabriel", "Jack", "Max", "Oliver", "Polly", "Rex", "Sally"),
    *("Sam", "Stella", "Tom", "Wren"),
)
CONCEPTS = tuple(
    f"{beginning}pus"
    for beginning in (
        *("bom", "boom", "brim", "chor", "dum", "fel", "fom", "ger", "gor", "grim", "gwom", "hil", "im", "jel", "jom"),
        *(
            "ker",
            "lem",
            "lor",
            "num",
            "quim",
            "rem",
            "rom",
            "ror",
            "scrom",
            "shum",
            "ster",
            "stor",
            "ter",
            "tim",
            "tum",
        ),
        *("vum", "wor", "wum", "yer", "yim", "yum", "zhor", "zum"),
    )
)
MIN_STEPS, HARDEST = 3, 6

_NUM_NODES = 27  # those without an edge are dropped at the end, about four
_MEAN_PARENTS = 1.5
_PARENTS = [_MEAN_PARENTS**count / math.factorial(count) for count in range(9)]
_ROOTS = (0, 1)


@dataclass(frozen=True)
class Example:
    """A question, and the chain that answers it.

    Attributes:
        edges: what is said, in order: of a person or concept and the concept that it is.
        path: from the person asked about to the right concept, a shortest one.
        wrong: the other concept, which no chain leads to.
        question: the edges as sentences, and the question.
    """

    edges: tuple[tuple[str, str], ...]
    path: tuple[str, ...]
    wrong: str
    question: str

    @property
    def steps(self) -> list[str]:
        """The path as sentences."""
        return [sentence(*edge) for edge in pairwise(self.path)]

    @property
    def answer(self) -> str:
        """That the person is the right concept."""
        return sentence(self.path[0], self.path[-1])


def sentence(name: str, concept: str) -> str:
    """What an edge says.

    Example:
        >>> sentence("Sally", "impus"), sentence("impus", "yumpus")
        ('Sally is a impus.', 'Every impus is a yumpus.')
    """
    return f"{name} is a {concept}." if name[0].isupper() else f"Every {name} is a {concept}."


def example(split: Split, index: int, seed: int = 0, min_steps: int = MIN_STEPS) -> Example:
    """The problem number `index` of a split.

    Two persons head a graph that grows node by node, each below some of the earlier ones, mostly below one person only.
    One of the two is asked about. The right concept is, of the leaves below that person alone, one of the deepest; the
    other concept is a leaf below the other person alone. A problem belongs to one split whatever the seed and the order of
    its sentences.

    Args:
        min_steps: the fewest from the person to the right concept, 3 to 6.

    Raises:
        ValueError: there is no such split, the index is negative, or min_steps is not allowed.

    Example:
        >>> one = example("train", index=0)
        >>> print(one.question[-30:], *one.steps)
        Is Stella a timpus or lorpus? Stella is a worpus. Every worpus is a rorpus. Every rorpus is a timpus.
    """
    check_request(split, index)
    check_min_steps(min_steps)
    numbers = random_numbers("ontology", split, index, seed, min_steps)
    while True:
        one = _draw(numbers, min_steps)
        if (
            one is not None
            and split_of(f"{sorted(one.edges)} {one.path[0]} {sorted([one.path[-1], one.wrong])}") == split
        ):
            return one


def check_min_steps(min_steps: int) -> None:
    """Raise ValueError unless there are problems of that many steps."""
    if type(min_steps) is not int or not MIN_STEPS <= min_steps <= HARDEST:
        raise ValueError(f"min_steps={min_steps!r} is not allowed: give {MIN_STEPS} to {HARDEST}.")


def _draw(numbers: random.Random, min_steps: int) -> Example | None:
    """A problem; None if the graph has none of that many steps."""
    edges, heads = _grow(numbers)
    root = numbers.choice(_ROOTS)
    other = 1 - root
    inner = {parent for parent, _ in edges}
    leaves = [node for node in range(2, _NUM_NODES) if node not in inner]
    paths = shortest_paths(edges, root)
    right = [node for node in leaves if heads[node] == {root}]
    wrong = [node for node in leaves if heads[node] == {other}]
    most = max((len(paths[node]) for node in right), default=0)
    if most <= min_steps or not wrong:
        return None
    path = paths[numbers.choice([node for node in right if len(paths[node]) == most])]
    return _told(numbers, edges, path, numbers.choice(wrong))


def _grow(numbers: random.Random) -> tuple[list[tuple[int, int]], list[set[int]]]:
    """Edges between numbered nodes, and which of the two roots each node is below. A root counts as below itself."""
    edges: list[tuple[int, int]] = []
    heads: list[set[int]] = [{root} for root in _ROOTS]
    weights = [0.1 for _ in _ROOTS]
    depths = [0 for _ in _ROOTS]
    for node in range(len(_ROOTS), _NUM_NODES):
        avoided = numbers.choices([0, 1, None], [0.35, 0.35, 0.3])[0]
        candidates = [earlier for earlier in range(node) if avoided not in heads[earlier]]
        parents = _weighted_sample(numbers, candidates, weights, numbers.choices(range(len(_PARENTS)), _PARENTS)[0])
        edges += [(parent, node) for parent in parents]
        heads.append(set().union(*(heads[parent] for parent in parents)))
        depths.append(1 + min(depths[parent] for parent in parents) if parents else 0)
        weights.append(1.5 * depths[node] + (0.1 if heads[node] else 0.03))
    return edges, heads


def _weighted_sample(
    numbers: random.Random, candidates: Sequence[int], weights: Sequence[float], count: int
) -> list[int]:
    """Up to `count` different ones of the candidates."""
    left = list(candidates)
    chosen: list[int] = []
    while left and len(chosen) < count:
        chosen += numbers.choices(left, [weights[one] for one in left])
        left.remove(chosen[-1])
    return chosen


def shortest_paths(edges: Iterable[tuple[int, int]], root: int) -> dict[int, list[int]]:
    """A shortest path to every node that can be reached.

    Example:
        >>> shortest_paths([(0, 1), (1, 2), (0, 2), (3, 2)], root=0)
        {0: [0], 1: [0, 1], 2: [0, 2]}
    """
    after: dict[int, list[int]] = {}
    for parent, child in edges:
        after.setdefault(parent, []).append(child)
    paths = {root: [root]}
    waiting = [root]
    for node in waiting:
        for child in after.get(node, []):
            if child not in paths:
                paths[child] = [*paths[node], child]
                waiting.append(child)
    return paths


def _told(numbers: random.Random, edges: list[tuple[int, int]], path: Sequence[int], wrong: int) -> Example | None:
    """The graph in names: persons for nodes below no other, concepts for the rest."""
    children = {child for _, child in edges}
    sources = {parent for parent, _ in edges} - children
    if len(sources) > len(PERSONS):
        return None
    names = dict(zip(sorted(sources), numbers.sample(PERSONS, len(sources)), strict=True))
    names |= dict(zip(sorted(children), numbers.sample(CONCEPTS, len(children)), strict=True))
    named = [(names[parent], names[child]) for parent, child in edges]
    numbers.shuffle(named)
    asked = [names[path[-1]], names[wrong]]
    numbers.shuffle(asked)
    told = [sentence(*edge) for edge in named]
    question = " ".join([*told, f"Is {names[path[0]]} a {asked[0]} or {asked[1]}?"])
    return Example(tuple(named), tuple(names[node] for node in path), names[wrong], question)
