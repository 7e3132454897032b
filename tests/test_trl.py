"""TRL's trainers. They leave out a model's `forward` and apply the head themselves to what `model.base_model` returns, so
that is where the recurrence must be."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import crosscurrent as cc
from crosscurrent.data.collation import AnswerRecurrence, PaddingCollator
from crosscurrent.training.adapters import lora_config
from crosscurrent.training.answers import recur_on_answers
from tests.subjects import VOCAB, cache_of, largest_difference, make_base, make_t2mlr, token_ids

PAD, EOS = 0, 2
TEXTS = ["w3 w4 w5 w6 w7", "w8 w9 w10", "w11 w12 w13 w14", "w5 w15 w3 w20 w7 w30 w31"]
ANSWERED = [
    {"prompt": "w3 w4", "completion": " w5 w6 w7"},
    {"prompt": "w8 w9 w10", "completion": " w11"},
    {"prompt": "w12", "completion": " w13 w14 w15 w16 w17"},
]
SHARED: dict[str, Any] = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "max_length": 16},
    "padding_free": {"padding_free": True, "max_length": None},
}
SOLVERS = {"sequential": cc.Sequential(), "jacobi": cc.Jacobi(3, 2)}

for_each_layout = pytest.mark.parametrize("layout", LAYOUTS)
for_each_solver = pytest.mark.parametrize("solver", SOLVERS)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<s>": 1, "</s>": EOS} | {f"w{index}": index for index in range(3, VOCAB)}
    model = Tokenizer(WordLevel(words, "<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="</s>")


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def sft(model: Any, folder: Path, examples: list[dict[str, Any]], peft_config: Any = None, **settings: Any) -> Any:
    settings = {"per_device_train_batch_size": len(examples), **SHARED, **settings}
    return SFTTrainer(
        model,
        SFTConfig(str(folder), **settings),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def first_batch(trainer: Any) -> dict[str, Any]:
    return dict(next(iter(trainer.get_train_dataloader())))


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def loss_of_documents(model: Any, documents: list[tuple[list[int], list[int]]], **inputs: Any) -> Tensor:
    """Mean over all answer tokens of documents (prompt, answer), each computed by a direct call of its own. The first
    token of a document has no predecessor."""
    total, count = torch.tensor(0.0), 0
    for prompt, answer in documents:
        ids = torch.tensor([prompt + answer])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        masks = {"recurrent_mask": (labels != -100).long()} if inputs.get("answers_only") else {}
        counted = len(answer) - (not prompt)
        total = total + type(model).forward(model, ids, labels=labels, **masks).loss * counted
        count += counted
    return total / count


@for_each_layout
@for_each_solver
def test_sft_loss_and_gradients_are_those_of_the_documents_alone(layout: str, solver: str, tmp_path: Path) -> None:
    model: Any = make_t2mlr("llama", solver=SOLVERS[solver]).float()
    trainer = sft(model, tmp_path, [{"text": text} for text in TEXTS], **LAYOUTS[layout])
    batch = first_batch(trainer)
    assert batch["input_ids"].shape[0] == (len(TEXTS) if layout == "padded" else 1)
    if layout != "padded":  # documents are told by positions that restart, and by nothing else that we read
        assert "attention_mask" not in batch and (batch["position_ids"] == 0).sum() == len(TEXTS)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    found = gradients_of(model, loss)
    expected = loss_of_documents(model, [([], [*ids_of(text), EOS]) for text in TEXTS])
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert largest_difference(found, gradients_of(model, expected)) < 1e-4
    assert {n for n in found if n.startswith(("fusion.", "carry."))} == model.new_weight_names()
    if layout != "padded":  # and it is seen that documents are kept apart
        one = {name: batch[name] for name in ("input_ids", "labels")}
        assert abs(trainer.compute_loss(model, one | {"attention_mask": torch.ones_like(one["labels"])}) - loss) > 1e-3


@for_each_layout
def test_answers_alone_can_be_recurrent(layout: str, tmp_path: Path) -> None:
    """The completion mask of a prompt-completion data set becomes the recurrent mask."""
    model: Any = make_t2mlr("llama", solver=cc.Sequential(), prompt_recurrence=False).float()
    trainer = sft(model, tmp_path, ANSWERED, completion_only_loss=True, **LAYOUTS[layout])
    with pytest.raises(ValueError, match=r"prompts are not recurrent.*AnswerRecurrence"):
        trainer.compute_loss(model, first_batch(trainer))
    trainer.data_collator = AnswerRecurrence(trainer.data_collator)
    loss = trainer.compute_loss(model, first_batch(trainer)).item()
    documents = [(ids_of(row["prompt"]), [*ids_of(row["completion"]), EOS]) for row in ANSWERED]
    expected = loss_of_documents(model, documents, answers_only=True).item()
    assert loss == pytest.approx(expected, abs=1e-5)
    assert abs(loss_of_documents(model, documents).item() - expected) > 1e-3


def test_completion_only_loss_with_recurrent_prompts(tmp_path: Path) -> None:
    model: Any = make_t2mlr("llama", solver=cc.Jacobi(3, 2)).float()
    trainer = sft(model, tmp_path, ANSWERED, completion_only_loss=True)
    documents = [(ids_of(row["prompt"]), [*ids_of(row["completion"]), EOS]) for row in ANSWERED]
    loss = trainer.compute_loss(model, first_batch(trainer)).item()
    assert loss == pytest.approx(loss_of_documents(model, documents).item(), abs=1e-5)


def test_a_mask_in_the_data_reaches_the_model(tmp_path: Path) -> None:
    """SFTTrainer keeps none but its own columns unless it is told to; the collator says so."""
    examples = [
        {"input_ids": [3, 4, 5, 6], "recurrent_mask": [0, 1, 0, 1], "segment_ids": [0, 0, 1, 1]},
        {"input_ids": [7, 8], "recurrent_mask": [0, 1], "segment_ids": [0, 0]},
    ]
    model: Any = make_t2mlr("llama", solver=cc.Sequential()).float()
    columns = ("recurrent_mask", "segment_ids")
    for keeps_all in (False, True):
        trainer = sft(model, tmp_path, examples, remove_unused_columns=not keeps_all)
        trainer.data_collator = PaddingCollator(PAD, required=columns)
        if not keeps_all:
            with pytest.raises(ValueError, match="remove_unused_columns=False"):
                first_batch(trainer)
    batch = first_batch(trainer)
    batch["labels"][batch["segment_ids"].diff(dim=1, prepend=batch["segment_ids"][:, :1]) > 0] = -100
    expected = model(**batch).loss.item()
    assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(expected, abs=1e-5)
    for name in columns:
        others = {key: value for key, value in batch.items() if key != name}
        assert abs(trainer.compute_loss(model, others).item() - expected) > 1e-3


@for_each_layout
def test_sft_with_lora_and_fusion(layout: str, tmp_path: Path) -> None:
    """A run with TRL's defaults, gradient checkpointing among them; what it saved holds what was trained."""
    model = cc.retrofit(make_base("llama").float(), 1, 3, solver=cc.Jacobi(3, 2))
    settings: Any = {"max_steps": 3, "learning_rate": 0.05, "gradient_checkpointing": True, **LAYOUTS[layout]}
    trainer = sft(model, tmp_path, [{"text": text} for text in TEXTS], lora_config(model, r=2), **settings)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if ".lora_" in n or ".modules_to_save." in n}
    trainer.save_model()
    fresh = cc.retrofit(make_base("llama").float(), 1, 3, solver=cc.Jacobi(3, 2))
    loaded: Any = PeftModel.from_pretrained(fresh, tmp_path).eval()
    ids = token_ids(2, 7)
    assert largest_difference(loaded(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits) < 1e-5
    assert loaded.get_base_model().fusion.recurrent_scale.item() != 0.0


@pytest.mark.parametrize("base_name", ["llama", "gpt2", "gpt_neox", "gemma2"])
def test_base_model_runs_the_recurrence(base_name: str) -> None:
    """The head on its output gives the logits (Gemma caps them, so it is left out of that); state and cache go on."""
    model, ids = make_t2mlr(base_name), token_ids(2, 7)
    mask, recurrent = torch.ones_like(ids), torch.ones_like(ids)
    mask[0, :2], recurrent[:, 3] = 0, 0
    inputs: Any = {"attention_mask": mask, "recurrent_mask": recurrent, "solver": cc.Sequential()}
    expected = model(ids, output_hidden_states=True, **inputs)
    found = model.base_model(ids, output_hidden_states=True, **inputs)
    assert torch.equal(found.last_hidden_state, expected.hidden_states[-1])
    assert largest_difference(found.hidden_states, expected.hidden_states) == 0.0
    if base_name != "gemma2":
        assert torch.equal(model.get_output_embeddings()(found.last_hidden_state), expected.logits)
    more = [model(ids[:, -1:], cache=cache_of(output)).logits for output in (found, expected)]
    assert torch.equal(*more)
    clone = copy.deepcopy(model).base_model
    assert torch.equal(clone(ids, **inputs).last_hidden_state, found.last_hidden_state)
    assert torch.equal(copy.copy(clone)(ids, **inputs).last_hidden_state, found.last_hidden_state)
    assert model.base_model.embed_dim == 16 if base_name == "gpt2" else model.base_model.config is not None


def test_lengths_of_documents_alone_are_refused() -> None:
    """Kernels' arguments are not read, so they must not be the only ones that tell documents apart."""
    model, ids = make_t2mlr("llama"), token_ids(1, 6)
    lengths = torch.tensor([0, 4, 6], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    for known in ({}, {"position_ids": positions, "attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match=r"cu_seq_lens_q.*segment_ids"):
            model(ids, cu_seq_lens_q=lengths, **known)
    packed = model(ids, position_ids=positions, cu_seq_lens_q=lengths, solver=cc.Sequential()).logits
    assert largest_difference(packed[:, 4:], model(ids[:, 4:], solver=cc.Sequential()).logits) < 1e-6


# Reinforcement learning


PROMPTS = [{"prompt": text} for text in ("w3 w4 w5", "w6", "w7 w8 w9 w10", "w11 w12")]


def count_distinct(completions: list[str], **_: Any) -> list[float | None]:
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(folder: Path, beta: float = 0.0, with_lora: bool = False, **changes: Any) -> Any:
    """A trainer of a model that was saved and loaded: TRL loads the reference model from where the policy came from."""
    make_t2mlr("llama", **changes).float().save_pretrained(folder / "policy")
    config = GRPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=5,
        beta=beta,
        max_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        **SHARED,
    )
    policy = cc.T2MLRForCausalLM.from_pretrained(folder / "policy")
    return GRPOTrainer(
        policy,
        count_distinct,
        config,
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=tokenizer(),
        peft_config=lora_config(policy, r=2) if with_lora else None,
    )


@pytest.mark.parametrize("with_lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo_runs(beta: float, with_lora: bool, tmp_path: Path) -> None:
    trainer = grpo(tmp_path, beta, with_lora, solver=cc.Sequential())
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])} == trained
    assert any("fusion" in n for n in trained)
    if beta:  # the reference is the policy as it was, with its recurrence, so at first they agree exactly
        divergence = [line["kl"] for line in trainer.state.log_history if "kl" in line]
        assert divergence[0] == 0.0 and divergence[1] > 0.0


def replayed_and_decoded(trainer: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities of generated tokens: as the trainer computes them, and as cached decoding gave them."""
    model = trainer.model.eval()
    prompts = torch.tensor([[PAD, PAD, 3, 4], [5, 6, 7, 8], [PAD, PAD, PAD, 9]])
    made = model.generate(
        prompts,
        attention_mask=(prompts != PAD).long(),
        do_sample=True,
        min_new_tokens=6,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answers = made.sequences[:, 4:]
    decoded = torch.stack(made.logits, dim=1).log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    mask = torch.cat([(prompts != PAD).long(), torch.ones_like(answers)], dim=1)
    labels = made.sequences.clone()
    labels[:, :4] = -100
    with torch.no_grad():
        replayed = model(input_ids=made.sequences, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return replayed[:, -6:], decoded


EXACT = {"sequential": cc.Sequential(), "jacobi": cc.Jacobi(10, 10)}


@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize("prompt_recurrence", [True, False])
def test_replay_is_exact(solver: str, prompt_recurrence: bool, tmp_path: Path) -> None:
    trainer = grpo(tmp_path, solver=EXACT[solver], prompt_recurrence=prompt_recurrence)
    if not prompt_recurrence:
        recur_on_answers(trainer.model)
    assert largest_difference(*replayed_and_decoded(trainer)) < 2e-5


def test_replay_with_few_iterations_is_not_exact(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, solver=cc.Jacobi(1, 1))
    assert largest_difference(*replayed_and_decoded(trainer)) > 1e-2


def test_grpo_with_prompts_that_are_not_recurrent(tmp_path: Path) -> None:
    """TRL does not say where a prompt ends, so without help this is refused; with it policy and reference agree."""
    trainer = grpo(tmp_path, 0.1, solver=cc.Jacobi(4, 2), prompt_recurrence=False)
    recur_on_answers(trainer.model)
    with pytest.raises(ValueError, match=r"prompts are not recurrent.*recur_on_answers"):
        trainer.train()
    handle = recur_on_answers(trainer.ref_model)
    trainer.train()
    divergence = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert divergence[0] == 0.0 and divergence[1] > 0.0
    handle.remove()
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match="prompts are not recurrent"):
        trainer.ref_model(input_ids=ids, labels=ids, fused_lm_head=True)


def test_recur_on_answers_leaves_a_given_mask_alone() -> None:
    model, ids = make_t2mlr("llama"), token_ids(2, 6)
    labels = ids.clone()
    labels[:, :3] = -100
    given: Any = {"recurrent_mask": torch.tensor([[1, 0, 1, 0, 1, 0]] * 2)}
    answers: Any = {"recurrent_mask": (labels != -100).long()}
    nothing: Any = {}
    expected = [model(input_ids=ids, **mask).logits for mask in (given, answers, nothing)]
    handle = recur_on_answers(model)
    found = [model(input_ids=ids, labels=labels, **mask).logits for mask in (given, nothing)]
    found.append(model(input_ids=ids).logits)
    handle.remove()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(model(input_ids=ids, labels=labels).logits, expected[2])
    assert largest_difference(expected[1], expected[2]) > 1e-3


def test_grpo_with_continuous_batching_is_refused() -> None:
    """What TRL's use_transformers_continuous_batching calls. Left alone it would report the error and go on with nothing."""
    with pytest.raises(ValueError, match="continuous batching"):
        make_t2mlr("llama").generate_batch([[3, 4, 5], [6, 7]])


def test_threads_do_not_see_each_others_hidden_states() -> None:
    model = make_t2mlr("llama")
    texts = [token_ids(1, 9, seed=seed) for seed in (1, 2)]
    expected = [model.base_model(ids).last_hidden_state for ids in texts]

    def wrong(place: int) -> int:
        found = (model.base_model(texts[place]).last_hidden_state for _ in range(40))
        return sum(not torch.equal(states, expected[place]) for states in found)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, (0, 1))) == [0, 0]
