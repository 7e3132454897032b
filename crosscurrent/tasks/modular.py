"""Arithmetic modulo 5, flat or with brackets.

Flat: reads `3 + 4 x 2 =` after BOS and predicts `1` at "="; x binds tighter than + and -. The length of the expression is
odd. Every prefix: the value of what has been read, after each digit.

Brackets: reads `( 3 - ( - 2 ) ) =` and predicts `0` at "=". Every prefix: after each digit or ")", the value of what has
been read since the innermost open bracket, or, if none is open, of the whole.
"""

import random
from dataclasses import dataclass, replace

from crosscurrent.tasks.splits import Split
from crosscurrent.tasks.task import BOS, Layout, Lengths, Symbols, Task, supervised

MODULUS = 5
OPERATORS = "+-x"
DIGITS = "01234"


def _apply(left: int, operator: str, right: int) -> int:
    result = {"+": left + right, "-": left - right, "x": left * right}[operator]
    return result % MODULUS


class Mod5Flat(Task):
    """Digits joined by + - x without brackets."""

    name = "mod5_flat"
    vocabulary = (*DIGITS, *OPERATORS, "=", BOS)
    chance = 1 / MODULUS
    lengths = Lengths(tuple(range(3, 40, 2)), (33, 35, 39), (31, 39, 47, 63, 95, 127, 191, 255))
    min_held_out_length = 9

    def check_length(self, length: int, split: Split) -> None:
        super().check_length(length, split)
        if length % 2 == 0:
            raise ValueError(f"length={length} is not allowed for {self.name}: expressions without brackets are odd.")

    def draw(self, numbers: random.Random, length: int, split: Split) -> Symbols:
        symbols = numbers.choices(DIGITS, k=length)
        symbols[1::2] = numbers.choices(OPERATORS, k=length // 2)
        return tuple(symbols)

    def layout(self, payload: Symbols, prefix_supervision: bool) -> Layout:
        answers = _flat_values(payload)
        return Layout((*payload, "="), supervised([*answers, answers[-1]], prefix_supervision))


def _flat_values(payload: Symbols) -> list[str | None]:
    """After each digit the value of the expression so far; nothing after an operator.

    Two numbers are enough: the sum of the finished terms, and the product that is being read.
    """
    total, product = 0, int(payload[0]) % MODULUS
    values: list[str | None] = [str(product)]
    for operator, digit in zip(payload[1::2], payload[2::2], strict=True):
        if operator == "x":
            product = _apply(product, "x", int(digit))
        else:
            total, product = (total + product) % MODULUS, _apply(0, operator, int(digit))
        values += [None, str((total + product) % MODULUS)]
    return values


class Mod5Brackets(Task):
    """Expression trees, written out with a pair of brackets around every operation on two operands.

    A tree of length 1 is a digit, of length 2 a negated digit, of 3 or 4 one of these in brackets, of 5 or more two
    trees joined by an operator, with brackets around; the share of the left one is uniform. The negation (this
    project's reading) is what makes even lengths possible.
    """

    name = "mod5_brackets"
    vocabulary = (*DIGITS, *OPERATORS, "(", ")", "=", BOS)
    chance = 1 / MODULUS
    lengths = Lengths(tuple(range(3, 41)), (32, 36, 40), (32, 40, 48, 64, 96, 128, 192, 256))
    min_held_out_length = 9

    def draw(self, numbers: random.Random, length: int, split: Split) -> Symbols:
        return tuple(_tree(numbers, length))

    def layout(self, payload: Symbols, prefix_supervision: bool) -> Layout:
        answers = _bracket_values(payload)
        return Layout((*payload, "="), supervised([*answers, answers[-1]], prefix_supervision))


def _tree(numbers: random.Random, length: int) -> list[str]:
    """A random tree, written out. Without recursion: its depth may be a third of its length."""
    written: list[str] = []
    to_do: list[int | str] = [length]  # trees of some length, and symbols, from right to left
    while to_do:
        piece = to_do.pop()
        if isinstance(piece, str):
            written.append(piece)
        elif piece == 1:
            written.append(numbers.choice(DIGITS))
        elif piece == 2:
            to_do += [1, "-"]
        elif piece <= 4:
            to_do += [")", piece - 2, "("]
        else:
            left = numbers.randint(1, piece - 4)
            to_do += [")", piece - 3 - left, numbers.choice(OPERATORS), left, "("]
    return written


@dataclass(frozen=True)
class _Open:
    """What has been read since a bracket opened: a value, and how the next operand joins it."""

    value: int = 0
    operator: str = "+"
    sign: int = 1  # of the next operand
    expects_operand: bool = True

    def read_operator(self, symbol: str) -> "_Open":
        if self.expects_operand:
            return replace(self, sign=-self.sign)  # the only operator that stands before an operand is "-"
        return replace(self, operator=symbol, expects_operand=True)

    def read_operand(self, operand: int) -> "_Open":
        return _Open(_apply(self.value, self.operator, self.sign * operand), expects_operand=False)


def _bracket_values(payload: Symbols) -> list[str | None]:
    """After each digit and each ")" the value since the innermost open bracket.

    Between two brackets there is at most one operation, so no operator binds tighter than another.
    """
    here, outside = _Open(), []
    values: list[str | None] = []
    for symbol in payload:
        if symbol == "(":
            outside.append(here)
            here = _Open()
        elif symbol in OPERATORS:
            here = here.read_operator(symbol)
        else:
            here = outside.pop().read_operand(here.value) if symbol == ")" else here.read_operand(int(symbol))
        values.append(None if here.expects_operand else str(here.value))
    return values
