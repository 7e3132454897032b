"""Comparing mathematical expressions, in LaTeX or as plain text, by math-verify.

math-verify reads answers and finds out whether two say the same. What it would get wrong is kept from it: words, which it
takes for products of letters, are compared as words, numerals of other bases with their base, and signs that are not LaTeX
are made LaTeX.
"""

import re
from dataclasses import dataclass

from crosscurrent.tasks.reasoning.math_verify_process import ask
from crosscurrent.tasks.reasoning.numbers import exact_number

# Longer answers are not looked at, or, where the answer is somewhere in a text, only the text's end.
_LONGEST_ANSWER = 1_000
_LONGEST_PROSE = 2_000
_MOST_WORDS = 5

_SIGNS = str.maketrans(
    dict.fromkeys("−–‒﹣－", "-")
    | {"×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "²": "^2", "³": "^3"}
    | {"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
)
_REPLACED = [
    (re.compile(r"√\s*(?:\(([^()]*)\)|([0-9A-Za-z]+))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|cot|sec|csc|log|ln)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])inf(?:inity|ty)?(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<=[0-9A-Za-z)}])\*\*(?=[-0-9A-Za-z({\\])"), "^"),
    (re.compile(r"\*\*"), ""),
    (re.compile(r"\^(-?[0-9]{2,}|-[0-9A-Za-z])"), r"^{\1}"),
    (re.compile(r"(?<!\\)\\[!,;]\s*|\\displaystyle(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}(?=[0-9]{3})"), ","),
    (re.compile(r"(?<![0-9A-Za-z.,])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z])"), r"\1 \\times 10^{\2}"),
]
_DELIMITERS = re.compile(r"\\?[$€£¥₹]|(?<!\\)\\[()\[\]]")
_FORMULA = re.compile(
    r"\$\$(.{1,1000}?)\$\$|(?<!\\)\$([^$\n]{1,1000})\$|\\\((.{1,1000}?)\\\)|(?<!\\)\\\[(.{1,1000}?)\\\]", re.DOTALL
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z*]+\}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?(?P<letter>[A-Za-z])(?:[).:].*)?", re.DOTALL)
_NUMERAL = re.compile(
    r"(?P<digits>[0-9A-Za-z]+)(?:_\{?(?P<base>[0-9]+)\}?|\s+\(?(?:in\s+)?base\s+(?P<base_in_words>[0-9]+)\)?)?"
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}(?![A-Za-z])")


@dataclass(frozen=True)
class Comparison:
    """What an answer was compared to.

    Attributes:
        read: the answer as it was read; None if it is no expression.
        is_right: whether it says the same as the reference.
    """

    read: str | None
    is_right: bool


def compare(answer: str, reference: str) -> Comparison:
    """Whether an answer is mathematically the same as a reference.

    Args:
        answer: an expression, or prose with one in it.
        reference: an expression, or words in \\text{}.

    Raises:
        ValueError: the package math-verify is missing.

    Example:
        >>> compare("x = 0.5", r"\\frac{1}{2}")
        Comparison(read='x = 0.5', is_right=True)
        >>> compare("There is none.", "3").read is None
        True
    """
    words = _TEXT.fullmatch(reference.strip())
    if words:
        return _compare_words(answer, words[1])
    numeral = _NUMERAL.fullmatch(_bare(reference))
    if numeral and numeral["base"]:
        return _compare_numerals(answer, numeral)
    return _compare_expressions(answer, reference)


def _compare_words(answer: str, reference: str) -> Comparison:
    said, right = _as_words(_last_formula(answer)), _as_words(reference)
    choice = _CHOICE.fullmatch(said)
    is_right = said == right or bool(choice and choice["letter"] == right)
    return Comparison(said if said and len(said.split()) <= _MOST_WORDS else None, is_right)


def _last_formula(text: str) -> str:
    """What the last formula in a text holds; the text itself if there is none."""
    formulas = [next(filter(None, found.groups()), "") for found in _FORMULA.finditer(text)]
    return formulas[-1] if formulas else text


def _as_words(text: str) -> str:
    plain = " ".join(_DELIMITERS.sub("", _TEXT.sub(r"\1", text)).lower().split()).strip(" .*\"'")
    return plain[1:-1] if re.fullmatch(r"\([a-z ]*\)", plain) else plain


def _compare_numerals(answer: str, reference: re.Match[str]) -> Comparison:
    """Of a number system that is named: the digits count, and the base if the answer names one."""
    bare = _bare(_last_formula(answer))
    said = _NUMERAL.fullmatch(bare)
    if said is None:
        return Comparison(None, False)
    base = said["base"] or said["base_in_words"] or reference["base"]
    return Comparison(bare, (said["digits"], base) == (reference["digits"], reference["base"]))


def _compare_expressions(answer: str, reference: str) -> Comparison:
    bare, right = _bare(answer), _bare(reference)
    said, exactly = exact_number(bare), exact_number(right)
    if said is not None and exactly is not None:
        return Comparison(bare, said == exactly)
    is_prose = bool(_PROSE.search(_ENVIRONMENT.sub("", _TEXT.sub("", bare))))
    if len(bare) > _LONGEST_ANSWER and not is_prose:
        return Comparison(None, False)
    if is_prose:
        found = _ask(_tidy(answer)[-_LONGEST_PROSE:], right, is_prose=True)
        if found.read is not None or "\\" not in bare or len(bare) > _LONGEST_ANSWER:
            return found
    found = _ask(bare, right, is_prose=False)
    return Comparison(found.read and bare, found.is_right)


def _ask(answer: str, reference: str, is_prose: bool) -> Comparison:
    reply = ask(answer, reference, is_prose)
    said, right = exact_number(reply.read or ""), exact_number(reference)
    # math-verify rounds decimals to six places.
    return Comparison(reply.read, reply.is_right if said is None or right is None else said == right)


def _tidy(text: str) -> str:
    text = text.translate(_SIGNS)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


def _bare(text: str) -> str:
    """An expression without what delimits it: dollars, spaces, full stops."""
    return _DELIMITERS.sub("", _tidy(text)).strip().rstrip(".,;: ")


def is_readable(reference: str) -> bool:
    """Whether answers can be compared to a reference.

    Example:
        >>> is_readable(r"\\frac{1}{2}"), is_readable(r"\\frac{1}{")
        (True, False)
    """
    return compare(reference, reference).is_right
