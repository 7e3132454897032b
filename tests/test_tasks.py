"""The task generators against brute force, and the promises every generator makes."""

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest

from crosscurrent.tasks import parity, variable_assignment
from crosscurrent.tasks.splits import Split, split_of

SPLITS: tuple[Split, ...] = get_args(Split)


@pytest.mark.parametrize("length", [8, 9, 40, 257])
@pytest.mark.parametrize("split", SPLITS)
def test_parity_by_counting_ones(split: Split, length: int) -> None:
    for index in range(50):
        one = parity.example(split, length, index)
        assert len(one.bits) == len(one.parities) == length
        assert list(one.parities) == [one.bits[: stop + 1].count(1) % 2 for stop in range(length)]


def test_short_parity_for_training_only() -> None:
    assert {parity.example("train", 2, index).bits for index in range(100)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for split in ("validation", "test"):
        with pytest.raises(ValueError, match="length=7"):
            parity.example(split, 7, 0)
    with pytest.raises(ValueError, match="length=0"):
        parity.example("train", 0, 0)


def test_parity_splits_divide_all_sequences() -> None:
    """At 8 bits every sequence can be drawn, and each from one split only, whatever the seed."""
    found = {
        split: {parity.example(split, 8, index, seed).bits for index in range(1500) for seed in range(3)}
        for split in SPLITS
    }
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 2**8
    assert min(map(len, found.values())) >= 10


def test_parity_guessing_gives_chance() -> None:
    last = [parity.example("test", 40, index).parities[-1] for index in range(2000)]
    assert abs(sum(last) / len(last) - parity.CHANCE) < 0.04


def test_parity_batch() -> None:
    tokens, parities = parity.batch("train", 12, range(5, 9), seed=3)
    assert tokens.shape == (4, 13) and parities.shape == (4, 12)
    assert tokens[:, 0].tolist() == [parity.BOS] * 4 and int(tokens.max()) < parity.VOCAB_SIZE
    for row, index in enumerate(range(5, 9)):
        one = parity.example("train", 12, index, seed=3)
        assert tokens[row, 1:].tolist() == list(one.bits) and parities[row].tolist() == list(one.parities)


def follow(prompt: str) -> tuple[str, int]:
    """The answer by substitution, and how many aliases lie on the way to it."""
    *lines, question = prompt.splitlines()
    meaning = dict(line.split("=") for line in lines)
    assert len(meaning) == len(lines), "a name is defined twice"
    value, steps = question.removeprefix("value of ").removesuffix(": "), -1
    while not value.isdigit():
        value, steps = meaning[value], steps + 1
    return value, steps


@pytest.mark.parametrize("depth", [1, 2, variable_assignment.HARD_DEPTH, variable_assignment.MAX_DEPTH])
@pytest.mark.parametrize("split", SPLITS)
def test_variable_assignment_by_substitution(split: Split, depth: int) -> None:
    for index in range(50):
        one = variable_assignment.example(split, index, depth=depth)
        assert follow(one.prompt) == (one.answer, depth)
        values = [line.split("=")[1] for line in one.prompt.splitlines()[:-1]]
        assert sum(value.isdigit() for value in values) == 8
        assert len(values) == 8 + 6 + depth


def test_variable_assignment_cannot_be_answered_by_a_shortcut() -> None:
    """Neither a constant, nor the digit of a fixed line, nor the first digit that appears is right much above chance."""
    problems = [variable_assignment.example("train", index) for index in range(2000)]
    answers = Counter(one.answer for one in problems)
    assert sorted(answers) == list("0123456789")
    assert max(answers.values()) / len(problems) < 1.5 * variable_assignment.CHANCE
    for digit in range(8):
        digits = [[c for c in one.prompt if c.isdigit()][digit] for one in problems]
        right = sum(guess == one.answer for guess, one in zip(digits, problems, strict=True)) / len(problems)
        assert right < 0.3  # one of eight digits is the right one, and others may equal it: 21 % expected


def test_variable_assignment_splits_share_no_problem() -> None:
    """Two problems are the same if they have the same lines in any order."""
    found = {
        split: {
            tuple(sorted(variable_assignment.example(split, index, seed).prompt.splitlines()))
            for index in range(200)
            for seed in range(2)
        }
        for split in SPLITS
    }
    assert all(len(problems) == 400 for problems in found.values())
    assert len(set.union(*found.values())) == 1200
    for split in SPLITS:
        for index in range(100):
            *lines, question = variable_assignment.example(split, index).prompt.splitlines()
            name = question.removeprefix("value of ").removesuffix(": ")
            assert split_of(f"{sorted(lines)} {name}") == split


@pytest.mark.parametrize("depth", [0, -1, variable_assignment.MAX_DEPTH + 1])
def test_variable_assignment_refuses_other_depths(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}"):
        variable_assignment.example("train", 0, depth=depth)


EXAMPLES: list[Callable[..., Any]] = [
    lambda split="train", index=0, seed=0: parity.example(split, 64, index, seed),
    lambda split="train", index=0, seed=0: variable_assignment.example(split, index, seed),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=["parity", "variable_assignment"])
def test_examples_follow_from_split_index_and_seed(example: Callable[..., Any]) -> None:
    assert example() == example()
    different = [example(), example(index=1), example(seed=1), example(split="test"), example(split="validation")]
    assert len({repr(one) for one in different}) == len(different)


@pytest.mark.parametrize("example", EXAMPLES, ids=["parity", "variable_assignment"])
def test_bad_requests_are_refused(example: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"split='dev'.*'validation'"):
        example(split="dev")
    with pytest.raises(ValueError, match="index=-1"):
        example(index=-1)


def test_examples_stay_what_they_are() -> None:
    """Published numbers rest on these generators: a change of theirs must not go unnoticed."""
    assert parity.example("test", 16, 7, seed=1).bits == (0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1)
    assert variable_assignment.example("test", 7, seed=1, depth=5).prompt.split() == (
        [
            "h=g",
            "v=m",
            "w=b",
            "d=3",
            "m=d",
            "i=1",
            "u=2",
            "j=4",
            "g=r",
            "q=m",
            "b=9",
            "n=a",
            "c=6",
            "a=h",
            "r=y",
            "y=7",
            "o=u",
            "s=7",
            "e=g",
            "value",
            "of",
            "n:",
        ]
    )
