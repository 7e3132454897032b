"""Demonstration 2: a pretrained model gains a recurrence, is fine-tuned with it, saved, and loaded by a new process.

Shapes: B problems, T tokens, V vocabulary.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, set_seed

from crosscurrent.evaluation.telemetry import gate_openings
from crosscurrent.experiments.checks import fingerprint, logits_of, max_logit_difference
from crosscurrent.experiments.inspection import num_recurrent_parameters, recurrent_parameters
from crosscurrent.experiments.saving import save_model
from crosscurrent.experiments.training import train
from crosscurrent.models.base import load_base, load_tokenizer
from crosscurrent.models.checkpoints import CheckpointError
from crosscurrent.models.t2mlr import T2MLRForCausalLM, retrofit
from crosscurrent.recurrence import Jacobi
from crosscurrent.tasks import variable_assignment

PROBE = "The capital of France is Paris, the capital of Italy is Rome, and the capital of Spain is"
ROUNDING = 1e-4  # two processes on one machine may differ by this much in a logit, never in a weight


@dataclass(frozen=True)
class RetrofitSettings:
    """Sizes of the demonstration; the defaults take about two minutes on two CPU cores."""

    base: str = "smollm2-135m"
    layer_start: int = 12
    layer_end: int = 18
    iterations: int = 4
    backward_iterations: int = 2
    depth: int = 2
    steps: int = 24
    warm_up_steps: int = 5
    batch_size: int = 8
    learning_rate: float = 3e-5
    fusion_factor: float = 100.0  # the fusion starts from nothing and learns with so many times the learning rate
    report_every: int = 4
    num_test_problems: int = 32


@dataclass(frozen=True)
class RetrofitResult:
    """What was measured, in the order in which it was measured."""

    difference_to_base: float
    losses: tuple[float, ...]
    gates: tuple[float, float]
    accuracy_before: float
    accuracy_after: float
    difference_after_reload: float
    answer: str
    expected_answer: str
    continuation: str


def run_retrofit(output: Path, seed: int = 0, settings: RetrofitSettings | None = None) -> RetrofitResult:
    """Retrofit, fine-tune on generated variable assignments, save into `output`/retrofitted, and load again.

    Prints every measurement.

    Raises:
        CheckpointError: the base cannot be loaded, or what the new process loaded is not what was saved.

    Example::

        run_retrofit(Path("demo-output"), seed=1)
    """
    settings = settings if settings is not None else RetrofitSettings()
    set_seed(seed)
    print(f"Loading {settings.base}.", flush=True)
    tokenizer, base = load_tokenizer(settings.base), load_base(settings.base)
    solver = Jacobi(settings.iterations, settings.backward_iterations)
    model = retrofit(base, settings.layer_start, settings.layer_end, solver=solver)
    difference = max_logit_difference(base, model, tokenizer(PROBE, return_tensors="pt")["input_ids"])
    print(
        f"Layers {settings.layer_start} to {settings.layer_end - 1} of {len(model.layers)} made recurrent: "
        f"{model.num_parameters():,} parameters, {num_recurrent_parameters(model):,} of them new.\n"
        f"Largest logit difference to the base: {difference}",
        flush=True,
    )
    before = accuracy(model, tokenizer, settings)
    losses = fine_tune(model, tokenizer, settings, seed)
    after = accuracy(model, tokenizer, settings)
    print(
        f"Held-out problems answered right: {before:.1%} before, {after:.1%} after ({settings.num_test_problems} "
        f"problems; guessing a digit: {variable_assignment.CHANCE:.0%}).",
        flush=True,
    )
    folder = output / "retrofitted"
    save_model(model, tokenizer, folder, overwrite=True)
    print(f"Saved to {folder}. Loading it in a new process.", flush=True)
    problem = variable_assignment.example("validation", index=seed, depth=settings.depth)
    reloaded, reload_difference = _reload(model, tokenizer, folder, problem.prompt)
    print(
        f"Loaded as {reloaded['model_class']}: all weights equal, largest logit difference {reload_difference}\n"
        f"A held-out problem, {problem.prompt.splitlines()[-1].strip()!r}: generated {reloaded['answer']!r}, right is "
        f"{problem.answer!r}.\n"
        f"A continuation: {PROBE} [...]{reloaded['continuation']!r}",
        flush=True,
    )
    return RetrofitResult(
        difference_to_base=difference,
        losses=tuple(losses),
        gates=gate_openings(model),
        accuracy_before=before,
        accuracy_after=after,
        difference_after_reload=reload_difference,
        answer=reloaded["answer"],
        expected_answer=problem.answer,
        continuation=reloaded["continuation"],
    )


def fine_tune(
    model: T2MLRForCausalLM, tokenizer: PreTrainedTokenizerBase, settings: RetrofitSettings, seed: int
) -> list[float]:
    """Train on the answers of generated problems, printing loss and gates. Returns the loss of each step."""

    def loss_of(step: int) -> Tensor:
        indices = range(step * settings.batch_size, (step + 1) * settings.batch_size)
        inputs, answers = _problems(tokenizer, "train", indices, settings.depth, seed)
        return F.cross_entropy(_answer_logits(model, inputs), answers)

    groups = _parameter_groups(model, settings)
    losses: list[float] = []
    with tqdm(total=settings.steps, desc="fine-tuning", unit="step") as bar:
        for loss in train(model, groups, loss_of, settings.steps, settings.warm_up_steps):
            losses.append(loss)
            bar.update()
            if bar.n % settings.report_every == 0:
                tqdm.write(_progress(losses[-settings.report_every :], gate_openings(model), int(bar.n)))
    return losses


@torch.no_grad()
def accuracy(model: T2MLRForCausalLM, tokenizer: PreTrainedTokenizerBase, settings: RetrofitSettings) -> float:
    """Share of held-out problems whose answer is the model's most probable next token."""
    model.eval()
    total, size, right = settings.num_test_problems, settings.batch_size, 0
    for start in tqdm(range(0, total, size), desc="answering held-out problems", unit="batch", leave=False):
        inputs, answers = _problems(tokenizer, "test", range(start, min(start + size, total)), settings.depth)
        right += int((_answer_logits(model, inputs).argmax(dim=-1) == answers).sum())
    return right / total


