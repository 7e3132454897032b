"""How far do the states of an RLT-1 stray from the mean state of the same answer, along the sequence?

    python benchmarks/state_scatter.py runs/rlt-beyond-mini/s5_standard/rlt-1/seed-42 --length 1024

Each state is divided by its root mean square. The mean state of an answer is taken over the first 64 positions that ask for
one. `scatter` is the root mean square distance from it; it counts states of sequences that have not erred so far, and whose
answer has a mean. What a model does not correct adds up: a scatter that grows is drift. `four directions` is the share of
the squared distances in their four largest principal directions, `nearest means` the distance from the mean state of an
answer to the nearest one of another, averaged over answers.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM

from crosscurrent.data.generated import inputs_for
from crosscurrent.experiments.architectures import RLTRecipe
from crosscurrent.experiments.run import examples_of
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.tasks.task import IGNORED

FIRST_POSITIONS = 64
SPANS = ((0, 16), (32, 64), (96, 128), (224, 256), (480, 512), (992, 1024))


def refuse_unfit(run: RunFolder) -> None:
    """Raise ValueError unless a folder has a finished RLT-1 that was asked for every prefix."""
    if not run.is_done or not run.model.is_dir():
        raise ValueError(f"{run.path} is not the folder of a finished run with its weights.")
    recipe = run.recipe()
    if not isinstance(recipe.model, RLTRecipe) or recipe.model.feedback_interval != 1:
        raise ValueError(f"{run.path} has no RLT-1, whose every output is carried.")
    if not recipe.task.prefix_supervision:
        raise ValueError(f"{run.path} was trained without prefix_supervision: its states have no answer each.")


@torch.no_grad()
def states_of(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """States [B, T, D] of root mean square 1, and what the model answers [B, T]."""
    seen: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    answers = model(**inputs_for(model, batch), use_cache=False).logits.argmax(-1)
    handle.remove()
    return rms_norm(seen[0], seen[0].shape[-1:]), answers


def means_by_answer(states: Tensor, answers: Tensor, num_answers: int) -> Tensor:
    """[V, D] from states [N, D] and answers [N]; NaN where there are none."""
    sums = states.new_zeros(num_answers, states.shape[-1]).index_add_(0, answers, states)
    return sums / torch.bincount(answers, minlength=num_answers)[:, None]


def measure(folder: Path, length: int, num_examples: int) -> None:
    run = RunFolder(folder)
    refuse_unfit(run)
    recipe = run.recipe()
    recipe.task.task.check_length(length, "test")
    examples = replace(
        examples_of(recipe, "test"), count=num_examples, batch_size=num_examples, prefix_supervision=True
    )
    (batch,) = examples.of_length(length)
    model = AutoModelForCausalLM.from_pretrained(run.model, use_safetensors=True).eval()
    states, said = states_of(model, batch)
    labels = batch["labels"]
    is_asked = labels != IGNORED
    positions = torch.arange(labels.shape[1]) - is_asked.any(0).int().argmax()  # 0: the first that asks for an answer
    unerring = ((said == labels) | ~is_asked).cumprod(1).bool() & is_asked
    early = unerring & (positions < FIRST_POSITIONS)
    means = means_by_answer(states[early], labels[early], int(labels.max()) + 1)
    known = means[~means.isnan().any(1)]
    if len(known) < 2:
        raise ValueError(f"{folder} has hardly an answer right at the beginning: there are no means to measure from.")
    nearest = torch.cdist(known, known).fill_diagonal_(torch.inf).amin(1).mean()
    print(f"{folder}\n  means of {len(known)} answers, nearest means {nearest:.2f}")
    for start, stop in SPANS:
        within = unerring & (positions >= start) & (positions < stop)
        away = states[within] - means[labels[within]]
        away = away[~away.isnan().any(1)]
        if len(away):
            share = torch.linalg.eigvalsh(away.T @ away)[-4:].sum() / away.square().sum()
            scatter = away.square().sum(1).mean().sqrt()
            of = f"{len(away)} states of {int(within.any(1).sum())} sequences"
            print(f"  positions {start:4}-{stop - 1:<4}  scatter {scatter:.2f}  four directions {share:4.0%}  {of}")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--length", type=int, default=1024, help="of the test sequences")
    parser.add_argument("--examples", type=int, default=96, help="how many test sequences")
    asked = parser.parse_args(words)
    if asked.examples < 1:
        parser.error(f"--examples {asked.examples}: give at least 1.")
    try:
        for folder in asked.runs:
            measure(folder, asked.length, asked.examples)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
