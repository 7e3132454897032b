"""Judges take whatever a model writes."""

import random
import string
from collections.abc import Iterator

import pytest

from crosscurrent.tasks.reasoning import Problem, get_reasoning_task

PROBLEMS = {
    "pathfinding": get_reasoning_task("pathfinding").problems("test", count=1)[0],
    "prosqa_generated": get_reasoning_task("prosqa_generated").problems("test", count=1)[0],
    "prosqa": get_reasoning_task("prosqa_generated").problems("test", count=1)[0],
    "hotpotqa": Problem("1", "Where?", "the Paris of 1900", "the Paris of 1900"),
}
PIECES = [
    *(
        "###",
        "#",
        " is a ",
        " is an ",
        "Every ",
        "->",
        "Answer:",
        "\n",
        "\r",
        "\u2028",
        " ",
        ".",
        ",",
        "yes",
        "the",
        "\x00",
    ),
    *(
        "\ud800",
        "é",
        "e\u0301",
        "İ",
        "ß",
        "漢字",
        "🙂",
        "\u200f",
        "١",
        "\\boxed{",
        "}",
        "$",
        "**",
        "<|im_end|>",
        "-1",
        "1e999",
    ),
]


def outputs(problem: Problem) -> Iterator[str]:
    """Nothing, much of one piece, and random pieces of the right answer, of marks and of any characters."""
    numbers = random.Random(7)
    pieces = [*PIECES, *problem.completion.split(), problem.completion]
    yield from ("", "\x00", problem.completion * 2000)
    yield from (piece * 20_000 for piece in PIECES)
    for _ in range(1000):
        anything = "".join(chr(numbers.randrange(0x110000)) for _ in range(3))
        drawn = numbers.choices([*pieces, anything, numbers.choice(string.printable)], k=numbers.randrange(30))
        yield numbers.choice(["", " "]).join(drawn)


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_output_breaks_a_judge(name: str) -> None:
    task, problem = get_reasoning_task(name), PROBLEMS[name]
    for output in outputs(problem):
        verdict = task.judge(problem, output)
        assert tuple(verdict.scores) == task.metrics
        assert all(isinstance(score, float) and 0 <= score <= 1 for score in verdict.scores.values())
        assert verdict.parsed != "" and (verdict.parsed is not None or not any(verdict.scores.values()))
        assert task.judge(problem, output) == verdict
