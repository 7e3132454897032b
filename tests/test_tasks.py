"""The task generators against brute force, and the promises every generator makes."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from crosscurrent.tasks import IGNORED, Task, get_task, register_task, registry, task_names, variable_assignment
from crosscurrent.tasks.permutations import IDENTITY, PERMUTATIONS, SWAPS, then
from crosscurrent.tasks.splits import Split, split_of

SPLITS: tuple[Split, ...] = get_args(Split)
SEQUENCE_TASKS = task_names()


def asked(task: Task, split: Split, length: int, index: int, every_prefix: bool | None = None) -> tuple[str, list[str]]:
    """What the model reads after BOS, as text, and the predictions asked for, "." where there is none."""
    one = task.example(split, length, index, prefix_supervision=every_prefix)
    assert task.vocabulary[one.tokens[0]] == "<bos>" and len(one.tokens) == len(one.targets)
    assert one.targets[0] == IGNORED
    read = task.decode(one.tokens[1:])
    return "".join(read), ["." if target == IGNORED else task.vocabulary[target] for target in one.targets[1:]]


@pytest.mark.parametrize("length", [8, 9, 40, 257])
@pytest.mark.parametrize("split", SPLITS)
def test_parity_by_counting_ones(split: Split, length: int) -> None:
    for index in range(50):
        bits, parities = asked(get_task("parity"), split, length, index, every_prefix=True)
        assert len(bits) == length
        assert parities == [str(bits[: stop + 1].count("1") % 2) for stop in range(length)]
        assert asked(get_task("parity"), split, length, index) == (bits, [*"." * (length - 1), parities[-1]])


def rearranged(things: list[str], permutation: str) -> list[str]:
    return [things[int(place)] for place in permutation]


@pytest.mark.parametrize("name", ["s5_standard", "s5_swaps"])
def test_permutations_by_moving_five_things(name: str) -> None:
    """Left to right: each input rearranges what the earlier ones have arranged."""
    task = get_task(name)
    for index in range(50):
        one = task.example("test", 33, index)
        things = list(IDENTITY)
        for token, target in zip(one.tokens[1:], one.targets[1:], strict=True):
            things = rearranged(things, task.vocabulary[token])
            assert "".join(things) == task.vocabulary[target]
        final = task.example("test", 33, index, prefix_supervision=False)
        assert final.targets == (*[IGNORED] * 33, one.targets[-1])


@pytest.mark.parametrize(("name", "num_entries"), [("s5_retrieval", 16), ("s5_retrieval_state", 120)])
def test_retrieval_by_reading_the_dictionary(name: str, num_entries: int) -> None:
    """The dictionary is read symbol by symbol, and five things are moved by every step."""
    task = get_task(name)
    for index in range(30):
        one = task.example("test", 9, index)
        read = task.decode(one.tokens[1:])
        bar = read.index("|")
        assert bar == 5 * num_entries and one.num_prompt == bar + 2  # BOS and the bar belong to the prompt
        assert set(one.targets[: one.num_prompt]) == {IGNORED}
        assert len(one.tokens) == len(one.targets) == one.num_prompt + 5 * 9
        dictionary, key = dict[str, str](), ""
        for symbol in read[:bar]:
            if symbol in PERMUTATIONS:
                key, dictionary[symbol] = symbol, ""
            else:
                dictionary[key] += symbol
        assert len(dictionary) == num_entries and {len(value) for value in dictionary.values()} == {4}
        asked_for = task.decode(one.targets[one.num_prompt :])
        things = list(IDENTITY)
        for step in range(9):
            action, *slots = read[bar + 1 + 5 * step : bar + 6 + 5 * step]
            assert action in dictionary and slots == ["_"] * 4
            things = rearranged(things, action)
            state, *value = asked_for[5 * step : 5 * step + 5]
            assert state == "".join(things)
            assert "".join(value) == dictionary[action if name == "s5_retrieval" else state]
        last = task.example("test", 9, index, prefix_supervision=False)
        assert last.tokens == one.tokens and last.targets == (*[IGNORED] * (len(one.targets) - 5), *one.targets[-5:])


def test_dictionaries_are_shuffled_and_drawn_anew() -> None:
    for name, share in (("s5_retrieval", 16 / 120), ("s5_retrieval_state", 1.0)):
        payloads = [get_task(name).payload("train", 4, index) for index in range(200)]
        keys = [[symbol for symbol in payload[:-4] if symbol in PERMUTATIONS] for payload in payloads]
        assert len({tuple(order) for order in keys}) == 200
        held = sum(IDENTITY in order for order in keys) / 200
        assert held == pytest.approx(share, abs=0.1) and len({payload[-4:] for payload in payloads}) == 200


def test_composition_is_a_group_and_its_order_matters() -> None:
    drawn = random.Random(0).choices(PERMUTATIONS, k=60)
    for p, q, r in zip(drawn, drawn[20:], drawn[40:], strict=False):
        assert then(then(p, q), r) == then(p, then(q, r))
        assert then(IDENTITY, p) == p == then(p, IDENTITY)
    assert any(then(p, q) != then(q, p) for p, q in itertools.pairwise(drawn))
    assert len(set(SWAPS)) == 11 and len(PERMUTATIONS) == 120
    assert all(then(swap, swap) == IDENTITY for swap in SWAPS)


def test_inputs_of_permutations_are_uniform() -> None:
    for name, inputs in (("s5_standard", PERMUTATIONS), ("s5_swaps", SWAPS)):
        counts = Counter(p for index in range(300) for p in get_task(name).payload("train", 32, index))
        expected = 300 * 32 / len(inputs)
        assert set(counts) == set(inputs)
        assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def python_value(expression: str) -> str:
    return str(eval(expression.replace("x", "*")) % 5)  # of our own digits, operators and brackets


@pytest.mark.parametrize("length", [9, 39, 255])
def test_flat_arithmetic_by_python(length: int) -> None:
    for index in range(50):
        read, values = asked(get_task("mod5_flat"), "test", length, index, every_prefix=True)
        expression = read.removesuffix("=")
        assert len(expression) == length and set(expression) <= set("01234+-x")
        for place in range(0, length, 2):
            assert values[place] == python_value(expression[: place + 1])
        assert values[1:-1:2] == ["."] * (length // 2)
        assert values[-1] == python_value(expression)
        assert asked(get_task("mod5_flat"), "test", length, index)[1] == [*"." * length, values[-1]]


@pytest.mark.parametrize("length", [9, 10, 31, 40, 256])
def test_bracketed_arithmetic_by_python(length: int) -> None:
    for index in range(50):
        read, values = asked(get_task("mod5_brackets"), "test", length, index, every_prefix=True)
        expression = read.removesuffix("=")
        assert len(expression) == length
        assert values[-1] == python_value(expression)
        for place, symbol in enumerate(expression):
            begun = expression[: place + 1]
            since = begun[begin_of_innermost(begun) :]
            complete = symbol.isdigit() or symbol == ")"
            assert values[place] == (python_value(since) if complete else "."), (expression, place)


def begin_of_innermost(text: str) -> int:
    """Where the text after the innermost bracket that is still open begins."""
    opened = []
    for place, symbol in enumerate(text):
        if symbol == "(":
            opened.append(place + 1)
        elif symbol == ")":
            opened.pop()
    return opened[-1] if opened else 0


def test_every_length_has_bracketed_expressions() -> None:
    for length in range(1, 41):
        assert len({get_task("mod5_brackets").payload("train", length, index) for index in range(100)}) >= 5


@pytest.mark.parametrize("split", SPLITS)
def test_addition_by_python(split: Split) -> None:
    lengths: Counter[int] = Counter()
    for index in range(200):
        read, answer = asked(get_task("addition"), split, 9, index)
        question, _, shown = read.partition("=")
        a, b = (int(number[::-1]) for number in question.split("+"))
        expected = str(a + b)[::-1]
        assert shown == expected and answer == [*"." * len(question), *expected, "<eos>"]
        lengths.update(len(number) for number in question.split("+"))
        assert all(number == "0" or number[-1] != "0" for number in question.split("+"))
    assert set(lengths) == ({9} if split == "test" else set(range(1, 10)))


def test_addition_of_prefixes() -> None:
    """At each digit of the second number, the digit of the sum in its place."""
    for index in range(100):
        read, values = asked(get_task("addition"), "train", 8, index, every_prefix=True)
        a, b = read.partition("=")[0].split("+")
        total = str(int(a[::-1]) + int(b[::-1]))[::-1]
        at_b = values[len(a) + 1 : len(a) + 1 + len(b)]
        assert at_b == list(total[: len(b)])


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
def test_short_examples_are_for_training_only(name: str) -> None:
    task = get_task(name)
    for split in ("validation", "test"):
        with pytest.raises(ValueError, match=f"of {name}"):
            task.example(split, task.min_held_out_length - 1, 0)
        task.example(split, task.lengths.test[0], 0)
    with pytest.raises(ValueError, match="length=0"):
        task.example("train", 0, 0)


def test_even_lengths_of_flat_arithmetic_are_refused() -> None:
    with pytest.raises(ValueError, match=r"length=32.*odd"):
        get_task("mod5_flat").example("test", 32, 0)


def test_parity_splits_divide_all_sequences() -> None:
    """At 8 bits every sequence can be drawn, and each from one split only, whatever the seed."""
    task = get_task("parity")
    found = {
        split: {task.payload(split, 8, index, seed) for index in range(1500) for seed in range(3)} for split in SPLITS
    }
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 2**8
    assert min(map(len, found.values())) >= 10


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
def test_splits_share_no_example(name: str) -> None:
    task = get_task(name)
    length = task.min_held_out_length
    found = {
        split: {task.payload(split, length, index, seed) for index in range(300) for seed in range(2)}
        for split in SPLITS
    }
    assert sum(map(len, found.values())) == len(set.union(*found.values()))


def test_short_sums_are_in_one_split_too() -> None:
    """A validation pair may have fewer digits than its length says."""
    task = get_task("addition")
    trained = {task.payload("train", length, index) for length in (2, 3, 8) for index in range(600)}
    held_out = {task.payload("validation", length, index) for length in (2, 3, 8) for index in range(600)}
    assert not trained & held_out and any(len(pair) == 3 for pair in trained & trained)


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
def test_guessing_gives_chance(name: str) -> None:
    """No constant answer is right much above chance (the answer digits of a sum have ends, which are not digits)."""
    task = get_task(name)
    length = task.lengths.test[0]
    if name.startswith("addition"):
        answers = [asked(task, "test", length, index)[1][-4] for index in range(1000)]
    else:
        answers = [asked(task, "test", length, index)[1][-1] for index in range(1000)]
    most = Counter(answers).most_common(1)[0][1] / 1000
    assert most < task.chance + 5 * (task.chance * (1 - task.chance) / 1000) ** 0.5 + 0.05


def follow(prompt: str) -> tuple[str, int]:
    """The answer by substitution, and how many aliases lie on the way to it."""
    *lines, question = prompt.splitlines()
    meaning = dict(line.split("=") for line in lines)
    assert len(meaning) == len(lines), "a name is defined twice"
    value, steps = question.removeprefix("value of ").removesuffix(": "), -1
    while not value.isdigit():
        value, steps = meaning[value], steps + 1
    return value, steps


@pytest.mark.parametrize("depth", [1, 2, variable_assignment.HARD_DEPTH, variable_assignment.MAX_DEPTH])
@pytest.mark.parametrize("split", SPLITS)
def test_variable_assignment_by_substitution(split: Split, depth: int) -> None:
    for index in range(50):
        one = variable_assignment.example(split, index, depth=depth)
        assert follow(one.prompt) == (one.answer, depth)
        values = [line.split("=")[1] for line in one.prompt.splitlines()[:-1]]
        assert sum(value.isdigit() for value in values) == 8
        assert len(values) == 8 + 6 + depth


def test_variable_assignment_cannot_be_answered_by_a_shortcut() -> None:
    """Neither a constant, nor the digit of a fixed line, nor the first digit that appears is right much above chance."""
    problems = [variable_assignment.example("train", index) for index in range(2000)]
    answers = Counter(one.answer for one in problems)
    assert sorted(answers) == list("0123456789")
    assert max(answers.values()) / len(problems) < 1.5 * variable_assignment.CHANCE
    for digit in range(8):
        digits = [[c for c in one.prompt if c.isdigit()][digit] for one in problems]
        right = sum(guess == one.answer for guess, one in zip(digits, problems, strict=True)) / len(problems)
        assert right < 0.3  # one of eight digits is the right one, and others may equal it: 21 % expected


def test_variable_assignment_splits_share_no_problem() -> None:
    """Two problems are the same if they have the same lines in any order."""
    found = {
        split: {
            tuple(sorted(variable_assignment.example(split, index, seed).prompt.splitlines()))
            for index in range(200)
            for seed in range(2)
        }
        for split in SPLITS
    }
    assert all(len(problems) == 400 for problems in found.values())
    assert len(set.union(*found.values())) == 1200
    for split in SPLITS:
        for index in range(100):
            *lines, question = variable_assignment.example(split, index).prompt.splitlines()
            name = question.removeprefix("value of ").removesuffix(": ")
            assert split_of(f"{sorted(lines)} {name}") == split


@pytest.mark.parametrize("depth", [0, -1, variable_assignment.MAX_DEPTH + 1])
def test_variable_assignment_refuses_other_depths(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}"):
        variable_assignment.example("train", 0, depth=depth)


EXAMPLES: dict[str, Callable[..., Any]] = {
    name: lambda split="train", index=0, seed=0, name=name: get_task(name).example(split, 33, index, seed)
    for name in SEQUENCE_TASKS
} | {"variable_assignment": lambda split="train", index=0, seed=0: variable_assignment.example(split, index, seed)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_follow_from_split_index_and_seed(name: str) -> None:
    example = EXAMPLES[name]
    assert example() == example()
    different = [example(), example(index=1), example(seed=1), example(split="test"), example(split="validation")]
    assert len({repr(one) for one in different}) == len(different)


@pytest.mark.parametrize("name", EXAMPLES)
def test_bad_requests_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"split='dev'.*'validation'"):
        EXAMPLES[name](split="dev")
    with pytest.raises(ValueError, match="index=-1"):
        EXAMPLES[name](index=-1)


def test_unknown_names_and_symbols_are_answered() -> None:
    with pytest.raises(ValueError, match=r"'s5_swap'.*'s5_swaps'"):
        get_task("s5_swap")
    with pytest.raises(ValueError, match="'2'"):
        get_task("parity").encode("012")
    with pytest.raises(ValueError, match="parity"):
        register_task(get_task("parity"))
    for wrong in (None, 5):
        with pytest.raises(ValueError, match="no task"):
            get_task(wrong)  # type: ignore[arg-type]
    for outside in (-1, 3):
        with pytest.raises(ValueError, match=f"no token {outside}"):
            get_task("parity").decode([outside])


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"name": 3}, "a name"),
        ({"name": ""}, "name"),
        ({"lengths": None}, "lengths"),
        ({"vocabulary": ("0", "1")}, "<bos>"),
        ({"vocabulary": ("0", "0", "<bos>")}, "once"),
    ],
)
def test_tasks_that_do_not_describe_themselves_are_refused(attributes: dict[str, Any], words: str) -> None:
    described = {"name": "new", "chance": 0.5, "lengths": get_task("parity").lengths, "vocabulary": ("0", "1", "<bos>")}
    kind: Any = type("Mine", (type(get_task("parity")),), described | attributes)
    with pytest.raises(ValueError, match=words):
        register_task(kind())
    with pytest.raises(ValueError, match="not a task"):
        register_task(kind)
    assert "new" not in task_names()


def test_a_task_with_too_few_payloads_says_so() -> None:
    class Constant(type(get_task("parity"))):  # type: ignore[misc]
        name = "constant"

        def draw(self, numbers: random.Random, length: int, split: Split) -> tuple[str, ...]:
            return ("0",) * length

    found = dict.fromkeys(SPLITS, 0)
    for split in SPLITS:
        try:
            Constant().payload(split, 9, 0)
            found[split] = 1
        except ValueError as error:
            assert "too few payloads" in str(error)
    assert sum(found.values()) == 1


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
def test_published_protocol(name: str) -> None:
    task = get_task(name)
    counts = {
        "addition": (256, 256),
        "addition_places": (256, 256),
        "s5_retrieval": (64, 256),
        "s5_retrieval_state": (64, 256),
    }
    assert (task.num_validation, task.num_test) == counts.get(name, (256, 1024))
    for length in (*task.lengths.validation, *task.lengths.test):
        task.check_length(length, "test")


def test_examples_stay_what_they_are() -> None:
    """Published numbers rest on these generators: a change of theirs must not go unnoticed."""
    payloads = {name: "".join(get_task(name).payload("test", 11, 7, seed=1))[-60:] for name in SEQUENCE_TASKS}
    assert payloads == {
        "addition": "53561872254+69532565199",
        "addition_places": "02916885523+99511625577",
        "mod5_brackets": "(3-(-4x-4))",
        "mod5_flat": "4x3x1x1-3-4",
        "parity": "00011010000",
        "s5_retrieval": "sbtv|1342032410310240341214203342104210332410134022413003412",
        "s5_retrieval_state": "zhlw|4321003142230411340210423041322410340231021433402121304",
        "s5_standard": "4032102431041233214031204304212310434201241301403204231",
        "s5_swaps": "0124302134012430123441230312040123404231021340143202134",
    }
    assert variable_assignment.example("test", 7, seed=1, depth=5).prompt.split() == (
        [
            "h=g",
            "v=m",
            "w=b",
            "d=3",
            "m=d",
            "i=1",
            "u=2",
            "j=4",
            "g=r",
            "q=m",
            "b=9",
            "n=a",
            "c=6",
            "a=h",
            "r=y",
            "y=7",
            "o=u",
            "s=7",
            "e=g",
            "value",
            "of",
            "n:",
        ]
    )


def test_the_task_in_the_documentation_works() -> None:
    """And leaves the registry as it was."""
    page = (Path(__file__).parent.parent / "docs" / "study.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "register_task" in block)
    try:
        exec(compile(code, "docs/study.md", "exec"), {"__name__": "my_task"})
        task = get_task("smallest_letter")
        one = task.example("test", 20, 0, prefix_supervision=True)
        read, asked_for = task.decode(one.tokens[1:]), task.decode(one.targets[1:])
        assert list(asked_for) == [min(read[: stop + 1]) for stop in range(20)]
    finally:
        registry._TASKS.pop("smallest_letter", None)
