"""Examples of a generated task: made when asked for, by index, and never stored.

Shapes: B examples, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.tasks import IGNORED, Example, Task
from crosscurrent.tasks.splits import Split, random_numbers


@dataclass(frozen=True)
class TrainingExamples(Dataset[int]):
    """The training examples of a run, in their order: number i belongs to step i // batch_size.

    Each group of examples has one length, drawn anew, so that nothing is padded (but sums of numbers of different
    lengths). Everything follows from the index and the greatest length there is at its step, so a run that goes on
    needs no state of its data, and any number of processes sees the same batches. As a dataset it holds the
    numbers: loaders fetch ahead, when it is not yet known how long the examples will be.

    Args:
        task: the task.
        lengths: to draw from.
        seed: of the data.
        batch_size: examples per step, over all processes.
        group_size: examples of one length; it divides batch_size.
        num_steps: of the run.
        prefix_supervision: None: as the task does.
        longest_share: of the groups so large a share has the greatest length, the others any.
        max_tokens: a batch has no more tokens: of longer examples it holds fewer. None: no limit.
    """

    task: Task
    lengths: tuple[int, ...]
    seed: int
    batch_size: int
    group_size: int
    num_steps: int
    prefix_supervision: bool | None = None
    longest_share: float = 0.0
    max_tokens: int | None = None

    def __len__(self) -> int:
        return self.batch_size * self.num_steps

    def __getitem__(self, index: int) -> int:
        return index

    def length(self, index: int, longest: int | None = None) -> int:
        """The payload length of example number `index`, at most `longest` if there is any so short."""
        allowed = self.lengths
        if longest is not None:
            allowed = tuple(length for length in allowed if length <= longest) or (min(allowed),)
        numbers = random_numbers("lengths", self.seed, index // self.group_size)
        if self.longest_share and numbers.random() < self.longest_share:
            return max(allowed)
        return numbers.choice(allowed)

    def batch(self, indices: Sequence[int], longest: int | None = None) -> dict[str, Tensor]:
        """The examples of these numbers, or the first of them that make no more than `max_tokens`; at least one.

        Args:
            indices: of one group.
            longest: the greatest length to draw; None: no limit.
        """
        length, width = self.length(indices[0], longest), 0
        examples: list[Example] = []
        for index in indices:
            example = self.task.example("train", length, index, self.seed, self.prefix_supervision)
            width = max(width, len(example.tokens))
            if examples and self.max_tokens is not None and (len(examples) + 1) * width > self.max_tokens:
                break
            examples.append(example)
        return collate(examples)


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Model inputs and targets: input_ids and labels [B, T] int64.

    With them an attention_mask [B, T] if something is padded, a recurrent_mask [B, T], 0 for prompts, if there are any, and
    position_ids [B, T] if the task has its own. Beside those there always is an attention_mask: without one, transformers
    would take positions that go back for the beginning of another document.
    The labels are not shifted: labels[:, i] is what the logits at position i should say.

    Example:
        >>> batch = collate([Example((2, 0, 1), (-100, -100, 1)), Example((2, 1), (-100, 1))])
        >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
        ([[-100, -100, 1], [-100, 1, -100]], [[1, 1, 1], [1, 1, 0]])
    """
    longest = max(len(example.tokens) for example in examples)
    rows = [(example, longest - len(example.tokens)) for example in examples]
    batch = {
        "input_ids": torch.tensor([(*example.tokens, *[0] * short) for example, short in rows]),
        "labels": torch.tensor([(*example.targets, *[IGNORED] * short) for example, short in rows]),
    }
    has_positions = examples[0].positions is not None
    if any(short for _, short in rows) or has_positions:
        batch["attention_mask"] = torch.tensor([[1] * (longest - short) + [0] * short for _, short in rows])
    if any(example.num_prompt for example in examples):
        prompts = torch.tensor([example.num_prompt for example in examples])
        batch["recurrent_mask"] = (torch.arange(longest) >= prompts[:, None]).long()
    if has_positions:
        batch["position_ids"] = torch.tensor([(*(example.positions or ()), *[0] * short) for example, short in rows])
    return batch


def inputs_for(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a collated batch a model is given: of the masks a recurrent model alone takes recurrent_mask."""
    masks = ("attention_mask", "recurrent_mask") if isinstance(model, RecurrentCausalLM) else ("attention_mask",)
    return {name: batch[name] for name in ("input_ids", "position_ids", *masks) if name in batch}


def held_out(
    task: Task,
    split: Split,
    length: int,
    count: int,
    seed: int,
    prefix_supervision: bool | None = None,
    batch_size: int = 256,
) -> list[dict[str, Tensor]]:
    """The first `count` examples of a length, in batches of at most `batch_size`."""
    examples = [task.example(split, length, index, seed, prefix_supervision) for index in range(count)]
    return [collate(examples[start : start + batch_size]) for start in range(0, count, batch_size)]
