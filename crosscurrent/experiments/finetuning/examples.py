"""The problems of a recipe as examples for training.

Shapes: T tokens.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosscurrent.data.batches import collate_rows, collate_rows_for_attention
from crosscurrent.data.collation import PaddingCollator
from crosscurrent.data.packing import epoch_order
from crosscurrent.data.problems import ProblemTokenizer, check_vocabulary, context_length, some_of, too_long
from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe
from crosscurrent.models.outputs import IGNORED
from crosscurrent.tasks.reasoning import Problem
from crosscurrent.tasks.splits import Split

Example = dict[str, Tensor]
NUM_VALIDATION = 64


class ProblemsOfRun:
    """What a recipe trains, validates and tests on.

    Args:
        recipe: the recipe.
        tokenizer: of its base.
        base: the model that is to read them.
    """

    def __init__(self, recipe: FinetuneRecipe, tokenizer: PreTrainedTokenizerBase, base: PreTrainedModel):
        self.recipe, self.base = recipe, base
        asked = recipe.problems
        limits = [limit for limit in (context_length(base), asked.max_length, asked.packed_length) if limit is not None]
        self.longest = min(limits, default=None)
        self.tokens = ProblemTokenizer(asked.task, tokenizer, asked.prompt_format)
        self._problems: dict[Split, Sequence[Problem]] = {}
        self.num_examples: dict[str, int] = {}
        self.num_left_out: dict[str, int] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Those of a split, read once."""
        if split not in self._problems:
            self._problems[split] = self._read(split)
        return self._problems[split]

    def _read(self, split: Split) -> Sequence[Problem]:
        asked, training = self.recipe.problems, self.recipe.training
        task = asked.task
        counts = {"train": asked.num_train, "validation": asked.num_validation, "test": asked.num_test}
        count = counts[split]
        if split == "validation" and count is None:
            found = task.problems(split, asked.data_path, NUM_VALIDATION if task.is_generated else None, asked.seed)
            return found[:NUM_VALIDATION]
        if split == "train" and count is None and task.is_generated:
            count = min(task.num_problems["train"], training.max_steps * training.batch_size)
        # What is learned follows from the run's seed: without it runs of several seeds would be one and the same.
        return task.problems(split, asked.data_path, count, self.recipe.seed if split == "train" else asked.seed)

    @cached_property
    def train(self) -> list[Example]:
        return self._examples("train")

    @cached_property
    def validation(self) -> list[Example]:
        return self._examples("validation")

    @property
    def train_rows(self) -> "Epochs":
        training = self.recipe.training
        asked = self.recipe.problems
        num_rows = training.max_steps * training.batch_size
        return Epochs(self.train, num_rows, self.recipe.seed, begins_in_order=asked.task.is_generated)

    def _examples(self, split: Split) -> list[Example]:
        """All of a split that are not too long, packed if the recipe says so.

        Raises:
            ValueError: none is left, or none has a token that the loss covers.
        """
        asked, problems = self.recipe.problems, self.problems(split)
        with tqdm(problems, desc=f"tokenizing {split} problems", unit="problem", leave=False, delay=2) as bar:
            examples = [self.tokens.example(problem, asked.loss_on, asked.recurrent) for problem in bar]
        check_vocabulary([example["input_ids"].tolist() for example in examples], self.base, self.tokens.tokenizer)
        left_out = too_long([len(example["input_ids"]) for example in examples], self.longest)
        if left_out:
            named = some_of([problems[index].id for index in left_out])
            tqdm.write(
                f"{len(left_out)} of {len(examples)} {split} problems have more than {self.longest} tokens and are left "
                f"out: {named}",
                file=sys.stderr,
            )
        dropped = set(left_out)
        if not examples:
            raise ValueError(
                f"{asked.name} has no {split} problems here: those of the held-out splits are left out of training, so give "
                "a folder with a file for each split."
            )
        kept = [example for index, example in enumerate(examples) if index not in dropped]
        self.num_examples[split], self.num_left_out[split] = len(kept), len(left_out)
        if not kept:
            raise ValueError(
                f"all {len(examples)} {split} problems of {asked.name} have more than {self.longest} tokens: raise "
                "problems.max_length or packed_length, or take a base with a longer context."
            )
        for example in kept:
            example["labels"][0] = IGNORED  # nothing predicts it
        if all(bool((example["labels"] == IGNORED).all()) for example in kept):
            raise ValueError(
                f"no {split} example of {asked.name} has a token that the loss covers: look at its completions."
            )
        return kept if asked.packed_length is None else pack(kept, asked.packed_length)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """A batch as the model reads it: one without recurrence is not given the columns of one."""
        is_recurrent = self.recipe.base.is_recurrent
        if self.recipe.problems.packed_length is not None:
            return collate_rows(examples) if is_recurrent else collate_rows_for_attention(examples)
        batch = PaddingCollator(pad_token_id=0)(examples)
        return batch if is_recurrent else {name: batch[name] for name in ("input_ids", "labels", "attention_mask")}

    @cached_property
    def fingerprint(self) -> str:
        """Of all problems, as the model is given them."""
        digest = hashlib.sha256()
        splits: tuple[Split, ...] = ("train", "validation", "test")
        for split in splits:
            for problem in self.problems(split):
                digest.update(repr((split, problem.id, problem.question, problem.completion, problem.answer)).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Epochs(Dataset[Example]):
    """The first `num_rows` of an endless sequence of epochs, in each of which every example comes once, in another order.

    Everything follows from the index, so a run that goes on needs no state of its data.

    Attributes:
        examples: all there are.
        num_rows: that are read.
        seed: of the orders.
        begins_in_order: whether the first epoch takes them as they are. Then a run of more steps, for which more problems
            are generated, begins with the same ones.
    """

    examples: Sequence[Example]
    num_rows: int
    seed: int
    begins_in_order: bool

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Example:
        epoch, place = divmod(index, len(self.examples))
        if epoch == 0 and self.begins_in_order:
            return self.examples[place]
        return self.examples[int(_order_kept(len(self.examples), self.seed, epoch)[place])]


_order_kept = lru_cache(maxsize=2)(epoch_order)


def pack(examples: Sequence[Example], row_length: int) -> list[Example]:
    """Rows of `row_length` tokens: whole examples one after another, each a segment, and padding at the end.

    Returns:
        For each row input_ids, labels, recurrent_mask, segment_ids, counted from 0, and attention_mask, all [row_length].

    Example:
        >>> one = {name: torch.tensor([5, 6]) for name in ("input_ids", "labels", "recurrent_mask")}
        >>> rows = pack([one, one, one], row_length=5)
        >>> rows[0]["input_ids"].tolist(), rows[0]["segment_ids"].tolist(), len(rows)
        ([5, 6, 5, 6, 0], [0, 0, 1, 1, 0], 2)
    """
    rows: list[list[Example]] = []
    room = 0
    for example in examples:
        if len(example["input_ids"]) > room:
            rows.append([])
            room = row_length
        rows[-1].append(example)
        room -= len(example["input_ids"])
    return [_packed(row, row_length) for row in rows]


def _packed(examples: list[Example], row_length: int) -> Example:
    def joined(parts: list[Tensor], padding: int) -> Tensor:
        row = torch.full((row_length,), padding)
        whole = torch.cat(parts)
        row[: len(whole)] = whole
        return row

    ids = [example["input_ids"] for example in examples]
    return {
        "input_ids": joined(ids, 0),
        "labels": joined([example["labels"] for example in examples], IGNORED),
        "recurrent_mask": joined([example["recurrent_mask"] for example in examples], 0),
        "segment_ids": joined([torch.full_like(one, number) for number, one in enumerate(ids)], 0),
        "attention_mask": joined([torch.ones_like(one) for one in ids], 0),
    }


def describe(problems: ProblemsOfRun) -> dict[str, Any]:
    """Numbers of a result: how many problems and tokens there are to train on."""
    tokens = sum(
        int(example.get("attention_mask", torch.ones_like(example["input_ids"])).sum()) for example in problems.train
    )
    training = problems.recipe.training
    return {
        "train_problems": problems.num_examples["train"],
        "num_left_out": dict(problems.num_left_out),
        "train_tokens": tokens,
        "epochs": training.max_steps * training.batch_size / len(problems.train),
    }
