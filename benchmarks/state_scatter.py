"""How far do the states of an RLT stray from the mean state of the same answer, along the sequence?

    python benchmarks/state_scatter.py runs/rlt-beyond-mini/s5_standard/rlt-1/seed-42 --length 1024

States are divided by their root mean square, as the merge reads them. The mean state of an answer is taken over the first 64
positions; `scatter` is the root mean square distance from it, over sequences that have not erred so far. What the model does
not correct adds up: a scatter that grows is drift. `nearest means` is how far the means of two answers lie apart, and
`four directions` the share of the scatter that lies in its four largest principal directions.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM

from crosscurrent.data.generated import collate
from crosscurrent.experiments.architectures import RLTRecipe
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.tasks.task import IGNORED

FIRST_POSITIONS = 64
SPANS = ((4, 16), (32, 64), (96, 128), (224, 256), (480, 512), (992, 1024))


@torch.no_grad()
def states_of(model: Any, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """States [B, T, D] of root mean square 1, and what the model answers [B, T]."""
    seen: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    answers = model(input_ids=input_ids, use_cache=False).logits.argmax(-1)
    handle.remove()
    return rms_norm(seen[0], seen[0].shape[-1:]), answers


def means_by_answer(states: Tensor, answers: Tensor) -> Tensor:
    """[V, D] from states [N, D] and answers [N]; NaN where there are none."""
    sums = states.new_zeros(int(answers.max()) + 1, states.shape[-1]).index_add_(0, answers, states)
    return sums / torch.bincount(answers)[:, None]


def measure(folder: Path, length: int, num_examples: int) -> None:
    run = RunFolder(folder)
    recipe = run.recipe()
    if not isinstance(recipe.model, RLTRecipe):
        raise SystemExit(f"{folder} has no RLT, but {recipe.model.architecture}.")
    model = AutoModelForCausalLM.from_pretrained(run.model, use_safetensors=True).eval()
    seed = recipe.data_seeds.test
    batch = collate([recipe.task.task.example("test", length, index, seed, True) for index in range(num_examples)])
    states, said = states_of(model, batch["input_ids"])
    labels = batch["labels"]
    unerring = ((said == labels) | (labels == IGNORED)).cumprod(1).bool() & (labels != IGNORED)
    early = unerring & (torch.arange(labels.shape[1]) < FIRST_POSITIONS)
    means = means_by_answer(states[early], labels[early])
    apart = torch.cdist(known := means[~means.isnan().any(1)], known).fill_diagonal_(torch.inf)
    print(f"{folder}\n  nearest means: {apart.amin(1).mean():.2f}")
    for start, stop in (span for span in SPANS if span[1] <= length):
        asked = unerring[:, start:stop]
        away = states[:, start:stop][asked] - means[labels[:, start:stop][asked]]
        away = away[~away.isnan().any(1)]
        share = torch.linalg.eigvalsh(away.T @ away)[-4:].sum() / away.square().sum()
        scatter = away.square().sum(1).mean().sqrt()
        print(f"  positions {start:4}-{stop:<4}  scatter {scatter:.2f}  four directions {share:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--examples", type=int, default=96)
    asked = parser.parse_args()
    for folder in asked.runs:
        measure(folder, asked.length, asked.examples)


if __name__ == "__main__":
    main()
