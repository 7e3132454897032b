"""A process of its own in which math-verify reads and compares answers: run as a script, it answers line by line in JSON.

Its argument is the limit in seconds of processor time for an answer.

What a model writes may be a number with more digits than there is memory for, or keep the algebra busy for ever, and the
time-outs of math-verify stop neither, and work in no thread. So each answer has a limit of processor time, beyond which the
system ends this process, and the process has a limit of memory.
"""

import json
import logging
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_BYTES = 4 * 2**30
_CONFIG = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


@lru_cache(maxsize=1024)
def read(text: str, is_prose: bool) -> list[Any]:
    """The expressions in a text of prose, or that the text is. The last one is the text that they were read from."""
    return parse(text if is_prose else rf"\boxed{{{text}}}", _CONFIG, parsing_timeout=None)  # type: ignore[arg-type]


def _is_right(reference: list[Any], found: list[Any]) -> bool:
    return verify(reference, found, allow_set_relation_comp=True, timeout_seconds=None)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Of {answer, is_prose, reference}: {read: the text that was read or null, right: whether it says the same}."""
    found = read(request["answer"], request["is_prose"])
    if not found or isinstance(found[0], str):
        return {"read": None, "right": False}
    reference = read(request["reference"], False)
    return {"read": str(found[-1]), "right": _is_right(reference, found)}


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_time(seconds: float) -> None:
    """Let the system end this process after so many seconds of processor time; 0: no more."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _serve(seconds: float) -> None:
    logging.disable(logging.CRITICAL)
    replies, sys.stdout = sys.stdout, sys.stderr
    if sys.platform != "win32":
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    _limit_memory()
    for line in sys.stdin:
        _limit_time(seconds)
        reply = answer(json.loads(line))
        _limit_time(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
