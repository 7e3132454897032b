"""Pathfinding and ProsQA: the problems against searches of the text that a model reads, and the judges."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import pytest

from crosscurrent.tasks import ontology, pathfinding
from crosscurrent.tasks.reasoning import Problem, ReasoningTask, get_reasoning_task
from crosscurrent.tasks.splits import Split

SPLITS: tuple[Split, ...] = get_args(Split)
DATA = os.environ.get("CROSSCURRENT_TEST_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="needs CROSSCURRENT_TEST_DATA")
PROSQA_FILES: list[tuple[Split, str, int]] = [
    ("validation", "prosqa_valid.json", 300),
    ("test", "prosqa_test.json", 500),
]

Edges = list[tuple[str, str]]


def search(edges: Edges, start: str) -> tuple[dict[str, int], dict[str, int]]:
    """Steps to all that can be reached, and the number of shortest paths there, going out ring by ring."""
    steps, counts, ring = {start: 0}, {start: 1}, {start}
    while ring:
        arriving: dict[str, int] = defaultdict(int)
        for origin, end in edges:
            if origin in ring and end not in steps:
                arriving[end] += counts[origin]
        steps |= dict.fromkeys(arriving, max(steps.values()) + 1)
        counts |= arriving
        ring = set(arriving)
    return steps, counts


def has_cycle(edges: Edges) -> bool:
    """Whether anything is left when nodes that lead nowhere are taken away again and again."""
    while edges:
        origins = {origin for origin, _ in edges}
        fewer = [edge for edge in edges if edge[1] in origins]
        if len(fewer) == len(edges):
            return True
        edges = fewer
    return False


def read_graph(question: str) -> tuple[Edges, str, str]:
    *lines, asked = question.strip().splitlines()
    edges = [(line.split(" -> ")[0], line.split(" -> ")[1]) for line in lines]
    found = re.fullmatch(r"shortest path from (\w+) to (\w+):", asked)
    assert found
    return edges, found[1], found[2]


@pytest.mark.parametrize("options", [{}, {"min_steps": 1, "max_steps": 1}, {"min_steps": 30, "max_steps": 30}])
def test_the_shortest_path_is_the_only_one(options: dict[str, int]) -> None:
    task = get_reasoning_task("pathfinding", **options)
    lengths = set()
    for problem in task.problems("train", count=60):
        edges, start, goal = read_graph(problem.question)
        steps, counts = search(edges, start)
        path = problem.answer.split()
        assert counts[goal] == 1 and steps[goal] == len(path) - 1
        assert (path[0], path[-1]) == (start, goal) and set(pairwise(path)) <= set(edges)
        assert len(set(edges)) == len(edges) and not has_cycle(edges)
        assert sum(origin == start for origin, _ in edges) >= 1 + pathfinding.NUM_LANES
        assert sum(end == goal for _, end in edges) == 1 + pathfinding.NUM_LANES
        ends = {end for _, end in edges} - {origin for origin, _ in edges}
        assert len(ends) == 1 + pathfinding.NUM_DEAD_ENDS
        lengths.add(len(path) - 1)
    assert lengths == set(range(options.get("min_steps", 10), options.get("max_steps", 18) + 1))


def test_lanes_are_a_little_longer() -> None:
    """Number of paths from start to goal by length: one shortest, and six of 1 to 3 steps more."""
    for problem in get_reasoning_task("pathfinding").problems("test", count=30):
        edges, start, goal = read_graph(problem.question)
        after = defaultdict(list)
        for origin, end in edges:
            after[origin].append(end)
        paths, lengths = [[start]], []
        while paths:
            path = paths.pop()
            lengths += [len(path) - 1] if path[-1] == goal else []
            paths += [[*path, end] for end in after[path[-1]]]
        shortest = len(problem.answer.split()) - 1
        assert len(lengths) == 7 and sorted(lengths)[0] == shortest
        assert set(sorted(lengths)[1:]) <= {shortest + 1, shortest + 2, shortest + 3}


@pytest.mark.parametrize("name", ["pathfinding", "prosqa_generated"])
def test_splits_are_disjoint_and_the_same_each_time(name: str) -> None:
    task = get_reasoning_task(name)
    contents = {}
    for split in SPLITS:
        problems = [one for seed in (0, 1) for one in task.problems(split, count=20, seed=seed)[:]]
        assert problems[0] == get_reasoning_task(name).problems(split)[0]
        contents[split] = {content(problem) for problem in problems}
        assert len(contents[split]) == 40 == len({problem.id for problem in problems})
    assert not contents["train"] & contents["test"] and not contents["validation"] & (
        contents["train"] | contents["test"]
    )


def content(problem: Problem) -> str:
    """What is said, in no order."""
    return " ".join(sorted(re.findall(r"[^\n.]+", problem.question)))


PATH_GRAPH = Problem(
    "1",
    "",
    "a b c d",
    "a b c d",
    {"edges": [["a", "b"], ["b", "c"], ["c", "d"], ["b", "x"], ["x", "y"], ["y", "d"], ["a", "z"]]},
)


@pytest.mark.parametrize(
    ("output", "parsed", "shortest", "valid", "prefix"),
    [
        ("a b c d", "a b c d", 1, 1, 1),
        ("\n  a b c d\na z", "a b c d", 1, 1, 1),
        ("a b c d a b c", "a b c d", 1, 1, 1),
        ("a -> b -> c -> d.", "a b c d", 1, 1, 1),
        ("a, b, c, d", "a b c d", 1, 1, 1),
        ("a b x y d", "a b x y d", 0, 1, 1 / 3),
        ("a b d", "a b d", 0, 0, 1 / 3),
        ("a b c", "a b c", 0, 0, 2 / 3),
        ("a", "a", 0, 0, 0),
        ("b c d", "b c d", 0, 0, 0),
        ("z b c d", "z b c d", 0, 0, 0),
        ("a z", "a z", 0, 0, 0),
        ("a a b c d", "a a b c d", 0, 0, 0),
        ("d", "d", 0, 0, 0),
        ("A B C D", "A B C D", 0, 0, 0),
        ("a b\nc d", "a b", 0, 0, 1 / 3),
        ("abcd", "abcd", 0, 0, 0),
        ("", None, 0, 0, 0),
        (" \n\t", None, 0, 0, 0),
        ("-> -> ->", None, 0, 0, 0),
    ],
)
def test_judged_paths(output: str, parsed: str | None, shortest: float, valid: float, prefix: float) -> None:
    verdict = get_reasoning_task("pathfinding").judge(PATH_GRAPH, output)
    assert verdict.parsed == parsed
    assert verdict.scores == {"valid_shortest": shortest, "valid_path": valid, "prefix": pytest.approx(prefix)}


def read_ontology(question: str) -> tuple[Edges, str, set[str]]:
    *sentences, asked = re.findall(r"[^.?]+[.?]", question)
    edges = []
    for one in sentences:
        found = re.fullmatch(r"\s*(?:([A-Z]\w+)|Every ([a-z]\w+)) is a (\w+)\.", one)
        assert found, one
        edges.append((found[1] or found[2], found[3]))
    found = re.fullmatch(r"\s*Is (\w+) a (\w+) or (\w+)\?", asked)
    assert found
    return edges, found[1], {found[2], found[3]}


def check_ontology(task: ReasoningTask, problem: Problem) -> tuple[int, int, int, int, int]:
    """Numbers of nodes, persons, edges, steps and shortest paths."""
    edges, person, asked = read_ontology(problem.question)
    steps, counts = search(edges, person)
    target = problem.answer.removesuffix(".").split()[-1]
    assert problem.answer == f"{person} is a {target}."
    assert target in asked and steps.keys() & asked == {target}
    assert len(set(edges)) == len(edges) and not has_cycle(edges)
    *written, final = problem.completion.splitlines()
    assert final == f"### {problem.answer}" and len(written) == steps[target]
    assert all(one in problem.question for one in written)
    assert task.judge(problem, problem.completion).scores == {"accuracy": 1.0, "chain": 1.0}
    nodes = {node for edge in edges for node in edge}
    persons = nodes - {concept for _, concept in edges}
    assert all(name[0].isupper() == (name in persons) for name in nodes)
    return len(nodes), len(persons), len(edges), steps[target], counts[target]


@needs_data
def test_published_and_generated_problems_are_sound_and_alike() -> None:
    """The generator was fitted to these 800 problems, so near means show that it still is, not that it fits others.

    Tolerances are three to five standard errors of the difference; persons, known to be 0.6 too many, have more.
    """
    published, questions, names = [], set(), set()
    for split, file, count in PROSQA_FILES:
        task = get_reasoning_task("prosqa")
        problems = task.problems(split, Path(str(DATA)))
        assert len(problems) == count and problems == task.problems(split, Path(str(DATA), file))
        published += [check_ontology(task, problem) for problem in problems]
        questions |= {problem.question for problem in problems}
        for record in json.loads(Path(str(DATA), file).read_text()):
            names |= set(record["idx_to_symbol"])
    assert names == {*ontology.PERSONS, *ontology.CONCEPTS} and len(questions) == 800
    task = get_reasoning_task("prosqa_generated")
    made = task.problems("train", count=800)
    assert not questions & {problem.question for problem in made}
    generated = [check_ontology(task, problem) for problem in made]
    expected, found = ([mean(column) for column in zip(*rows, strict=True)] for rows in (published, generated))
    tolerances = [0.5, 1.0, 1.0, 0.15, 0.15]
    for what, old, new, tolerance in zip(
        ("nodes", "persons", "edges", "steps", "paths"), expected, found, tolerances, strict=True
    ):
        assert abs(old - new) < tolerance, (what, old, new)


def test_hard_problems_are_long() -> None:
    task = get_reasoning_task("prosqa_generated", min_steps=5)
    assert min(check_ontology(task, problem)[3] for problem in task.problems("train", count=30)) == 5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prosqa_generated", {"min_steps": 2}),
        ("prosqa_generated", {"min_steps": 7}),
        ("prosqa_generated", {"min_steps": True}),
        ("pathfinding", {"min_steps": 0}),
        ("pathfinding", {"min_steps": 12, "max_steps": 11}),
        ("pathfinding", {"max_steps": 31}),
        ("pathfinding", {"max_steps": "18"}),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(reversed(options))}="):
        get_reasoning_task(name, **options)


CONCEPTS = Problem(
    "1",
    "",
    "",
    "Eva is a rempus.",
    {"root": "Eva", "target": "rempus", "edges": [["Eva", "impus"], ["impus", "rempus"], ["Eva", "tumpus"]]},
)
CHAIN = "Eva is a impus.\nEvery impus is a rempus.\n"


@pytest.mark.parametrize(
    ("output", "parsed", "accuracy", "chain"),
    [
        (f"{CHAIN}### Eva is a rempus.", "Eva is a rempus", 1, 1),
        (f"{CHAIN}### Eva is a rempus.\n### Eva is a tumpus.", "Eva is a rempus", 1, 1),
        (f"{CHAIN}### Eva is a rempus.\nEva is a tumpus.", "Eva is a rempus", 1, 1),
        (f"{CHAIN}###Eva is an rempus", "Eva is a rempus", 1, 1),
        (f"{CHAIN}### Eva is a tumpus.", "Eva is a tumpus", 0, 1),
        (f"{CHAIN}### Bob is a rempus.", "Bob is a rempus", 0, 1),
        ("### Eva is a rempus.", "Eva is a rempus", 1, 0),
        ("Eva is a tumpus.\nEvery tumpus is a rempus.\n### Eva is a rempus.", "Eva is a rempus", 1, 0),
        ("Every impus is a rempus.\nEva is a impus.\n### Eva is a rempus.", "Eva is a rempus", 1, 0),
        ("Eva is a impus.\n### Eva is a rempus.", "Eva is a rempus", 1, 0),
        ("Every impus is a rempus.\n### Eva is a rempus.", "Eva is a rempus", 1, 0),
        ("Eva is a tumpus.\nEvery impus is a rempus.\n### Eva is a rempus.", "Eva is a rempus", 1, 0),
        (f"{CHAIN}Every rempus is a yumpus.\n### Eva is a rempus.", "Eva is a rempus", 1, 0),
        ("Since Eva is a impus, Eva is a rempus.", "Eva is a rempus", 1, 0),
        (CHAIN, "impus is a rempus", 0, 1),
        (f"{CHAIN}### rempus", None, 0, 0),
        (f"{CHAIN}###", None, 0, 0),
        ("no idea", None, 0, 0),
        ("", None, 0, 0),
    ],
)
def test_judged_statements(output: str, parsed: str | None, accuracy: float, chain: float) -> None:
    for name in ("prosqa", "prosqa_generated"):
        verdict = get_reasoning_task(name).judge(CONCEPTS, output)
        assert (verdict.parsed, verdict.scores) == (parsed, {"accuracy": accuracy, "chain": chain})


GOOD: dict[str, Any] = {
    "question": "Eva is a impus. Every impus is a rempus. Is Eva a rempus or yumpus?",
    "answer": "Eva is a rempus.",
    "steps": ["Eva is a impus.", "Every impus is a rempus."],
    "idx_to_symbol": ["Eva", "impus", "rempus", "yumpus"],
    "edges": [[0, 1], [1, 2]],
    "root": 0,
    "target": 2,
    "neg_target": 3,
}


def write(folder: Path, file: str, records: Iterable[dict[str, Any]]) -> Path:
    (folder / file).write_text(json.dumps(list(records)))
    return folder


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *((field, None, f"no field '{field}'") for field in GOOD),
        ("question", " ", "is empty"),
        ("answer", "", "is empty"),
        ("answer", "Eva is a yumpus.", "root and target say 'Eva is a rempus.'"),
        ("answer", 3, "int"),
        ("steps", [], "at least one"),
        ("steps", "Eva is a impus.", "not a list"),
        ("steps", [""], "empty"),
        ("idx_to_symbol", ["Eva", 1], "str"),
        ("edges", [[0, 4]], "0 to 3"),
        ("edges", [[0, 1, 2]], "not a pair"),
        ("edges", [3], "list"),
        ("edges", [[0, True]], "True"),
        ("root", -1, "-1"),
        ("target", "2", "'2'"),
        ("neg_target", 9, "9"),
    ],
)
def test_wrong_records_are_named(tmp_path: Path, field: str, value: Any, words: str) -> None:
    wrong = {key: kept for key, kept in (GOOD | {field: value}).items() if kept is not None}
    folder = write(tmp_path, "prosqa_test.json", [GOOD, wrong])
    with pytest.raises(ValueError, match=r"prosqa_test\.json, record 2") as caught:
        get_reasoning_task("prosqa").problems("test", folder)
    assert field in str(caught.value) and words in str(caught.value)


def test_published_training_problems_are_used_if_they_are_there(tmp_path: Path) -> None:
    task = get_reasoning_task("prosqa")
    for data in (None, tmp_path):
        with pytest.raises(ValueError, match="prosqa_generated"):
            task.problems("train", data)
    with pytest.raises(ValueError, match=r"prosqa_test\.json"):
        task.problems("test")
    others = [GOOD | {"question": f"{number} {GOOD['question']}"} for number in range(3)]
    write(tmp_path, "prosqa_train.json", [GOOD, *others])
    write(tmp_path, "prosqa_valid.json", others[1:2])
    write(tmp_path, "prosqa_test.json", others[2:])
    assert [one.question[0] for one in task.problems("train", tmp_path)] == ["E", "0"]
    assert len(task.problems("train", tmp_path, count=1)) == 1
    with pytest.raises(ValueError, match="count=3"):
        task.problems("train", tmp_path, count=3)
