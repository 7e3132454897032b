"""lm-evaluation-harness scores recurrent models with its own Hugging Face model, once crosscurrent is imported."""

import json
import os
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
import yaml
from lm_eval import evaluator
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import crosscurrent as cc
from tests.subjects import largest_difference, moved
from tests.tiny_base import CHARACTERS

BOS, EOS = len(CHARACTERS), len(CHARACTERS) + 1
NUM_QUESTIONS = 5
CHOICES = {
    "task": "tiny_choices",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{stem}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "target",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITTEN = {
    "task": "tiny_written",
    "output_type": "generate_until",
    "doc_to_text": "Question: {{stem}}\nAnswer:",
    "doc_to_target": "{{choices[target]}}",
    "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match"}],
}
ROLLING = {
    "task": "tiny_rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "stem",
    "metric_list": [{"metric": "byte_perplexity"}],
}
TASKS: list[str] = [str(task["task"]) for task in (CHOICES, WRITTEN, ROLLING)]


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on the first questions of ARC easy."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = (Path(os.environ["CROSSCURRENT_TEST_DATA"]) / "arc_easy_test.jsonl").read_text().splitlines()
    questions = [json.loads(line) for line in lines[:NUM_QUESTIONS]]
    documents = [
        {
            "stem": question["question"]["stem"],
            "choices": [choice["text"] for choice in question["question"]["choices"]],
            "target": [choice["label"] for choice in question["question"]["choices"]].index(question["answerKey"]),
        }
        for question in questions
    ]
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    for task in (CHOICES, WRITTEN, ROLLING):
        source = {"data_files": {"test": str(folder / "questions.jsonl")}, "cache_dir": str(folder / "cache")}
        common = {"dataset_path": "json", "dataset_kwargs": source, "test_split": "test"}
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task | common))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Single characters, with <s> put in front as Llama's tokenizers do."""
    vocabulary = {character: index for index, character in enumerate([*CHARACTERS, "<s>", "</s>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = "{{ bos_token }}{% for message in messages %}Q: {{ message['content'] }}\nA: {% endfor %}"
    return fast


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def make_model(**settings: Any) -> Any:
    """Gates open, in float32."""
    model = cc.retrofit(make_base(), 1, 3, **settings)
    moved(model.fusion)
    moved(model.carry)
    return model.float()


def wrapped(model: Any, tokenizer: Any, batch_size: int = 4, **settings: Any) -> Any:
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **settings)


def evaluated(model: Any, tasks_folder: Path) -> dict[str, Any]:
    """The harness's results, and the answers that they were made of."""
    manager = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    found = evaluator.simple_evaluate(
        model=model, tasks=TASKS, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    answers = {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}
    return {"results": found["results"], "answers": answers}


def requests(*arguments: tuple[Any, ...], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=given, idx=index) for index, given in enumerate(arguments)]


PAIRS = [
    ("Question: which?\nAnswer:", " the first"),
    ("", "nothing before it"),
    ("Short", " x"),
    ("A much longer context than any of the others has, so that they are padded", " and an answer"),
    ("Short", " y"),
    ("a", "b"),
    ("Why do tides rise and fall?", " The moon"),
    ("Why do tides rise and fall?", " Whales breathe in, and out"),
]


def by_definition(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    context_ids = tokenizer(context)["input_ids"]
    ids = torch.tensor([context_ids + tokenizer(continuation, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        scores = model(ids, solver=cc.Sequential()).logits.log_softmax(dim=-1)[0, :-1]
    return scores.gather(1, ids[0, 1:, None])[len(context_ids) - 1 :].sum().item()


def test_a_fresh_retrofit_scores_as_its_base_to_the_last_digit(tokenizer: Any, tasks_folder: Path) -> None:
    base = make_base()
    expected = evaluated(wrapped(base, tokenizer), tasks_folder)
    assert evaluated(wrapped(cc.retrofit(base, 1, 3), tokenizer), tasks_folder) == expected
    assert set(expected["results"]) == set(TASKS)
    changed = evaluated(wrapped(make_model(), tokenizer), tasks_folder)
    assert all(changed["answers"][name] != expected["answers"][name] for name in TASKS)


def test_scores_do_not_depend_on_the_batch_size(tokenizer: Any, record_figures: Any) -> None:
    model = make_model(solver=cc.Sequential())
    found: dict[Any, Tensor] = {}
    for batch_size in (1, 3, 8):
        answers = wrapped(model, tokenizer, batch_size).loglikelihood(requests(*PAIRS), disable_tqdm=True)
        found[batch_size] = torch.tensor([score for score, _ in answers], dtype=torch.float64)
    found["by definition"] = torch.tensor([by_definition(model, tokenizer, *pair) for pair in PAIRS]).double()
    for scores in found.values():  # sums of up to 140: one unit in the last place of float32 is 1.5e-5 there
        assert ((scores - found[1]) / found[1]).abs().max() < 1e-6
    rough = [
        torch.tensor([score for score, _ in wrapped(model.bfloat16(), tokenizer, size).loglikelihood(requests(*PAIRS))])
        for size in (1, 3, 8)
    ]
    spread = (torch.stack(rough) / rough[0] - 1).abs().max().item()
    record_figures("loglikelihoods at batch sizes 1, 3, 8, relative", {"bfloat16": spread})
    assert spread < 0.05


def test_one_token_continuations_share_their_context(tokenizer: Any) -> None:
    """The harness scores " A" and " B" after one context by one call."""
    model = make_model(solver=cc.Sequential())
    pairs = [("Which one is it?", letter) for letter in "ABCD"] + [("Or this", "A")]
    found = wrapped(model, tokenizer).loglikelihood(requests(*pairs), disable_tqdm=True)
    expected = torch.tensor([by_definition(model, tokenizer, *pair) for pair in pairs])
    assert largest_difference(torch.tensor([score for score, _ in found]), expected) < 1e-5


def test_rolling(tokenizer: Any) -> None:
    model = make_model(solver=cc.Sequential())
    texts = [("What flows against the current?",), ("Hi",), ("A longer text, to be read in windows",)]
    for batch_size in (1, 3):
        lm = wrapped(model, tokenizer, batch_size, add_bos_token=False)
        found = lm.loglikelihood_rolling(requests(*texts, kind="loglikelihood_rolling"), disable_tqdm=True)
        expected = [by_definition(model, tokenizer, "", text) for (text,) in texts]
        assert largest_difference(torch.tensor(found), torch.tensor(expected)) < 1e-4


def test_generation_with_stop_sequences(tokenizer: Any) -> None:
    """In a batch as alone, and as `generate` does it; cut before the first stop sequence."""
    model = make_model()
    prompts = ["What flows against the current?", "Hi", "A longer prompt, to be padded against"]
    whole = []
    for prompt in prompts:
        batch = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        said = model.generate(**batch, do_sample=False, max_new_tokens=12)
        whole.append(tokenizer.decode(said[0, batch["input_ids"].shape[1] :], skip_special_tokens=True))
    until = [whole[0][5:7], whole[1][3]]
    options = {"until": until, "max_gen_toks": 12}
    expected = [text.split(until[0])[0].split(until[1])[0] for text in whole]
    assert expected[0] != whole[0] and expected[1] != whole[1]
    for batch_size in (1, 2, 3):
        lm = wrapped(model, tokenizer, batch_size)
        asked = requests(*((prompt, dict(options)) for prompt in prompts), kind="generate_until")
        assert lm.generate_until(asked, disable_tqdm=True) == expected


@pytest.mark.parametrize("add_bos_token", [None, True])
def test_exactly_one_bos(tokenizer: Any, add_bos_token: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped(make_model(), tokenizer, batch_size=1, add_bos_token=add_bos_token)
    read: list[list[int]] = []
    forward = lm.model.forward

    @wraps(forward)
    def spy(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        read.extend(input_ids.tolist())
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(lm.model, "forward", spy)
    lm.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    message = [{"role": "user", "content": "Why?"}]
    chat = lm.apply_chat_template(message)
    assert chat.startswith("<s>")  # as chat templates do
    lm.loglikelihood(requests((chat, "Because")), disable_tqdm=True)
    assert len(read) >= len(PAIRS)
    assert all(ids[0] == BOS and ids.count(BOS) == 1 for ids in read)
    read.clear()
    lm.generate_until(requests((chat, {"until": ["\n"], "max_gen_toks": 1}), kind="generate_until"), disable_tqdm=True)
    assert read[0][0] == BOS and read[0].count(BOS) == 1
    read.clear()  # rolling puts a prefix token in front itself, before what the tokenizer adds
    lm.add_bos_token = False
    lm.loglikelihood_rolling(requests(("A text",), kind="loglikelihood_rolling"), disable_tqdm=True)
    assert read[0][0] == BOS and read[0].count(BOS) == 1


# ---- which solver scores ----


def test_the_solver_is_the_models_setting(tokenizer: Any, tmp_path: Path) -> None:
    """Set on the model, in the saved configuration, or when loading."""
    rough, exact = cc.Jacobi(iterations=1, backward_iterations=1), cc.Sequential()
    model = make_model(solver=rough)
    expected = by_definition(model, tokenizer, *PAIRS[3])

    def score(lm: Any) -> float:
        return lm.loglikelihood(requests(PAIRS[3]), disable_tqdm=True)[0][0]

    lm = wrapped(model, tokenizer)
    assert abs(score(lm) - expected) > 1e-3
    model.config.solver = exact
    assert score(lm) == pytest.approx(expected, rel=1e-6)
    model.config.solver = rough
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    assert isinstance(loaded.model, cc.T2MLRForCausalLM)
    assert score(loaded) == pytest.approx(score(lm), rel=1e-6) != pytest.approx(expected, rel=1e-6)
    chosen = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2, solver={"name": "sequential"})
    assert score(chosen) == pytest.approx(expected, rel=1e-6)


def test_solver_of_a_generation(tokenizer: Any) -> None:
    model = make_model(solver=cc.Jacobi(iterations=1, backward_iterations=1))
    prompts = [context for context, _ in PAIRS if context]
    said = []
    for solver in ({}, {"solver": {"name": "sequential"}}):
        options = {"until": ["\n"], "max_gen_toks": 12, **solver}
        asked = requests(*((prompt, dict(options)) for prompt in prompts), kind="generate_until")
        said.append(wrapped(model, tokenizer).generate_until(asked, disable_tqdm=True))
    model.config.solver = cc.Sequential()
    options.pop("solver")
    asked = requests(*((prompt, dict(options)) for prompt in prompts), kind="generate_until")
    assert said[1] == wrapped(model, tokenizer).generate_until(asked, disable_tqdm=True) != said[0]


# ---- the command line ----


def test_from_the_command_line(
    tokenizer: Any, tasks_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -c "import crosscurrent; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" run --model hf ...`"""
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    exact = json.dumps({"pretrained": str(tmp_path / "model"), "solver": {"name": "sequential"}})
    arguments = ["run", "--model", "hf", "--model_args", exact, "--device", "cpu", "--batch_size", "3"]
    arguments += ["--tasks", *TASKS, "--include_path", str(tasks_folder), "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # asks pip and git, for long
    own_tasks = partial(TaskManager, include_defaults=False)  # reading the harness's own thousands takes long, too
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own_tasks)
    cli_evaluate()
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    model.config.solver = cc.Sequential()
    expected = evaluated(wrapped(model, tokenizer, 3), tasks_folder)["results"]
    for task, metric in (
        ("tiny_choices", "acc,none"),
        ("tiny_written", "exact_match,none"),
        ("tiny_rolling", "byte_perplexity,none"),
    ):
        assert found[task][metric] == pytest.approx(expected[task][metric], rel=1e-6)
