"""Evaluation by what a model writes: outputs, records that survive, statistics, and `crosscurrent evaluate`."""

import copy
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli.main import app
from crosscurrent.data.problems import ProblemTokenizer
from crosscurrent.evaluation.answering import (
    AnsweringSettings,
    Record,
    answer_problems,
    compare,
    pass_at_k,
    read_answers,
    score_answers,
    summary,
)
from crosscurrent.evaluation.answering.sampling import SeededSampling
from crosscurrent.evaluation.answering.statistics import estimate
from crosscurrent.models.base import load_base
from crosscurrent.tasks.reasoning import ReasoningTask, Verdict, get_reasoning_task
from tests.subjects import make_rlt
from tests.tiny_base import CHARACTERS, character_tokenizer, save_opened_retrofit, save_tiny_base

TASK, DEEPER = (get_reasoning_task("variable_assignment", depth=depth) for depth in (2, 3))
# Short ones of several lengths: for the models here, of random weights, it makes no difference what is asked.
PROBLEMS = [
    replace(problem, question=problem.question[-6 - 2 * (place % 5) :])
    for place, problem in enumerate(TASK.problems("test", count=7))
]
GREEDY = AnsweringSettings(max_new_tokens=6)
DRAWN = AnsweringSettings(max_new_tokens=6, num_samples=3, temperature=1.5, top_p=0.9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and a retrofit of it, saved with a tokenizer that has an end-of-text token."""
    root = tmp_path_factory.mktemp("models")
    base = save_tiny_base(root / "base")
    opened = save_opened_retrofit(base, root / "opened")
    for folder in (base, opened):
        tiny_tokenizer().save_pretrained(folder)
    return {"base": base, "opened": opened}


def tiny_tokenizer() -> Any:
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "~"
    return tokenizer


def load(name: str, folders: dict[str, Path]) -> Any:
    if name == "rlt":
        return make_rlt(vocab_size=len(CHARACTERS), eos_token_id=None).float()
    return AutoModelForCausalLM.from_pretrained(folders[name])


@pytest.fixture
def model(folders: dict[str, Path]) -> Any:
    return load("base", folders)


def timeless(records: list[Record]) -> list[Record]:
    return [replace(record, seconds=0.0) for record in records]


def answers(model: Any, settings: AnsweringSettings = GREEDY, file: Path | None = None, **changes: Any) -> list[Record]:
    given = {"tokenizer": tiny_tokenizer(), "task": TASK, "problems": PROBLEMS} | changes
    return timeless(answer_problems(model, settings=settings, file=file, **given))


def outputs(records: list[Record]) -> list[str]:
    return [record.output for record in records]


def written_by_hand(model: Any, max_new_tokens: int = 6, **choices: Any) -> list[str]:
    tokenizer, found = tiny_tokenizer(), []
    choices |= {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": tokenizer.eos_token_id}
    for problem in PROBLEMS:
        ids = torch.tensor([ProblemTokenizer(TASK, tokenizer).prompt_ids(problem)])
        new = model.generate(ids, **choices)[0, ids.shape[1] :]
        found.append(tokenizer.decode(new).partition("~")[0])
    return found


# ---- what is written ----


@pytest.mark.parametrize("name", ["base", "opened", "rlt"])
def test_outputs_do_not_depend_on_the_batch_and_are_the_models_own(name: str, folders: dict[str, Path]) -> None:
    model = load(name, folders)
    for settings, sizes in ((GREEDY, (1, 3, 8)), (DRAWN, (2, 8))):
        first, *others = (answers(model, replace(settings, batch_size=size)) for size in sizes)
        assert all(other == first for other in others)
        assert [(r.id, r.sample) for r in first] == [(p.id, s) for p in PROBLEMS for s in range(settings.num_samples)]
    assert outputs(answers(model)) == written_by_hand(model)
    assert len(set(outputs(answers(model, DRAWN)))) > len(PROBLEMS)


def test_recurrence_of_prompts(folders: dict[str, Path]) -> None:
    """The model's own configuration counts unless another choice is made."""
    model = load("opened", folders)
    choices: dict[str, dict[str, Any]] = {
        "as configured": {},
        "plain": {"prompt_recurrence": False},
        "rough": {"solver": cc.Jacobi(iterations=1, backward_iterations=1)},
    }
    found = {name: outputs(answers(model, replace(GREEDY, **choice))) for name, choice in choices.items()}
    for name, choice in choices.items():
        assert found[name] == written_by_hand(model, **choice)
    assert len({tuple(each) for each in found.values()}) == 3
    model.config.prompt_recurrence = False
    assert outputs(answers(model)) == found["plain"]
    assert score_answers(model, tiny_tokenizer(), TASK, PROBLEMS, GREEDY)["recurrence"]["prompt_recurrence"] is False


def test_choices_without_effect_warn(model: Any) -> None:
    with pytest.warns(UserWarning, match="solver and prompt_recurrence: no effect"):
        answers(model, replace(GREEDY, solver="exact", prompt_recurrence=False))


def test_generation_settings_of_a_checkpoint_do_not_count(model: Any) -> None:
    expected = answers(model)
    saved = {
        "repetition_penalty": 9.0,
        "do_sample": True,
        "temperature": 3.0,
        "suppress_tokens": [5, 6, 7],
        "num_beams": 2,
    }
    model.generation_config.update(**saved)
    model.train()
    before, random_state = copy.deepcopy(model.generation_config), torch.get_rng_state()
    assert answers(model) == expected
    assert model.generation_config == before and model.training
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_model_wrapped_by_peft(folders: dict[str, Path]) -> None:
    model = load("opened", folders)
    expected = answers(model)
    model.generation_config.repetition_penalty = 9.0
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert answers(wrapped) == expected and model.generation_config.repetition_penalty == 9.0


def test_outputs_end_at_the_models_and_the_tokenizers_end(model: Any) -> None:
    text = answers(model)[0].output
    tokenizer = tiny_tokenizer()
    for place, give in ((2, "model"), (3, "tokenizer")):
        token = text[place]
        changed, others = copy.deepcopy(model), tiny_tokenizer()
        if give == "model":
            changed.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token)]
        else:
            others.eos_token = token
        for size in (1, 7):
            record = answers(changed, replace(GREEDY, batch_size=size), tokenizer=others)[0]
            assert record.output == text[: text.index(token)] and not record.is_truncated
            assert record.num_new_tokens == text.index(token) + 1
    assert all(record.is_truncated and record.num_new_tokens == 6 for record in answers(model))


