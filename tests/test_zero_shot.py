"""Zero-shot evaluation: the adapter for lm-evaluation-harness, its tasks from local files, and `crosscurrent evaluate`."""

import json
import os
import warnings
from functools import wraps
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli.main import app
from crosscurrent.evaluation.harness import CrosscurrentLM
from crosscurrent.evaluation.zero_shot import LOCAL_FILES, TASKS, load_tasks, mean_score, score_tasks
from crosscurrent.recurrence import solver_from_dict, solver_to_dict
from tests import test_lm_eval as harness_tests
from tests.subjects import SUBJECTS, VOCAB, make_t2mlr
from tests.test_lm_eval import PAIRS, make_base, make_model, requests
from tests.tiny_base import save_tiny_base

llama_tokenizer = harness_tests.tokenizer
ROUGH = cc.Jacobi(iterations=1, backward_iterations=1)
JACOBI = {"name": "jacobi", "iterations": 2, "backward_iterations": 1}


@pytest.fixture(scope="module")
def folder(llama_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A retrofit with open gates, whose configured solver is not enough, and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "opened"
    make_model(solver=ROUGH).save_pretrained(folder)
    llama_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data() -> Path:
    """The published files."""
    if "CROSSCURRENT_TEST_DATA" not in os.environ:
        pytest.skip("CROSSCURRENT_TEST_DATA is not set")
    return Path(os.environ["CROSSCURRENT_TEST_DATA"])


# ---- the adapter ----

TOKEN_IDS = [
    (list(range(1, 1 + num_context)), [(7 * place + num_context) % (VOCAB - 1) + 1 for place in range(num_answer)])
    for num_context, num_answer in ((3, 2), (11, 4), (1, 1), (6, 5), (2, 1), (9, 1), (9, 3), (14, 2), (5, 5))
]


def scored(model: Any, tokenizer: Any, batch_size: int, **settings: Any) -> Tensor:
    """Log-likelihoods of all answers in TOKEN_IDS."""
    lm = CrosscurrentLM(model, tokenizer=tokenizer, batch_size=batch_size, **settings)
    asked = [((str(context), str(answer)), context, answer) for context, answer in TOKEN_IDS]
    return torch.tensor([score for score, _ in lm._loglikelihood_tokens(asked, disable_tqdm=True)])


def by_definition(model: Any, **settings: Any) -> Tensor:
    found = []
    for context, answer in TOKEN_IDS:
        with torch.no_grad():
            logits = model(torch.tensor([context + answer]), **settings).logits[0].log_softmax(dim=-1)
        places = range(len(context) - 1, len(context) + len(answer) - 1)
        found.append(sum(logits[place, token].item() for place, token in zip(places, answer, strict=True)))
    return torch.tensor(found)


def make_lstm() -> Any:
    return cc.LSTMForCausalLM(cc.LSTMConfig(vocab_size=VOCAB, hidden_size=12)).eval()


@pytest.mark.parametrize("solver", ["exact", "configured", JACOBI])
@pytest.mark.parametrize("name", ["t2mlr_llama", "t2mlr_interval", "rlt1", "rlt2"])
def test_scores_are_the_solvers_at_every_batch_size(name: str, solver: Any, llama_tokenizer: Any) -> None:
    model = SUBJECTS[name]().float()
    model.config.solver = ROUGH
    chosen = {"exact": cc.Sequential(), "configured": ROUGH}.get(str(solver), cc.Jacobi(2, 1))
    expected = by_definition(model, solver=chosen)
    for batch_size in (1, 3, 8):
        found = scored(model, llama_tokenizer, batch_size, solver=solver)
        assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())
    assert solver_from_dict(model.config.solver) == ROUGH  # the model is left as it was
    if solver == "exact":
        assert (expected - by_definition(model, solver=ROUGH)).abs().max() > 1e-2


def test_an_lstm_and_a_plain_model(llama_tokenizer: Any) -> None:
    for model in (make_lstm(), make_base()):
        for batch_size in (1, 3, 8):
            found = scored(model, llama_tokenizer, batch_size)
            assert (found - by_definition(model)).abs().max() < 1e-4
        with pytest.warns(UserWarning, match="no effect"):
            lm = CrosscurrentLM(model, "exact", tokenizer=llama_tokenizer)
        assert lm.solver is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CrosscurrentLM(model, tokenizer=llama_tokenizer)