def _problems(
    tokenizer: PreTrainedTokenizerBase, split: Any, indices: range, depth: int, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """Prompts as model inputs [B, T], padded on the left, and the token of each answer [B]."""
    problems = [variable_assignment.example(split, index, seed, depth) for index in indices]
    prompts = tokenizer(
        [problem.prompt for problem in problems], padding=True, padding_side="left", return_tensors="pt"
    )
    answers = tokenizer([problem.answer for problem in problems], add_special_tokens=False)["input_ids"]
    inputs = {"input_ids": prompts["input_ids"], "attention_mask": prompts["attention_mask"]}
    return inputs, torch.tensor([tokens[0] for tokens in answers])


def _answer_logits(model: T2MLRForCausalLM, inputs: dict[str, Tensor]) -> Tensor:
    """Logits [B, V] of the token after each prompt."""
    return model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]


def _parameter_groups(model: T2MLRForCausalLM, settings: RetrofitSettings) -> list[dict[str, Any]]:
    new = recurrent_parameters(model)
    known = set(map(id, new))
    old = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [
        {"params": old, "lr": settings.learning_rate},
        {"params": new, "lr": settings.learning_rate * settings.fusion_factor},
    ]


def _progress(losses: list[float], gates: tuple[float, float], step: int) -> str:
    mean = sum(losses) / len(losses)
    return f"step {step:>3}  mean loss {mean:.3f}  gates: current {gates[0]:+.4f}, recurrent {gates[1]:+.4f}"


def _reload(
    model: T2MLRForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, problem: str
) -> tuple[dict[str, str], float]:
    """What a new process reports of the saved model, and the largest difference of its logits to this one's."""
    request = json.dumps({"folder": str(folder), "probe": PROBE, "problem": problem})
    with tempfile.TemporaryDirectory() as scratch:
        logits_file = Path(scratch) / "logits.safetensors"
        command = [sys.executable, "-m", "crosscurrent.experiments.demo.reload", str(logits_file)]
        finished = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            reason = finished.stderr.strip().splitlines()[-1:]  # the last line of a traceback names the error
            raise CheckpointError(f"{folder} could not be loaded in a new process: {' '.join(reason)}")
        reloaded, logits = json.loads(finished.stdout), load_file(logits_file)["logits"]
    if reloaded["fingerprint"] != fingerprint(model):
        raise CheckpointError(f"{folder}: the weights loaded from it are not those that were saved.")
    own = logits_of(model, tokenizer(PROBE, return_tensors="pt")["input_ids"])
    difference = (logits - own).abs().max().item()
    if not difference <= ROUNDING:
        raise CheckpointError(f"{folder}: equal weights, but logits differ by {difference} after loading.")
    return reloaded, difference
