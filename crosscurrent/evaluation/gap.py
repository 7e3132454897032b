"""How far what a model computes in training is from what it computes when it decodes.

Training solves whole sequences approximately (`Jacobi`), decoding goes token by token, which is exact. This measures the
difference on given texts. It is zero once the solver runs as many iterations as the texts have tokens.

Shapes: B rows, T tokens, N tokens that are predicted, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from crosscurrent.evaluation.probing import (
    Batch,
    as_rows,
    at_least_float32,
    in_order,
    read_inputs,
    undisturbed,
)
from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.outputs import IGNORED, next_labels
from crosscurrent.models.wrapped import recurrent_model
from crosscurrent.recurrence import Sequential, Solver, SolverReport, as_solver


@dataclass(frozen=True)
class Gap:
    """The train/decode gap over given texts.

    Attributes:
        num_tokens: N, how many tokens were predicted.
        iterations: the most passes that the solver ran for a batch.
        loss: mean cross-entropy under the solver.
        exact_loss: the same, token by token.
        token_agreement: share of the N places at which both find the same token likeliest.
        mean_difference, max_difference: of the log-probabilities of the true tokens, absolute.
        mean_residuals, max_residuals: relative change of the states in each iteration, over the batches that ran it (of
            each batch its worst row); empty if nothing was iterated.
    """

    num_tokens: int
    iterations: int
    loss: float
    exact_loss: float
    token_agreement: float
    mean_difference: float
    max_difference: float
    mean_residuals: tuple[float, ...]
    max_residuals: tuple[float, ...]

    @property
    def loss_difference(self) -> float:
        """loss - exact_loss."""
        return self.loss - self.exact_loss


def train_decode_gap(model: Any, batches: Batch | Iterable[Batch], solver: Solver | None = None) -> Gap:
    """Measure the gap of one solver.

    The model is run in evaluation mode without gradients and left as it was. The exact pass takes one dependent step per
    token: a few thousand tokens are enough, and quick.

    Args:
        model: a recurrent model, or one wrapped by PEFT or data parallelism.
        batches: one batch or several. A batch is token ids [B, T], or a mapping with `input_ids` and, if needed,
            `attention_mask`, `recurrent_mask`, `segment_ids`, `position_ids`, and `labels` [B, T], not shifted, with -100
            for tokens that do not count. A single row may do without its first dimension, and lists do for tensors, so
            that examples of a tokenised data set can be given as they are. Without labels every token counts that has one
            before it in its document.
        solver: the one to measure; None: the one that the model is configured with.

    Raises:
        ValueError: the model is not recurrent, an input does not fit, or no token is predicted.

    Example:
        >>> import torch
        >>> import crosscurrent as cc
        >>> model = cc.RLTForCausalLM(cc.RLTConfig(vocab_size=61, hidden_size=32, intermediate_size=64))
        >>> gap = train_decode_gap(model, torch.tensor([[1, 2, 3, 4]]), cc.Jacobi(iterations=4, backward_iterations=1))
        >>> gap.num_tokens, gap.token_agreement
        (3, 1.0)
    """
    return train_decode_gaps(model, batches, [solver])[0]


def train_decode_gaps(
    model: Any, batches: Batch | Iterable[Batch], solvers: Sequence[Solver | None]
) -> tuple[Gap, ...]:
    """As `train_decode_gap`, for several solvers: the exact pass, which costs the most, is shared."""
    inner = recurrent_model(model)
    chosen = [as_solver(solver if solver is not None else inner.config.solver) for solver in solvers]
    tallies = [_Tally() for _ in chosen]
    with undisturbed(inner):
        for batch in in_order(batches):
            inputs, targets = _targets(inner, batch)
            exact, _ = _scores(inner, inputs, targets, Sequential())
            for tally, solver in zip(tallies, chosen, strict=True):
                tally.add(*_scores(inner, inputs, targets, solver), exact)
    return tuple(tally.gap() for tally in tallies)


@dataclass(frozen=True)
class _Scores:
    """What a solver makes of the N predicted tokens of a batch: the true ones' log-probabilities [N], the likeliest [N]."""

    log_probabilities: Tensor
    likeliest: Tensor


def _targets(model: RecurrentCausalLM, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs of a batch, and for each token the one that it is to predict [B, T], or IGNORED."""
    inputs, documents = read_inputs(model, batch)
    given = None if isinstance(batch, Tensor) else batch.get("labels")
    if given is None:
        return inputs, next_labels(inputs["input_ids"], documents)
    labels = as_rows(given)
    if labels.shape != documents.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}: it needs one value per token, {tuple(documents.shape)}."
        )
    return inputs, next_labels(labels.to(documents.device), documents)


def _scores(
    model: RecurrentCausalLM, inputs: dict[str, Tensor], targets: Tensor, solver: Solver
) -> tuple[_Scores, SolverReport]:
    output = model(**inputs, solver=solver, use_cache=False, return_dict=True)
    counted = targets != IGNORED
    logits = at_least_float32(output.logits[counted])
    losses = F.cross_entropy(logits, targets[counted], reduction="none")
    return _Scores(-losses, logits.argmax(dim=-1)), output.solver_report


@dataclass
class _Tally:
    """Sums over batches, so that every token counts alike."""

    num_tokens: int = 0
    iterations: int = 0
    total: float = 0.0
    exact_total: float = 0.0
    agreeing: int = 0
    difference: float = 0.0
    largest: float = 0.0
    residuals: list[list[float]] = field(default_factory=list)

    def add(self, scores: _Scores, report: SolverReport, exact: _Scores) -> None:
        self.iterations = max(self.iterations, report.iterations)
        self.residuals.append(report.residuals.tolist())
        if len(exact.likeliest) == 0:
            return
        difference = (scores.log_probabilities - exact.log_probabilities).abs()
        self.num_tokens += len(exact.likeliest)
        self.total -= scores.log_probabilities.double().sum().item()
        self.exact_total -= exact.log_probabilities.double().sum().item()
        self.agreeing += int((scores.likeliest == exact.likeliest).sum())
        self.difference += difference.double().sum().item()
        self.largest = max(self.largest, difference.max().item())

    def gap(self) -> Gap:
        if self.num_tokens == 0:
            raise ValueError(
                "no token is predicted: give texts of at least two tokens, and labels that are not all -100."
            )
        longest = max(map(len, self.residuals))
        by_pass = [[row[i] for row in self.residuals if len(row) > i] for i in range(longest)]
        return Gap(
            num_tokens=self.num_tokens,
            iterations=self.iterations,
            loss=self.total / self.num_tokens,
            exact_loss=self.exact_total / self.num_tokens,
            token_agreement=self.agreeing / self.num_tokens,
            mean_difference=self.difference / self.num_tokens,
            max_difference=self.largest,
            mean_residuals=tuple(math.fsum(found) / len(found) for found in by_pass),
            max_residuals=tuple(map(max, by_pass)),
        )