def test_generation_with_the_chosen_solver(llama_tokenizer: Any) -> None:
    model = make_model(solver=ROUGH)
    asked = [(context, {"until": ["\n"], "max_gen_toks": 12}) for context, _ in PAIRS if context]
    found = {
        solver: CrosscurrentLM(model, solver, tokenizer=llama_tokenizer, batch_size=4).generate_until(
            requests(*asked, kind="generate_until"), disable_tqdm=True
        )
        for solver in ("exact", "configured")
    }
    model.config.solver = cc.Sequential()
    expected = HFLM(model, tokenizer=llama_tokenizer, batch_size=4)
    assert found["exact"] == expected.generate_until(requests(*asked, kind="generate_until"), disable_tqdm=True)
    assert found["exact"] != found["configured"]


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_bos_is_put_where_the_harness_puts_it(
    llama_tokenizer: Any, add_bos_token: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base()
    read: list[list[int]] = []
    forward = base.forward

    @wraps(forward)
    def spy(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        read.extend(input_ids.tolist())
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(base, "forward", spy)
    seen = []
    for kind in (HFLM, CrosscurrentLM):
        lm = kind(base, tokenizer=llama_tokenizer, batch_size=1, add_bos_token=add_bos_token)
        pairs = [*PAIRS, (lm.apply_chat_template([{"role": "user", "content": "Why?"}]), "Because")]
        read.clear()
        lm.loglikelihood(requests(*pairs), disable_tqdm=True)
        seen.append(list(read))
    assert seen[0] == seen[1] and len(seen[0]) >= len(PAIRS)
    if add_bos_token is not False:
        assert all(ids.count(harness_tests.BOS) == 1 and ids[0] == harness_tests.BOS for ids in seen[1])


def test_from_a_folder_by_the_harness_own_ways(folder: Path) -> None:
    settings = {"pretrained": str(folder), "solver": json.dumps(JACOBI)}
    lm = get_model("crosscurrent").create_from_arg_obj(settings, {"batch_size": 2})
    assert isinstance(lm.model, cc.T2MLRForCausalLM)
    assert lm.get_model_info()["solver"] == solver_to_dict(cc.Jacobi(2, 1))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.solver = cc.Jacobi(2, 1)
    expected = HFLM(model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=2)
    found = [each.loglikelihood(requests(*PAIRS[2:]), disable_tqdm=True) for each in (lm, expected)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        ("exakt", "Did you mean 'exact'"),
        ("{name: jacobi}", "is not JSON"),
        ({"name": "jacoby"}, "Did you mean 'jacobi'"),
        ({"name": "jacobi", "iteration": 3}, "Did you mean 'iterations'"),
    ],
)
def test_mistakes_in_a_solver_are_named(solver: Any, words: str, llama_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=words):
        CrosscurrentLM(make_t2mlr("llama"), solver, tokenizer=llama_tokenizer)


def test_a_model_without_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match="ForCausalLM comes without a tokenizer"):
        CrosscurrentLM(make_t2mlr("llama"))


def test_a_tokenizer_without_a_first_token_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a BOS nor an EOS token"):
        CrosscurrentLM(str(save_tiny_base(tmp_path)), device="cpu")


# ---- tasks ----

