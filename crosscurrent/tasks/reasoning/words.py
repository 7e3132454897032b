"""Answers in a few words, compared as HotpotQA's official evaluation compares them."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
# An answer of this kind is right or wrong: it shares no part with a longer one.
_ALL_OR_NOTHING = {"yes", "no", "noanswer"}


def normalise(answer: str) -> str:
    """In lower case, without ASCII punctuation, then without the words a, an and the, with single spaces between words.

    Example:
        >>> normalise("The  Beatles' White Album!")
        'beatles white album'
    """
    plain = answer.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())


def exact_match(answer: str, reference: str) -> float:
    """1.0 if both are the same when normalised, else 0.0.

    Example:
        >>> exact_match("the U.S.", "US")
        1.0
    """
    return float(normalise(answer) == normalise(reference))


def f1(answer: str, reference: str) -> float:
    """The harmonic mean of the share of the answer's words that are right and the share of right words that it has.

    A word counts as often as both have it. Yes, no and noanswer share nothing with any other answer.

    Example:
        >>> f1("Barack Obama", "Barack Hussein Obama")
        0.8
    """
    given, wanted = normalise(answer), normalise(reference)
    if given != wanted and _ALL_OR_NOTHING & {given, wanted}:
        return 0.0
    given_words, wanted_words = given.split(), wanted.split()
    common = (Counter(given_words) & Counter(wanted_words)).total()
    return 2 * common / (len(given_words) + len(wanted_words)) if common else 0.0
