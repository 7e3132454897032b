"""Scores of a model on held-out examples, length by length.

Shapes: N examples, S supervised positions (the most of any example), B rows, T positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from crosscurrent.data.generated import held_out, inputs_for
from crosscurrent.evaluation.segments import refuse_unusable_cache, segment_logits
from crosscurrent.recurrence import Solver
from crosscurrent.tasks import IGNORED, Task
from crosscurrent.tasks.s5_retrieval import STEP_LENGTH
from crosscurrent.tasks.splits import Split


@dataclass(frozen=True)
class Predictions:
    """What a model said at the supervised positions of N examples of one length.

    Attributes:
        predicted, targets: [N, S] int64 token ids; IGNORED after an example's last supervised position.
        loss: mean cross-entropy over what the loss covers.
        generated: [N, S] the answer as the model writes it by itself, for tasks that ask for it.
    """

    predicted: Tensor
    targets: Tensor
    loss: float
    generated: Tensor | None = None


def _final(answers: Predictions) -> float:
    last = (answers.targets != IGNORED).sum(dim=1, keepdim=True) - 1
    right = answers.predicted.gather(1, last) == answers.targets.gather(1, last)
    return right.float().mean().item()


def _tokens(answers: Predictions) -> float:
    asked = answers.targets != IGNORED
    return (answers.predicted == answers.targets)[asked].float().mean().item()


def _states(answers: Predictions) -> float:
    return (answers.predicted == answers.targets)[:, ::STEP_LENGTH].float().mean().item()


def _values(answers: Predictions) -> float:
    is_value = torch.arange(answers.targets.shape[1]) % STEP_LENGTH != 0
    return _tokens(replace(answers, predicted=answers.predicted[:, is_value], targets=answers.targets[:, is_value]))


def _sequence(answers: Predictions) -> float:
    return (answers.predicted == answers.targets).all(dim=1).float().mean().item()


def _exact(answers: Predictions) -> float:
    assert answers.generated is not None
    return (answers.generated == answers.targets).all(dim=1).float().mean().item()


METRICS: dict[str, Callable[[Predictions], float]] = {
    "final": _final,  # the final answer
    "prefix": _tokens,  # every supervised position, each counted once
    "tokens": _tokens,  # the same under the name that S5-Retrieval has for it
    "states": _states,  # S5-Retrieval: the running products
    "values": _values,  # S5-Retrieval: the letters looked up
    "sequence": _sequence,  # all positions of the sequence
    "answer_tokens": _tokens,  # the answer's tokens, each after the right ones before it
    "exact": _exact,  # the whole answer, written greedily by the model itself
}


@dataclass(frozen=True)
class Examples:
    """Which examples a model is scored on.

    Args:
        task: the task.
        split: "validation" or "test".
        lengths: of the payloads.
        count: examples per length.
        seed: of the data.
        prefix_supervision: whether the loss covers every prefix; None: as the task does.
        batch_size: rows per forward call.
        solver: how a recurrent model solves them; None: as it is configured.
        segment_length: longer examples are read in segments of so many tokens, each behind the cache of those before, so
            that logits and masks take no more memory however long the examples are (see `segment_logits`, also for what
            that means to a solver that is not exact). Answers are generated from whole prompts. None: in one call.

    Raises:
        ValueError: a number is below 1.
    """

    task: Task
    split: Split
    lengths: tuple[int, ...]
    count: int
    seed: int
    prefix_supervision: bool | None = None
    batch_size: int = 256
    solver: Solver | None = None
    segment_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("count", "batch_size", "segment_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not allowed: give at least 1.")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the model's forward and generate."""
        return {} if self.solver is None else {"solver": self.solver}

    def of_length(self, length: int) -> list[dict[str, Tensor]]:
        """Batches with two kinds of targets: `labels`, which the loss covers, and `answers`, which the metrics judge."""
        batches = self._batches(length)
        if self.prefix_supervision in (None, self.task.prefix_supervision):
            return [batch | {"answers": batch["labels"]} for batch in batches]
        asked = replace(self, prefix_supervision=None)
        return [
            batch | {"answers": judged["labels"]} for batch, judged in zip(batches, asked._batches(length), strict=True)
        ]

    def _batches(self, length: int) -> list[dict[str, Tensor]]:
        return held_out(self.task, self.split, length, self.count, self.seed, self.prefix_supervision, self.batch_size)


