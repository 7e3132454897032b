"""Finding the final answer in what a model wrote about a mathematical problem, and reading it as a number."""

import re
from collections.abc import Iterator
from fractions import Fraction

# Of an output only the beginning is looked at: no solution is this long, and each step below takes time as the length.
_LONGEST_OUTPUT = 50_000
_LONGEST_NUMBER = 60

# A model that runs on past its answer begins another exercise, or another turn of the chat.
_NEXT_TURN = re.compile(
    r"(?<=\S)\s*(?:\n\s*(?:\*\*)?(?:Question|Problem|Exercise|Q|User|Human)\b\s*\d*\s*(?:\*\*)?\s*:"
    r"|<\|(?:im_end|im_start|endoftext|eot_id|end_of_text)\|>|</s>)"
)
_HEADING = re.compile(r"(?:step|part|solution|explanation|analysis|calculation)\b", re.IGNORECASE)
_PHRASE = re.compile(r"\banswers?\b\s*(?:\*\*)?\s*(?:is|are|:|=)\s*(?:\*\*)?\s*:?\s*(?P<rest>[^\n]*)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


def first_block(output: str) -> str:
    """What was written up to where a next exercise or turn begins.

    Example:
        >>> first_block("The answer is 5.\\n\\nQuestion: how many?")
        'The answer is 5.'
    """
    return _NEXT_TURN.split(output[:_LONGEST_OUTPUT], maxsplit=1)[0]


def marked_answer(block: str) -> str | None:
    """What follows the first "####" in its line, headings and empty lines passed over.

    Example:
        >>> marked_answer("#### Step 1\\n2 + 3 = 5\\n#### 5 #### 9")
        '5'
    """
    answers = (part.strip() for part in re.findall(r"####+\s*((?:(?!####)[^\n])*)", block))
    return next((answer for answer in answers if answer and not _HEADING.match(answer.lstrip("*# "))), None)


def boxes(block: str) -> list[str]:
    """The contents of each \\boxed{...}, braces matched.

    Example:
        >>> boxes(r"so \\boxed{\\frac{1}{2}} and \\boxed{3")
        ['\\\\frac{1}{2}']
    """
    found = []
    for start in re.finditer(r"\\f?boxed\s*\{", block):
        end = _closing_brace(block, start.end())
        if end is not None:
            found.append(block[start.end() : end].strip())
    return found


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace is that closes the one before `start`."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start : start + _LONGEST_BOX]):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return start + brace.start()
    return None


_LONGEST_BOX = 2_000


def phrased_answer(block: str) -> str | None:
    """What follows the first "the answer is" or "answer:", up to the end of the sentence.

    Example:
        >>> phrased_answer("So the final answer is: **5.5 apples**. Done")
        '5.5 apples'
    """
    found = (_SENTENCE_END.split(phrase["rest"], maxsplit=1)[0] for phrase in _PHRASE.finditer(block))
    return next((answer.strip(" *") for answer in found if answer.strip(" *")), None)


# Numbers

_SPACES = "\u00a0\u2009\u202f"
_REPLACED = [
    (re.compile(r"[−–‒﹣－]"), "-"),
    (re.compile(r"\\[dtc]?frac\s*\{\s*(-?[0-9.,]+)\s*\}\s*\{\s*([0-9.,]+)\s*\}"), r" \1/\2"),
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
    return -value if (found["sign"] or "").startswith(("-", " -")) else value


def number_answered(output: str) -> Fraction | None:
    """The number that a model gave as its answer; None if none can be read.

    It is looked for after "####", then in the last \\boxed{}, then after "the answer is"; else it is the last number. What
    follows the first complete answer does not count.

    Example:
        >>> print(number_answered("48 + 24 = 72\\n#### 72\\n\\nTom has 3 apples. #### 9"))
        72
    """
    block = first_block(output)
    for answer in _stated(block):
        return read_number(answer)
    return last_number(block)


def _stated(block: str) -> Iterator[str]:
    for answer in (marked_answer(block), (boxes(block) or [""])[-1], phrased_answer(block)):
        if answer:
            yield answer


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
