"""ProsQA: which of two concepts a person is, by chains of "Every X is a Y." The published problems, and new ones."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from crosscurrent.tasks import ontology
from crosscurrent.tasks.reasoning.records import Record, first, leave_out, read_records
from crosscurrent.tasks.reasoning.task import Problem, ReasoningTask, Verdict, generated_problems
from crosscurrent.tasks.splits import Split, check_request

_FILES: dict[Split, str] = {
    "train": "prosqa_train.json",
    "validation": "prosqa_valid.json",
    "test": "prosqa_test.json",
}
_STATEMENT = re.compile(r"\b(\w+) is an? (\w+)")


@dataclass(frozen=True)
class _ConceptQuestions(ReasoningTask):
    """What both tasks share: the format, and the judge."""

    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "chain")
    max_new_tokens: ClassVar[int] = 128

    def plain_prompt(self, problem: Problem) -> str:
        return problem.question + "\n"

    def judge(self, problem: Problem, output: str) -> Verdict:
        reasoning, mark, final = output.partition("###")
        steps = _STATEMENT.findall(reasoning)
        answers = _STATEMENT.findall(final)[:1] if mark else steps[-1:]
        if not answers:
            return Verdict(None, dict.fromkeys(self.metrics, 0.0))
        root, target, edges = (problem.details[key] for key in ("root", "target", "edges"))
        is_right, is_chain = answers == [(root, target)], _is_chain(steps, edges, root, target)
        return Verdict(" is a ".join(answers[0]), {"accuracy": float(is_right), "chain": float(is_chain)})


def _is_chain(steps: Sequence[tuple[str, str]], edges: Sequence[Sequence[str]], root: str, target: str) -> bool:
    """Whether the steps lead from root to target, each beginning where the last one ended, along edges only."""
    begins = [name for name, _ in steps]
    ends = [root, *(concept for _, concept in steps)]
    return begins == ends[:-1] and ends[-1] == target and {tuple(edge) for edge in edges}.issuperset(steps)


def _completion(steps: Sequence[str], answer: str) -> str:
    return "\n".join([*steps, f"### {answer}"])


@dataclass(frozen=True)
class Prosqa(_ConceptQuestions):
    """The published problems of ProsQA, from the files of the repository facebookresearch/coconut.

    The answer in an output is the first statement "A is a B" after its first "###", or without such a mark its last
    statement. `accuracy` is 1 if it says that the person asked about is the right concept; `chain` is 1 if the statements
    before the mark are a chain of given ones from the person to the right concept.

    Example::

        problems = get_reasoning_task("prosqa").problems("test", Path("folder"))
    """

    name: ClassVar[str] = "prosqa"

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        check_request(split, 0)
        records = first(_records(split, data), count, f"problems of {self.name}, {split}")
        return [_read(record, f"{split}-{number}") for number, record in enumerate(records)]


def _records(split: Split, data: Path | None) -> list[Record]:
    if split == "train" and (data is None or data.is_dir()):
        if data is None or not (data / _FILES["train"]).is_file():
            raise ValueError(
                f"{_FILES['train']} is not there: put it into the data's folder (it is in the repository "
                "facebookresearch/coconut), or train on the task prosqa_generated, which makes such problems itself."
            )
        asked = [record for other in ("validation", "test") for record in read_records([_FILES[other]], data)]
        return leave_out(read_records([_FILES["train"]], data), asked, "question")
    return read_records([_FILES[split]], data)


def _read(record: Record, problem_id: str) -> Problem:
    question, answer = record.text("question"), record.text("answer")
    steps = _list(record, "steps", str)
    symbols = _list(record, "idx_to_symbol", str)
    root, target = (_symbol(record, key, symbols) for key in ("root", "target"))
    _symbol(record, "neg_target", symbols)
    if answer != ontology.sentence(root, target):
        raise record.wrong("answer", f"is {answer!r}, and root and target say {ontology.sentence(root, target)!r}")
    edges = [_edge(record, edge, symbols) for edge in _list(record, "edges", list)]
    return Problem(
        problem_id, question, _completion(steps, answer), answer, {"root": root, "target": target, "edges": edges}
    )


def _list(record: Record, field: str, kind: type) -> list[Any]:
    values = record.value(field)
    if not isinstance(values, list) or not values or not all(isinstance(value, kind) and value for value in values):
        raise record.wrong(field, f"is not a list of at least one {kind.__name__}, none of them empty")
    return values


def _symbol(record: Record, field: str, symbols: Sequence[str]) -> str:
    return symbols[_index(record, field, record.value(field), symbols)]


def _edge(record: Record, edge: list[Any], symbols: Sequence[str]) -> list[str]:
    if len(edge) != 2:
        raise record.wrong("edges", f"holds {edge}, which is not a pair")
    return [symbols[_index(record, "edges", node, symbols)] for node in edge]


def _index(record: Record, field: str, index: Any, symbols: Sequence[str]) -> int:
    if type(index) is not int or not 0 <= index < len(symbols):
        raise record.wrong(field, f"holds {index!r}, which is no place in idx_to_symbol (0 to {len(symbols) - 1})")
    return index


@dataclass(frozen=True)
class ProsqaGenerated(_ConceptQuestions):
    """New problems in the style of ProsQA, judged like it: see `crosscurrent.tasks.ontology`.

    Attributes:
        min_steps: the fewest from the person to the right concept, 3 to 6. ProsQA has 3 to 6; 5 makes all of them hard.

    Raises:
        ValueError: min_steps is not allowed.

    Example:
        >>> task = ProsqaGenerated()
        >>> problem = task.problems("test", count=1)[0]
        >>> task.judge(problem, problem.completion).scores
        {'accuracy': 1.0, 'chain': 1.0}
    """

    min_steps: int = ontology.MIN_STEPS

    name: ClassVar[str] = "prosqa_generated"
    is_generated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ontology.check_min_steps(self.min_steps)

    def problems(
        self, split: Split, data: Path | None = None, count: int | None = None, seed: int = 0
    ) -> Sequence[Problem]:
        return generated_problems(self, split, data, count, lambda index: self._problem(split, index, seed))

    def _problem(self, split: Split, index: int, seed: int) -> Problem:
        one = ontology.example(split, index, seed, self.min_steps)
        details = {"root": one.path[0], "target": one.path[-1], "edges": [list(edge) for edge in one.edges]}
        completion = _completion(one.steps, one.answer)
        return Problem(f"{split}-{seed}-{index}", one.question, completion, one.answer, details)