def test_a_tokenizer_without_pad_token(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert answers(model, replace(GREEDY, batch_size=3), tokenizer=tokenizer) == answers(model)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0])
    num, temperature = 4000, 0.7
    keys = [(f"p{row}", 0) for row in range(num)]
    for top_p, allowed in ((1.0, 4), (0.8, 2)):
        sampling = SeededSampling(keys, temperature, top_p, seed=3)
        drawn = sampling(torch.zeros(num, 1, dtype=torch.long), logits.expand(num, -1).clone()).argmax(dim=1)
        wanted = (logits / temperature).softmax(dim=0)[:allowed]
        shares = torch.bincount(drawn, minlength=4) / num
        assert shares[:allowed] == pytest.approx(wanted / wanted.sum(), abs=0.03) and shares[allowed:].sum() == 0


def test_draws_depend_on_the_seed_alone(model: Any) -> None:
    first = outputs(answers(model, DRAWN))
    torch.manual_seed(99)
    assert outputs(answers(model, DRAWN, problems=PROBLEMS[::-1]))[-3:] == first[:3]
    assert outputs(answers(model, replace(DRAWN, seed=1))) != first
    cold = answers(model, replace(DRAWN, temperature=1e-4, top_p=1.0))
    assert outputs(cold)[::3] == outputs(answers(model))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size=0 is not allowed"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"num_samples": True}, "num_samples=True"),
        ({"num_samples": 2}, "give a temperature"),
        ({"top_p": 0.5}, "has no effect without a temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"prompt_format": "chatt"}, "prompt_format='chatt'"),
        ({"prompt_recurrence": "no"}, "prompt_recurrence='no'"),
        ({"solver": "exakt"}, "Did you mean 'exact'"),
    ],
)
def test_settings_that_are_not_allowed(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AnsweringSettings(**settings)


def test_prompts_longer_than_the_context(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected = answers(model)
    lengths = sorted(record.num_prompt_tokens for record in expected)
    marked = [replace(p, question="x" * 200) if i in (1, 4) else p for i, p in enumerate(PROBLEMS)]
    model.config.max_position_embeddings = lengths[-1] + 6
    capsys.readouterr()
    found = answers(model, replace(GREEDY, batch_size=2), problems=marked)
    assert f"2 of 7 prompts have more than {lengths[-1]} tokens" in capsys.readouterr().err
    assert [record.is_too_long for record in found] == [i in (1, 4) for i in range(7)]
    assert [found[i] for i in (0, 2, 3, 5, 6)] == [expected[i] for i in (0, 2, 3, 5, 6)]
    assert found[1].scores == {"accuracy": 0.0} and found[1].output == "" and found[1].num_prompt_tokens == 200
    counted = summary(found)
    assert counted["num_too_long"] == 2 and counted["num_problems"] == 7 and counted["truncation_rate"] == 1.0
    model.config.max_position_embeddings = 8
    with pytest.raises(ValueError, match="7 of 7 prompts have more than 2 tokens"):
        answers(model)


@pytest.mark.parametrize(
    ("problems", "words"), [([], "there is no problem"), ([PROBLEMS[0], PROBLEMS[0]], "two problems have the id")]
)
def test_problems_that_cannot_be_answered(problems: Any, words: str, model: Any) -> None:
    with pytest.raises(ValueError, match=words):
        answers(model, problems=problems)


# ---- records ----


class Deadly(type(TASK)):  # type: ignore[misc]
    """Ends its process in the middle of judging."""

    def judge(self, problem: Any, output: str) -> Verdict:
        if problem.id == PROBLEMS[5].id:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().judge(problem, output)


@pytest.mark.once
def test_records_of_a_killed_process_are_gone_on_with(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "new" / "records.jsonl"
    code = (
        "from tests.test_answering import *\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folders['opened'])!r})\n"
        f"answers(model, replace(DRAWN, batch_size=2), Path({str(file)!r}), task=Deadly(depth=2))"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    model = load("opened", folders)
    kept = read_answers(file)
    assert len(kept.records) == 14 and not kept.is_complete
    whole = answers(model, DRAWN, tmp_path / "whole.jsonl")
    with file.open("a") as at_end:
        at_end.write('{"id": "test-0-4", "sam')
    assert answers(model, replace(DRAWN, batch_size=5), file) == whole
    assert read_answers(file).is_complete
    assert timeless(read_answers(file).records) == timeless(read_answers(tmp_path / "whole.jsonl").records) == whole
    model.generate = None  # nothing is left to be written
    assert answers(model, DRAWN, file) == whole


def test_records_of_something_else_are_not_gone_on_with(model: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    answers(model, GREEDY, file, name="a")
    before = file.read_bytes()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.lm_head.weight[3, 3] += 1e-3
    templated = tiny_tokenizer()
    templated.chat_template = "{{ messages[0]['content'] }}!"
    ending = copy.deepcopy(model)
    ending.generation_config.eos_token_id = 7
    detailed = [*PROBLEMS[:6], replace(PROBLEMS[6], details={"edges": [[0, 1]]})]
    calls: list[tuple[str, Any]] = [
        ("end_ids", lambda: answers(ending, GREEDY, file)),
        ("data", lambda: answers(model, GREEDY, file, problems=detailed)),
        ("model.fingerprint", lambda: answers(moved, GREEDY, file)),
        ("recurrence", lambda: answers(load("opened", folders), GREEDY, file)),
        ("settings.max_new_tokens: 6 -> 7", lambda: answers(model, replace(GREEDY, max_new_tokens=7), file)),
        ("prompts", lambda: answers(model, replace(GREEDY, prompt_format="chat"), file, tokenizer=templated)),
        ("num_problems: 7 -> 6", lambda: answers(model, GREEDY, file, problems=PROBLEMS[:6])),
        ("data", lambda: answers(model, GREEDY, file, problems=[*PROBLEMS[:6], replace(PROBLEMS[6], answer="99")])),
        ("task.options.depth: 2 -> 3", lambda: answers(model, GREEDY, file, task=DEEPER)),
    ]
    for words, call in calls:
        with pytest.raises(ValueError, match=words):
            call()
    assert file.read_bytes() == before
    answers(model, replace(GREEDY, batch_size=2), file, name="b")  # neither of these matters
    lines = before.split(b"\n")
    for damaged, words in (
        (b"\n".join([lines[0], lines[1][:-9], lines[2], b""]), "line 2 is damaged"),
        (b"\n".join([lines[0], b"{}", lines[2], b""]), "line 2 is no record"),
        (
            b"\n".join([lines[0], re.sub(rb'"accuracy": [0-9.]+', b'"accuracy": 7', lines[1]), b""]),
            "line 2 is no record",
        ),
        (
            b"\n".join([lines[0], re.sub(rb'"accuracy": [0-9.]+', b'"accuracy": NaN', lines[1]), b""]),
            "line 2 is no record",
        ),
        (b"\n".join([lines[0], re.sub(rb'"id": "[^"]+"', b'"id": []', lines[1]), b""]), "line 2 is no record"),
        (
            b"\n".join([re.sub(rb'"num_problems": [0-9]+', b'"num_problems": null', lines[0]), b""]),
            "no file of records",
        ),
        (b"\n".join([lines[1], lines[2], b""]), "no file of records"),
        (b"\n".join([lines[0], lines[2], lines[1], b""]), "in the order of the problems"),
        (b"", "no file of records"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=words):
            answers(model, GREEDY, file)
        assert file.read_bytes() == damaged


# ---- statistics ----


def records_of(scores: Any, **changes: Any) -> list[Record]:
    """A record for each score, of [N] problems or [N, S] outputs of them."""
    usual: dict[str, Any] = {"prompt": "", "output": "", "parsed": "1", "answer": "1", "is_too_long": False}
    numbers: dict[str, Any] = {"num_prompt_tokens": 1, "num_new_tokens": 2, "is_truncated": False, "seconds": 0.5}
    return [
        Record(id=str(row), sample=sample, scores={"accuracy": float(score)}, **(usual | numbers | changes))
        for row, outputs in enumerate(np.asarray(scores, dtype=float).reshape(len(scores), -1))
        for sample, score in enumerate(outputs)
    ]


def test_summary_counts() -> None:
    records = records_of([1, 0, 0, 1, 0])
    records[1] = replace(records[1], parsed=None)
    records[2] = replace(records[2], is_truncated=True, num_new_tokens=4)
    records[4] = replace(records[4], is_too_long=True, parsed=None, num_new_tokens=0, seconds=0.0)
    found = summary(records)
    assert found["metrics"]["accuracy"]["mean"] == pytest.approx(0.4)  # of all five
    assert (found["parse_failure_rate"], found["truncation_rate"], found["num_too_long"]) == (0.25, 0.25, 1)
    assert found["tokens_per_second"] == 10 / 2.0 and "pass_at_k" not in found
    with pytest.raises(ValueError, match="there is no record"):
        summary([])
    with pytest.raises(ValueError, match="problems have from 1 to 2 outputs"):
        summary(records_of([[1, 0], [0, 1]])[:-1])


def test_pass_at_k_by_brute_force() -> None:
    for num, right in itertools.product(range(1, 6), range(6)):
        for k in range(1, num + 1) if right <= num else ():
            draws = list(itertools.combinations([1] * right + [0] * (num - right), k))
            assert pass_at_k(num, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="k=4 is not allowed"):
        pass_at_k(3, 1, 4)


def test_pass_at_1_is_the_mean_and_k_grows_to_all() -> None:
    right = np.random.default_rng(0).random((40, 6)) < 0.2
    found = summary(records_of(right))
    passes = {k: one["mean"] for k, one in found["pass_at_k"].items()}
    assert list(passes) == ["1", "2", "4", "6"] and list(passes.values()) == sorted(passes.values())
    assert passes["1"] == pytest.approx(found["metrics"]["accuracy"]["mean"]) == pytest.approx(right.mean())
    assert passes["6"] == pytest.approx(right.any(axis=1).mean())
    assert "pass_at_k" not in summary(records_of(np.full((3, 2), 0.5)))


def test_intervals_cover_at_about_their_rate() -> None:
    random, covered = np.random.default_rng(1), 0
    values = (random.random((100, 200)) < 0.4).astype(float)  # 200 experiments on 100 problems, each of its own
    for one in estimate(values):
        covered += one.low <= 0.4 <= one.high
    assert 0.91 <= covered / 200 <= 0.985


def test_comparison_with_itself_and_with_the_better() -> None:
    random = np.random.default_rng(2)
    base = records_of(random.random(200) < 0.5)
    same = compare(base, base)[0]
    assert same.difference.to_dict() == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert (same.share_not_better, same.num_better, same.num_worse) == (1.0, 0, 0)
    easier = np.array([record.scores["accuracy"] for record in base])
    better = easier.copy()
    better[np.flatnonzero(easier == 0)[:20]] = 1.0
    better[np.flatnonzero(easier == 1)[:2]] = 0.0
    found = compare(records_of(better), base)[0]
    assert found.difference.mean == pytest.approx(0.09) and (found.num_better, found.num_worse) == (20, 2)
    assert 0 < found.difference.low < 0.09 < found.difference.high and found.share_not_better < 0.001
    back = compare(base, records_of(better))[0]
    assert back.difference.mean == pytest.approx(-0.09) and back.share_not_better > 0.999
    # The same scores, with nothing in common: the pairs no longer help.
    shuffled = compare(records_of(random.permutation(better)), base)[0]
    assert shuffled.difference.mean == pytest.approx(0.09)
    widths = [one.difference.high - one.difference.low for one in (found, shuffled)]
    assert widths[1] > 1.5 * widths[0]


def test_other_problems_are_not_compared() -> None:
    records = records_of([1, 0, 1])
    for others in (records[:2], records_of([[1, 1], [0, 0], [1, 1]]), records_of([1, 0, 1], answer="2")):
        with pytest.raises(ValueError, match="not of the same problems"):
            compare(records, others)
    renamed = [replace(record, scores={"f1": 1.0}) for record in records]
    with pytest.raises(ValueError, match="the metrics differ"):
        compare(records, renamed)


# ---- the command line ----


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_the_command(folders: dict[str, Path], tmp_path: Path) -> None:
    word, output = "variable_assignment:depth=1", tmp_path / "new" / "scores"
    asked = ["--tasks", f"{word},variable_assignment", "--limit", 9, "--max-new-tokens", 5]
    first = run(folders["base"], *asked, "--output", output)
    assert first.exit_code == 0, first.output
    facts = json.loads((output / "scores.json").read_text())
    assert list(facts["tasks"]) == [word, "variable_assignment"] and facts["model"] == "base"
    file = output / "variable_assignment-depth=1.jsonl"
    model, task = load("base", folders), get_reasoning_task("variable_assignment", depth=1)
    problems = task.problems("test", count=9)
    expected = answer_problems(model, tiny_tokenizer(), task, problems, replace(GREEDY, max_new_tokens=5))
    assert timeless(read_answers(file).records) == timeless(expected)
    assert facts["tasks"][word]["metrics"] == summary(expected)["metrics"]
    assert all(name in first.stdout for name in (word, "95 % interval", "greedy, at most 5 new tokens"))

    before = file.read_bytes()
    again = run(folders["base"], *asked, "--output", output, "--batch-size", 3)
    assert again.exit_code == 0 and again.stdout == first.stdout and file.read_bytes() == before

    opened = run(folders["opened"], *asked, "--baseline", output)
    assert opened.exit_code == 0 and "less the baseline" in opened.stdout, opened.output
    refused = [
        (["--output", output], "holds outputs of something else"),
        (["--limit", 4, "--baseline", output], "num_problems: 9 -> 4"),
        (["--tasks", "variable_assignment:depth=3", "--baseline", output], "has no variable_assignment-depth=3.jsonl"),
        (["--tasks", word, "--output", output], "holds something else (variable_assignment.jsonl)"),
        (["--output", file], "is a file"),
    ]
    for arguments, words in refused:
        result = run(folders["opened"], *asked, *arguments)
        assert result.exit_code == 1 and words in result.stderr and result.stdout == "", result.output
    file.write_bytes(before[: before.rfind(b"\n", 0, -1) + 1])
    unfinished = run(folders["opened"], *asked, "--baseline", output)
    assert unfinished.exit_code == 1 and "is not finished" in unfinished.stderr


def test_the_command_draws(folders: dict[str, Path]) -> None:
    asked = ["--tasks", "variable_assignment", "--limit", 3, "--samples", 4, "--temperature", 0.7, "--top-p", 0.9]
    result = run(folders["opened"], *asked, "--solver", "exact", "--seed", 5)
    assert result.exit_code == 0 and "4 outputs of each problem, temperature 0.7, top_p 0.9, seed 5" in result.stdout
    assert all(f"pass@{k}" in result.stdout for k in (1, 2, 4)) and "solver sequential" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--tasks", "variable_asignment"], 1, "Did you mean 'variable_assignment'"),
        (["--tasks", "variable_assignment:dept=2"], 1, "Did you mean 'depth'"),
        (["--tasks", "variable_assignment:depth"], 1, "write variable_assignment:key=value"),
        (["--tasks", "variable_assignment:depth=two"], 1, "two"),
        (["--tasks", "variable_assignment,piqa"], 1, "commands of their own"),
        (["--tasks", "gsm8k,variable_asignment"], 1, "Did you mean 'variable_assignment'"),
        (["--tasks", "variable_assignment", "--solver", "exakt"], 1, "Did you mean 'exact'"),
        (["--tasks", "variable_assignment", "--data", "."], 1, "makes its problems itself"),
        (["--tasks", "variable_assignment", "--baseline", "nowhere"], 1, "has no variable_assignment.jsonl"),
        (["--tasks", "variable_assignment", "--samples", "2"], 2, "--samples needs a --temperature"),
        (["--tasks", "variable_assignment", "--seed", "1"], 2, "--seed needs a --temperature"),
        (["--tasks", "piqa", "--split", "test"], 2, "--split has no effect on zero-shot tasks"),
        (["--temperature", "0.5"], 2, "--temperature has no effect on zero-shot tasks"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], code: int, words: str, folders: dict[str, Path]) -> None:
    result = run(folders["base"], *arguments)
    assert result.exit_code == code and result.stdout == ""
    assert words in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


# ---- a released model ----


@pytest.fixture(scope="module")
def released(smollm2_folder: Path, smollm2_tokenizer: Any) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer."""
    return load_base(str(smollm2_folder)), smollm2_tokenizer


@pytest.mark.parametrize("name", ["gsm8k", "math500"])
def test_a_released_model_is_scored_as_by_its_own_generate(name: str, released: tuple[Any, Any]) -> None:
    """Untouched, and with a fresh recurrence."""
    if "CROSSCURRENT_TEST_DATA" not in os.environ:
        pytest.skip("CROSSCURRENT_TEST_DATA is not set")
    base, tokenizer = released
    task = get_reasoning_task(name)
    problems = task.problems("test", data=Path(os.environ["CROSSCURRENT_TEST_DATA"]), count=2)
    expected = [by_hand(base, tokenizer, task, problem, max_new_tokens=4) for problem in problems]
    settings = AnsweringSettings(batch_size=2, max_new_tokens=4)
    for model in (base, cc.retrofit(base, layer_start=12, layer_end=18)):
        found = answer_problems(model, tokenizer, task, problems, settings)
        assert [(record.output, record.scores) for record in found] == expected


def by_hand(base: Any, tokenizer: Any, task: ReasoningTask, problem: Any, max_new_tokens: int) -> Any:
    messages = [{"role": "user", "content": task.message(problem)}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = base.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    output = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return output, task.judge(problem, output).scores
