"""Numbers as people and models write them, read exactly."""

import re
from fractions import Fraction

_LONGEST_NUMBER = 60
_SPACES = "\u00a0\u2009\u202f"
_PART = r"(?:\{\s*(-?[0-9.,]+)\s*\}|([0-9]))"  # of a fraction
_REPLACED = [
    (re.compile(r"(?<=[0-9)])\*\*(?=[0-9(-])"), "^"),
    (re.compile(r"[−–‒﹣－]"), "-"),
    (re.compile(rf"\\[dtc]?frac\s*{_PART}\s*{_PART}"), r" \1\2/\3\4"),
    (re.compile(r"\\(?:text|textbf|mathbf|mathrm|boxed)\s*\{"), " "),
    (re.compile(r"\\[!,;: ]|\{,\}(?=[0-9]{3})"), ""),
    (re.compile(r"\\?[$€£¥₹]|\*\*|[{}]|\\left|\\right"), ""),
    (re.compile(rf"(?<=[0-9])[{_SPACES} ](?=[0-9]{{3}}(?![0-9/]))"), ""),
]
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>(?:(?<![0-9A-Za-z)\].])|^\s*)[-+]\s?)?(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/))?"
    rf"(?P<value>{_UNSIGNED})(?P<power>[eE][-+]?[0-9]{{1,2}}(?![0-9A-Za-z]))?(?:\s*/\s*(?P<divisor>{_UNSIGNED}))?"
)
_OPERATION = re.compile(r"\s*(?:[-+*/×÷^]|\\times|\\cdot|\\div)\s*[0-9(.]")


def read_number(text: str) -> Fraction | None:
    """The number that a final answer is: the first one in it, after the last sign of equality.

    Currency, units, percent signs, separators of thousands and LaTeX around it do not count. None: there is no number, or it
    is part of a sum or a range that was not worked out.

    Example:
        >>> print(read_number("$1,234.50 per week"), read_number("x = -3"), read_number("5-7"), read_number("1 1/2"))
        2469/2 -3 None 3/2
    """
    text = _plain(text)
    after = text.rpartition("=")[2]
    for part in (after, text):
        found = _NUMBER.search(part)
        if found:
            return None if _OPERATION.match(part, found.end()) else _value(found)
    return None


def exact_number(text: str) -> Fraction | None:
    """The number that a whole text is; None if it is more than one.

    Example:
        >>> exact_number(r"\\frac{1}{2}"), exact_number("-1,200.5"), exact_number("2x"), exact_number("1, 2")
        (Fraction(1, 2), Fraction(-2401, 2), None, None)
    """
    found = _NUMBER.fullmatch(_plain(text).strip())
    return _value(found) if found else None


def last_number(text: str) -> Fraction | None:
    """The last number of a text.

    Example:
        >>> print(last_number("48 + 24 = 72 clips."))
        72
    """
    values = [_value(found) for found in _NUMBER.finditer(_plain(text))]
    return values[-1] if values else None


def _plain(text: str) -> str:
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found.group()) > _LONGEST_NUMBER:
        return None
    value = Fraction(found["value"].replace(",", "") + (found["power"] or ""))
    if found["divisor"]:
        divisor = Fraction(found["divisor"].replace(",", ""))
        if not divisor:
            return None
        value /= divisor
    value += int(found["whole"] or 0)
    return -value if "-" in (found["sign"] or "") else value


def written(number: Fraction) -> str:
    """A number as a person would write it: in decimals where they end.

    Example:
        >>> written(Fraction(5, 2)), written(Fraction(1, 3)), written(Fraction(-1200))
        ('2.5', '1/3', '-1200')
    """
    places = next((places for places in range(1, 13) if (number * 10**places).denominator == 1), None)
    if number.denominator == 1 or places is None:
        return str(number)
    digits = str(abs(number * 10**places)).rjust(places + 1, "0")
    return f"{'-' if number < 0 else ''}{digits[:-places]}.{digits[-places:]}"
