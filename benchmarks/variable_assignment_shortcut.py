"""How often is variable assignment answered right without following a chain?

    python benchmarks/variable_assignment_shortcut.py --depth 2 --count 256

Guesses the digit of a variable that others are defined by: any one ("named"), or the one named most often ("named most"). A
model that scores no better may have learned no more than this.
"""

import argparse
import random
from collections import Counter

from crosscurrent.tasks.reasoning import get_reasoning_task


def guesses(question: str, numbers: random.Random) -> dict[str, str]:
    """Each way of guessing, and what it says."""
    lines = [line.split("=") for line in question.split("\n") if "=" in line]
    digits = {name: meaning for name, meaning in lines if meaning.isdigit()}
    named = Counter(meaning for _, meaning in lines if meaning in digits)
    most = [name for name, count in named.items() if count == max(named.values())]
    return {"named": digits[numbers.choice(list(named))], "named most": digits[numbers.choice(most)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--count", type=int, default=256, help="of test problems")
    asked = parser.parse_args()
    numbers, right = random.Random(0), Counter[str]()
    for problem in get_reasoning_task("variable_assignment", depth=asked.depth).problems("test", count=asked.count):
        right.update(way for way, digit in guesses(problem.question, numbers).items() if digit == problem.answer)
    for way in ("named", "named most"):
        print(f"{way}: {right[way] / asked.count:.1%} of {asked.count} problems of depth {asked.depth}")


if __name__ == "__main__":
    main()
