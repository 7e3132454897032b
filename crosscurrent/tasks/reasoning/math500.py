"""MATH-500: problems of competitions with answers in LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tqdm import tqdm

from crosscurrent.tasks.reasoning.expressions import is_readable
from crosscurrent.tasks.reasoning.math_verify_process import require_math_verify
from crosscurrent.tasks.reasoning.mathematics import judge_expression
from crosscurrent.tasks.reasoning.records import HubSplit, Record, first, read_records
from crosscurrent.tasks.reasoning.task import Part, Problem, PromptFormat, ReasoningTask, Verdict
from crosscurrent.tasks.splits import Split, check_request


@dataclass(frozen=True)
class MATH500(ReasoningTask):
    """500 problems of MATH, asked as a chat, for testing only. Answers are compared by math-verify.

    The answer is what the last \\boxed{} holds, or else what follows "####" or "the answer is", or else the last expression.

    Example:
        >>> task = MATH500()
        >>> problem = Problem("p", "Solve 2x = 1.", "", r"\\frac{1}{2}")
        >>> task.judge(problem, r"So $x = \\boxed{0.5}$.")
        Verdict(parsed='0.5', scores={'accuracy': 1.0})
    """

    name: ClassVar[str] = "math500"
    prompt_format: ClassVar[PromptFormat] = "chat"
    recurrent: ClassVar[Part] = "answer"
    max_new_tokens: ClassVar[int] = 768

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        check_request(split, 0)
        if split != "test":
            raise ValueError(
                f"math500 has no {split} split, it is for testing only: train on another task, such as gsm8k, and "
                "take math500 with split 'test'."
            )
        require_math_verify()
        records = read_records(["math500_test.jsonl"], data, HubSplit("HuggingFaceH4/MATH-500", "test"))
        chosen = first(records, count, "problems of math500 (test)")
        with tqdm(chosen, desc="math500: references", unit="answer", leave=False, delay=2) as bar:
            return [_problem(number, record) for number, record in enumerate(bar)]

    def judge(self, problem: Problem, output: str) -> Verdict:
        return judge_expression(output, problem.answer)

    def message(self, problem: Problem) -> str:
        return f"Solve this problem step by step. Put the final answer in \\boxed{{}}.\n\n{problem.question}"

    def plain_prompt(self, problem: Problem) -> str:
        return f"Problem: {problem.question}\nSolution: "


def _problem(number: int, record: Record) -> Problem:
    answer = record.text("answer").strip()
    if not is_readable(answer):
        raise record.wrong("answer", f"cannot be read as an expression: {answer[:80]!r}")
    details = {name: record.fields[name] for name in ("subject", "level") if name in record.fields}
    return Problem(f"test-{number}", record.text("problem").strip(), record.text("solution").strip(), answer, details)