def metrics_of(task: Task, answers: Predictions) -> dict[str, float]:
    """The task's metrics, as shares from 0 to 1; without that of generated answers if none were generated."""
    return {name: METRICS[name](answers) for name in task.metrics if name != "exact" or answers.generated is not None}


def predict(
    model: PreTrainedModel, examples: Examples, generates: bool, logit_scale: float = 1.0
) -> Iterator[tuple[int, Predictions]]:
    """For each length what the model says.

    Args:
        model: in evaluation mode.
        examples: what to ask.
        generates: whether answers are also generated, if the task has a metric of that.
        logit_scale: a factor of the logits in the loss.

    Raises:
        ValueError: examples are to be read in segments, and the model does not continue from a cache.
    """
    if examples.segment_length is not None:
        refuse_unusable_cache(model)
    generates = generates and "exact" in examples.task.metrics
    for length in examples.lengths:
        batches = examples.of_length(length)
        parts = [_predict_batch(model, batch, logit_scale, examples) for batch in batches]
        num_targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        yield (
            length,
            Predictions(
                predicted=_stack([predicted for predicted, _ in parts]),
                targets=_stack([_squeeze(batch["answers"], batch["answers"]) for batch in batches]),
                loss=sum(loss for _, loss in parts) / num_targets,
                generated=_stack([_generate(model, batch, examples.options) for batch in batches])
                if generates
                else None,
            ),
        )


@torch.no_grad()
def _predict_batch(
    model: PreTrainedModel, batch: dict[str, Tensor], logit_scale: float, examples: Examples
) -> tuple[Tensor, float]:
    """Predicted ids [B, S] at the answers' positions, and the summed loss."""
    inputs = {name: values.to(model.device) for name, values in inputs_for(model, batch).items()}
    predicted, loss = [], 0.0
    for columns, logits in segment_logits(model, inputs, examples.segment_length, **examples.options):
        scaled, labels = logits.float().cpu() * logit_scale, batch["labels"][:, columns]
        loss += F.cross_entropy(scaled.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum").item()
        predicted.append(scaled.argmax(dim=-1))
    return _squeeze(torch.cat(predicted, dim=1), batch["answers"]), loss


def _squeeze(values: Tensor, labels: Tensor) -> Tensor:
    """[B, S] the values at supervised positions, in order, IGNORED after the last."""
    asked = labels != IGNORED
    width = int(asked.sum(dim=1).max())
    order = (~asked).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
    return values.gather(1, order).masked_fill(~asked.gather(1, order), IGNORED)


def _stack(parts: list[Tensor]) -> Tensor:
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=IGNORED) for part in parts])


def _refuse_leaps(positions: Tensor | None, asked: Tensor) -> None:
    """Raise ValueError if tokens of an answer do not stand one after the other, as those that are generated do."""
    if positions is not None and bool((positions.diff(dim=1) != 1)[asked[:, 1:] & asked[:, :-1]].any()):
        raise ValueError(
            "positions of held-out answers must rise by 1 from token to token, or they cannot be generated."
        )


@torch.no_grad()
def _generate(model: PreTrainedModel, batch: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """[B, S] the tokens that the model writes after each prompt, as many as the answer has, IGNORED after that.

    Prompts of one length run together. The prompt ends where the first target is asked.
    """
    targets = _squeeze(batch["answers"], batch["answers"])
    starts = (batch["answers"] != IGNORED).to(torch.int8).argmax(dim=1)
    written = torch.full_like(targets, IGNORED)
    given = inputs_for(model, batch)
    _refuse_leaps(given.get("position_ids"), batch["answers"] != IGNORED)
    for start in starts.unique().tolist():
        rows = (starts == start).nonzero().flatten()
        prompts = {name: values[rows, : start + 1].to(model.device) for name, values in given.items()}
        width = targets.shape[1]
        whole = model.generate(  # type: ignore[operator]
            **(prompts | {"attention_mask": torch.ones_like(prompts["input_ids"])}),
            max_new_tokens=width,
            min_new_tokens=width,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        written[rows] = whole[:, start + 1 :].cpu()
    return written.masked_fill(targets == IGNORED, IGNORED)
