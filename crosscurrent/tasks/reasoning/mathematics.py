"""Judging what a model wrote about a mathematical problem: by a number, or by an expression."""

import re
from fractions import Fraction

from crosscurrent.tasks.reasoning.expressions import compare
from crosscurrent.tasks.reasoning.final_answers import first_block, last_box, marked_answer, phrased_answer
from crosscurrent.tasks.reasoning.numbers import last_number, read_number, written
from crosscurrent.tasks.reasoning.task import Verdict


def judge_number(output: str, reference: str) -> Verdict:
    """Score an output by the number that it gives as its answer, exactly.

    Args:
        output: what the model wrote.
        reference: a number, as people write it.

    Example:
        >>> judge_number("48 + 24 = 72 clips.\\n#### 72", "72.0")
        Verdict(parsed='72', scores={'accuracy': 1.0})
    """
    answered = number_answered(output)
    is_right = answered is not None and answered == read_number(reference)
    return Verdict(None if answered is None else written(answered), {"accuracy": float(is_right)})


def judge_expression(output: str, reference: str) -> Verdict:
    """Score an output by the expression that it gives as its answer.

    It is what the last \\boxed{} holds, or else what follows "####" or "the answer is", or else the last expression.

    Args:
        output: what the model wrote.
        reference: an expression in LaTeX, or words in \\text{}.

    Raises:
        ValueError: the package math-verify is missing.

    Example:
        >>> judge_expression(r"So $x = \\boxed{0.5}$.", r"\\frac{1}{2}")
        Verdict(parsed='0.5', scores={'accuracy': 1.0})
    """
    block = first_block(output)
    found = compare(last_box(block) or marked_answer(block) or phrased_answer(block) or block, reference)
    return Verdict(found.read, {"accuracy": float(found.is_right)})


def number_answered(output: str) -> Fraction | None:
    """The number that a model gave as its answer; None if none can be read.

    It is looked for after "####", then in the last \\boxed{}, then after "the answer is"; else it is the last number. What
    follows the first complete answer does not count.

    Example:
        >>> print(number_answered("48 + 24 = 72\\n#### 72\\n\\nTom has 3 apples. #### 9"))
        72
    """
    block = first_block(output)
    phrase = phrased_answer(block)
    if phrase is not None and not re.search(r"[0-9]", phrase):  # "Answer: let us see."
        phrase = None
    answer = marked_answer(block) or last_box(block) or phrase
    return read_number(answer) if answer else last_number(block)
