"""The process in which math-verify works, started when it is first needed: see `math_verify_worker` for why it is one."""

import atexit
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Of processor time, so that it makes little difference how busy the machine is.
_SECONDS = 5.0
# The worker limits itself where the system can do that; elsewhere this ends it.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Reply:
    """What math-verify says of an answer.

    Attributes:
        read: the text that was read as an expression; None if there is none, or it took too long.
        is_right: whether it says the same as the reference.
    """

    read: str | None
    is_right: bool


class _Worker:
    """The process, begun again if it ended. A forked process starts one of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = -1
        self._lock = threading.Lock()

    def ask(self, request: dict[str, object]) -> Reply:
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            watchdog = threading.Timer(_PATIENCE_SECONDS, process.kill)
            watchdog.start()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            finally:
                watchdog.cancel()
            if not line:
                self._end()
                return Reply(None, False)
            reply = json.loads(line)
            return Reply(reply["read"], reply["right"])

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                # -P: the folder of the script, with modules of common names, is not searched for modules.
                [sys.executable, "-P", str(Path(__file__).with_name("math_verify_worker.py")), str(_SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                # The order of sets, and so what is tried first, would depend on chance.
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )
            self._owner = os.getpid()
        return self._process

    def end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()
        self._process = None


_worker = _Worker()
atexit.register(_worker.end)


def require_math_verify() -> None:
    """Raise ValueError if the package math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ValueError("to judge answers the package math-verify is needed: pip install 'crosscurrent[reasoning]'")


def ask(answer: str, reference: str, is_prose: bool) -> Reply:
    """Whether an answer says the same as a reference. It ends, whatever the answer, and in any thread.

    Args:
        answer: an expression, or a text with one in it.
        reference: an expression.
        is_prose: which of the two the answer is.

    Raises:
        ValueError: the package math-verify is missing.

    Example:
        >>> ask("x + x", "2x", is_prose=False)
        Reply(read='x + x', is_right=True)
    """
    require_math_verify()
    return _worker.ask({"answer": answer, "reference": reference, "is_prose": is_prose})