# What the hub's data sets hold, written by hand, and the same as it lies in local files.
ARC = (
    {
        "id": "Mercury_1",
        "question": "Which is a mammal?",
        "choices": {"text": ["a trout", "a bat", "a newt"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
    {
        "id": "Mercury_1",
        "question": {
            "stem": "Which is a mammal?",
            "choices": [
                {"text": "a trout", "label": "1"},
                {"text": "a bat", "label": "2"},
                {"text": "a newt", "label": "3"},
            ],
        },
        "answerKey": "2",
    },
)
ENDINGS = ["cuts  it [substeps] in two.", "sings.", "leaves.", "sleeps."]
EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "arc_easy": [ARC],
    "arc_challenge": [ARC],
    "hellaswag": [
        (
            {
                "ind": 4,
                "activity_label": "Baking bread",
                "ctx_a": "A man kneads dough. [title] Next",
                "ctx_b": "the Man",
                "ctx": "A man kneads dough. [title] Next the Man",
                "endings": ENDINGS,
                "source_id": "x",
                "split": "val",
                "split_type": "indomain",
                "label": "0",
            },
            {
                "ind": 4,
                "activity_label": "Baking bread",
                "ctx_a": "A man kneads dough. [title] Next",
                "ctx_b": "the Man",
                "ctx": "A man kneads dough. [title] Next the Man",
                "split": "val",
                "split_type": "indomain",
                "label": 0,
                "endings": ENDINGS,
                "source_id": "x",
            },
        )
    ],
    "piqa": [
        (
            {"goal": "Open a jar", "sol1": "Hit it.", "sol2": "Turn the lid. ", "label": 1},
            {"goal": "Open a jar", "sol1": "Hit it.", "sol2": "Turn the lid. "},
        )
    ],
    "winogrande": [
        (
            {
                "sentence": "Mary owed Maria, so _ paid at once.",
                "option1": "Mary",
                "option2": "Maria",
                "answer": "1",
            },
            {
                "context_options": ["Mary owed Maria, so Mary", "Mary owed Maria, so Maria"],
                "continuation": "paid at once.",
                "gold": 0,
            },
        ),
        (
            {
                "sentence": "The car hit the wall and _'s colour came off.",
                "option1": "the car",
                "option2": "the wall",
                "answer": "2",
            },
            {
                "context_options": ["The car hit the wall and the car", "The car hit the wall and the wall"],
                "continuation": "'s colour came off.",
                "gold": 1,
            },
        ),
        (
            {"sentence": "_ is older than Ann.", "option1": "Bob", "option2": "Cy", "answer": "2"},
            {"context_options": ["Bob", "Cy"], "continuation": "is older than Ann.", "gold": 1},
        ),
    ],
}


def write_local(folder: Path) -> Path:
    for task, examples in EXAMPLES.items():
        lines = [json.dumps(local) for _, local in examples]
        (folder / LOCAL_FILES[task].name).write_text("\n".join(lines) + "\n")
    (folder / "piqa_valid_labels.lst").write_text("1\n")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The hub's data sets with the rows written above in every split; which of them were asked for."""
    asked: list[tuple[str, str | None]] = []
    rows = {
        ("allenai/ai2_arc", "ARC-Easy"): [ARC[0]],
        ("allenai/ai2_arc", "ARC-Challenge"): [ARC[0]],
        ("Rowan/hellaswag", None): [hub for hub, _ in EXAMPLES["hellaswag"]],
        ("baber/piqa", None): [hub for hub, _ in EXAMPLES["piqa"]],
        ("allenai/winogrande", "winogrande_xl"): [hub for hub, _ in EXAMPLES["winogrande"]],
        ("allenai/openbookqa", "main"): [
            {"question_stem": "Ice is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "B"}
        ],
        ("aps/super_glue", "boolq"): [{"passage": "Ice is cold.", "question": "is ice hot", "label": 0}],
    }

    def load_dataset(path: str, name: str | None = None, **_: Any) -> dict[str, Dataset]:
        asked.append((path, name))
        return {split: Dataset.from_list(rows[path, name]) for split in ("train", "validation", "test")}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def prompts(task: Any) -> list[Any]:
    """All that is asked of a model, with the right answers."""
    task.build_all_requests(rank=0, world_size=1)
    return [(request.args, request.doc_id, task.doc_to_target(request.doc)) for request in task.instances]


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_local_prompts_are_those_of_the_hub(task: str, hub: Any, tmp_path: Path) -> None:
    local = load_tasks([task], write_local(tmp_path))[task]
    assert hub == []
    original = load_tasks([task])[task]
    assert len(hub) == 1
    assert prompts(local) == prompts(original)
    for row, other in zip(local.eval_docs, original.eval_docs, strict=True):
        assert local.doc_to_text(row) == original.doc_to_text(other)
        assert local.doc_to_choice(row) == original.doc_to_choice(other)
    right = [(-1.0, False), (-1.0, False), (-1.0, False), (-1.0, False)][: len(local.doc_to_choice(local.eval_docs[0]))]
    for place in range(len(right)):
        answers = [(0.0, True) if place == other else score for other, score in enumerate(right)]
        found = [each.process_results(each.eval_docs[0], answers) for each in (local, original)]
        assert found[0] == found[1]


def test_the_suite_is_the_harness_own_from_the_hub(hub: Any, folder: Path) -> None:
    tasks = load_tasks(list(TASKS))
    assert list(tasks) == list(TASKS) and len(hub) == 7
    found = score_tasks(CrosscurrentLM(str(folder), batch_size=4, device="cpu"), tasks)
    assert {name: scores.metric for name, scores in found.items()} == dict.fromkeys(TASKS, "acc_norm") | {
        "winogrande": "acc",
        "boolq": "acc",
    }
    expected = [each.scores.get("acc_norm", each.scores["acc"]) for each in found.values()]
    assert mean_score(found) == pytest.approx(sum(expected) / 7)
    assert found["winogrande"].num_examples == 3 and found["winogrande"].standard_errors["acc"] is not None
    assert found["boolq"].num_examples == 1 and found["boolq"].standard_errors == {"acc": None}


def test_the_published_files(data: Path) -> None:
    tasks = load_tasks(list(LOCAL_FILES), data)
    counts = {name: len(task.eval_docs) for name, task in tasks.items()}
    assert counts == {"arc_easy": 2376, "arc_challenge": 1170, "hellaswag": 1000, "piqa": 1838, "winogrande": 1267}
    rows = [json.loads(line) for line in (data / "winogrande_dev.jsonl").read_text().splitlines()]
    task = tasks["winogrande"]
    for row, doc in zip(rows, task.eval_docs, strict=True):
        assert task.doc_to_choice(doc) == row["context_options"] and task.doc_to_target(doc) == row["continuation"]
        assert task.doc_to_text(doc) == row["gold"]


@pytest.mark.parametrize(
    ("task", "line", "words"),
    [
        ("arc_easy", "{", "line 1 is not JSON"),
        ("arc_easy", "[]", "line 1 is not a JSON object"),
        ("arc_easy", "", "holds no examples"),
        ("arc_easy", json.dumps({"id": "a", "question": "Which?", "answerKey": "A"}), "not laid out"),
        ("arc_easy", json.dumps(ARC[1] | {"answerKey": "D"}), "answerKey 'D' is not one of"),
        ("hellaswag", json.dumps({"ctx": "A man", "label": 1, "endings": ["sits.", "goes."]}), "no field 'activity_"),
        ("hellaswag", json.dumps({"label": 4, "endings": ENDINGS}), "label 4 is not one of 4 endings"),
        ("piqa", "\n".join([json.dumps(EXAMPLES["piqa"][0][1])] * 2), "holds 1 labels for the 2 of piqa_valid.jsonl"),
        ("winogrande", json.dumps({"context_options": ["a"], "continuation": "b", "gold": 0}), "not laid out"),
        ("winogrande", json.dumps({"context_options": ["a", "b"], "continuation": "b", "gold": "1"}), "gold '1' is"),
    ],
)
def test_mistakes_in_files_are_named(task: str, line: str, words: str, tmp_path: Path) -> None:
    (write_local(tmp_path) / LOCAL_FILES[task].name).write_text(line)
    with pytest.raises(ValueError, match=words) as caught:
        load_tasks([task], tmp_path)
    assert LOCAL_FILES[task].name in str(caught.value)


# ---- the command line ----


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_help_teaches_by_example() -> None:
    result = run("--help")
    assert result.exit_code == 0 and "Example: crosscurrent evaluate" in result.stdout
    assert all(task in result.stdout for task in TASKS)


def test_the_command_writes_scores_and_examples(folder: Path, data: Path, tmp_path: Path) -> None:
    names = ["piqa", "winogrande"]
    output = tmp_path / "new" / "scores"
    result = run(
        folder, "--tasks", ",".join(names), "--data", data, "--limit", 4, "--batch-size", 3, "--solver", "exact",
        "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lm = CrosscurrentLM(str(folder), "exact", batch_size=5, device="cpu")
    expected = score_tasks(lm, load_tasks(names, data), limit=4)
    facts = json.loads((output / "scores.json").read_text())
    assert sorted(path.name for path in output.iterdir()) == ["piqa.jsonl", "scores.json", "winogrande.jsonl"]
    assert facts["solver"] == solver_to_dict(cc.Sequential()) and facts["model"] == "opened" and facts["limit"] == 4
    for name, scores in expected.items():
        found = facts["tasks"][name]
        assert {metric: found[metric] for metric in scores.scores} == scores.scores
        assert found["acc_stderr"] == scores.standard_errors["acc"]
        assert (found["num_examples"], found["data"]["file"]) == (4, LOCAL_FILES[name].name)
        records = [json.loads(line) for line in (output / f"{name}.jsonl").read_text().splitlines()]
        assert [record["doc_id"] for record in records] == [0, 1, 2, 3]
        for record, example in zip(records, scores.examples, strict=True):
            assert record["loglikelihoods"] == pytest.approx(example["loglikelihoods"], rel=1e-5)
            assert record["doc_hash"] == example["doc_hash"] and record["acc"] == example["acc"]
        assert f"{scores.scores['acc']:.2%}" in result.stdout
    assert f"mean {facts['mean']:.2%}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "arc_eazy"], "Did you mean 'arc_easy'"),
        (["--tasks", "boolq", "--data", "."], "no local form of boolq"),
        (["--tasks", "piqa", "--data", "nowhere"], "nowhere/piqa_valid.jsonl"),
        (["--tasks", "piqa"], "could not be read from the hub"),
        (["--tasks", "piqa", "--solver", "exakt"], "Did you mean 'exact'"),
        (["--output", str(Path(__file__).parent)], "tests is there already"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], words: str, folder: Path) -> None:
    result = run(folder, *arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert words in result.stderr and "Traceback" not in result.stderr


def test_a_folder_without_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    output = tmp_path / "scores"
    result = run(tmp_path / "bare", "--tasks", "piqa", "--data", write_local(tmp_path), "--output", output)
    assert result.exit_code == 1 and "no tokenizer in" in result.stderr and "bare" in result.stderr
    assert not output.exists()
