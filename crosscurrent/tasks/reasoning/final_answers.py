"""Finding the final answer in what a model wrote about a mathematical problem."""

import re

# Of an output only the beginning is looked at: no solution is this long, and each step below takes time as the length.
_LONGEST_OUTPUT = 50_000
_LONGEST_BOX = 2_000
_MOST_BOXES = 20  # that are looked at, from the end

_BOX = re.compile(r"\\f?boxed\s*\{")

# A model that runs on past its answer begins another turn of the chat, or another exercise.
_NEXT_TURN = re.compile(r"(?!\A)<\|(?:im_end|im_start|endoftext|eot_id|end_of_text)\|>|(?!\A)</s>")
_NEXT_EXERCISE = re.compile(
    r"\n[ \t]*(?:\*\*)?(?:Question|Problem|Exercise|Q|User|Human)\b[ \t]*\d*[ \t]*(?:\*\*)?[ \t]*:"
)
_HEADING = re.compile(r"(?:step|part|solution|explanation|analysis|calculation)\b", re.IGNORECASE)
_PHRASE = re.compile(  # possessive: else many spaces take time as their square
    r"\banswers?\b\s*+(?:\*\*)?+\s*+(?:is|are|:|=)\s*+(?:\*\*)?+\s*+:?+\s*+(?P<rest>[^\n]*)", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|$)")


def first_block(output: str) -> str:
    """What was written up to where a next turn begins, or a next exercise.

    A heading before the first digit is not that of a next exercise: some models repeat the problem before they solve it.

    Example:
        >>> first_block("The answer is 5.\\n\\nQuestion: how many?").strip()
        'The answer is 5.'
        >>> first_block("Sure!\\nProblem: 2 + 3?\\nSolution: 5").count("Solution")
        1
    """
    block = _NEXT_TURN.split(output[:_LONGEST_OUTPUT].lstrip(), maxsplit=1)[0]
    digit = re.search(r"\d", block)
    found = _NEXT_EXERCISE.search(block, digit.end()) if digit else None
    return block[: found.start()] if found else block


def marked_answer(block: str) -> str | None:
    """What follows the first "####" in its line, headings and empty lines passed over.

    Example:
        >>> marked_answer("#### Step 1\\n2 + 3 = 5\\n#### 5 #### 9")
        '5'
    """
    answers = (part.strip() for part in re.findall(r"####+\s*((?:(?!####)[^\n])*)", block))
    return next((answer for answer in answers if answer and not _HEADING.match(answer.lstrip("*# "))), None)


def last_box(block: str) -> str | None:
    """What the last \\boxed{...} that is closed holds, braces matched.

    Example:
        >>> last_box(r"so \\boxed{\\frac{1}{2}} and \\boxed{3")
        '\\\\frac{1}{2}'
    """
    for start in reversed([found.end() for found in _BOX.finditer(block)][-_MOST_BOXES:]):
        end = _closing_brace(block, start)
        if end is not None:
            return block[start:end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace is that closes the one before `start`."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start : start + _LONGEST_BOX]):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return start + brace.start()
    return None


def phrased_answer(block: str) -> str | None:
    """What follows the first "the answer is" or "answer:", up to the end of the sentence.

    Example:
        >>> phrased_answer("So the final answer is: **5.5 apples**. Done")
        '5.5 apples'
    """
    found = (_SENTENCE_END.split(phrase["rest"], maxsplit=1)[0] for phrase in _PHRASE.finditer(block))
    return next((answer.strip(" *") for answer in found if answer.strip(" *")), None)
