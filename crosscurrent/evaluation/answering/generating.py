"""Outputs of a model, batch by batch.

Shapes: B rows, P columns of the padded prompts, N columns of new tokens.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from crosscurrent.evaluation.answering.sampling import SeededSampling
from crosscurrent.evaluation.answering.settings import AnsweringSettings
from crosscurrent.evaluation.probing import undisturbed
from crosscurrent.evaluation.solver_choice import scoring_solver
from crosscurrent.models.wrapped import find_recurrent_model
from crosscurrent.recurrence import as_solver, solver_to_dict


class Writer:
    """A model that writes outputs to prompts, as its own `generate` does.

    Of the checkpoint's generation settings only the tokens that end a text count, together with the tokenizer's: a
    repetition penalty, sampling or suppressed tokens that somebody saved with a model would change scores unseen.

    Args:
        model: any causal language model of transformers, or one of this library, also wrapped by PEFT.
        tokenizer: with an end-of-text token.
        settings: how it writes. What concerns recurrence warns if the model has none.
        max_new_tokens: how long an output may be.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, settings: AnsweringSettings, max_new_tokens: int
    ):
        self.model, self.settings = model, settings
        self.end_ids = _end_ids(model, tokenizer)
        self.pad_id: int = self.end_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=self.end_ids,
            pad_token_id=self.pad_id,
        )
        self.recurrence = _recurrence(model, settings)

    def write(self, prompts: Sequence[list[int]], keys: Sequence[tuple[str, int]]) -> list[list[int]]:
        """The new tokens of each row, with the end-of-text token if it came.

        Args:
            prompts: token ids of the B rows.
            keys: of each row, the problem's id and the output's number, by which random draws are seeded.
        """
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        device = self.model.device
        with undisturbed(self.model), _generation_config(self.model, self.config):
            output = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=self.config,
                logits_processor=self._processors(keys),
                **self.recurrence,
            )
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _processors(self, keys: Sequence[tuple[str, int]]) -> LogitsProcessorList:
        chosen = self.settings
        if chosen.is_greedy:
            return LogitsProcessorList()
        return LogitsProcessorList([SeededSampling(keys, chosen.temperature, chosen.top_p, chosen.seed)])

    def _until_end(self, new: list[int]) -> list[int]:
        """Rows that ended before others of their batch are filled up."""
        end = next((place for place, token in enumerate(new) if token in self.end_ids), len(new) - 1)
        return new[: end + 1]


def recurrence_of(model: Any, settings: AnsweringSettings) -> dict[str, Any] | None:
    """How a recurrent model computes prompts, as plain values; None for a model without recurrence."""
    inner = find_recurrent_model(model)
    if inner is None:
        return None
    chosen, recurrent = scoring_solver(settings.solver), settings.prompt_recurrence
    return {
        "solver": solver_to_dict(as_solver(inner.config.solver if chosen is None else chosen)),
        "prompt_recurrence": getattr(inner.config, "prompt_recurrence", True) if recurrent is None else recurrent,
    }


def _recurrence(model: Any, settings: AnsweringSettings) -> dict[str, Any]:
    """The arguments of `generate` that only recurrent models take."""
    solver = scoring_solver(settings.solver)
    given = {"solver": solver, "prompt_recurrence": settings.prompt_recurrence}
    if find_recurrent_model(model) is not None:
        return given
    without_effect = [name for name, value in given.items() if value is not None]
    if without_effect:
        warnings.warn(
            f"{' and '.join(without_effect)}: no effect, since {type(model).__name__} has no recurrence. Leave it out.",
            stacklevel=4,
        )
    return {}


def _end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end-of-text token, then the model's others."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    others = configured if isinstance(configured, list) else [configured]
    return list(dict.fromkeys(token for token in (tokenizer.eos_token_id, *others) if token is not None))


@contextmanager
def _generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """The model with other generation settings, for the time being: `generate` takes those of the model for whatever the
    settings given to it leave open."""
    holders = [module for module in model.modules() if "generation_config" in vars(module)]
    kept = [holder.generation_config for holder in holders]
    try:
        for holder in holders:
            holder.generation_config = config
        yield
    finally:
        for holder, before in zip(holders, kept, strict=True):
            holder.generation_config = before
