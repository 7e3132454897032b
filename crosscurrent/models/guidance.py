"""Classifier-free guidance: the unconditional sequences are run as the prompts are."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.recurrence import Solver


class UnconditionalModel:
    """The model as transformers' guidance calls it, which knows nothing of solvers and of prompts that are not recurrent.

    Args:
        model: what scores the sequences.
        solver: None: as the model is configured.
        prompt_recurrence: whether the tokens of the first call, the negative prompt, are recurrent.
    """

    def __init__(self, model: nn.Module, solver: Solver | None, prompt_recurrence: bool):
        self.model, self.solver, self.prompt_recurrence = model, solver, prompt_recurrence
        self.num_prompt_tokens: int | None = None

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any:
        if self.num_prompt_tokens is None:
            self.num_prompt_tokens = input_ids.shape[1]
        num_new, cache = input_ids.shape[1], kwargs.get(CACHE_NAME)
        start = 0 if cache is None else cache.num_columns
        columns = torch.arange(start, start + num_new, device=input_ids.device)
        recurrent = (columns >= self.num_prompt_tokens) | self.prompt_recurrence
        return self.model(input_ids, recurrent_mask=recurrent.expand_as(input_ids), solver=self.solver, **kwargs)


def refuse_unguided_rows(config: GenerationConfig, prompts: Tensor, negative_prompt_ids: Tensor | None) -> None:
    """Raise where transformers' guidance has no unconditional sequence of its own for each of the prompts' sequences.

    Args:
        config: what is asked for.
        prompts: token ids [B, P], or embeddings [B, P, D].
        negative_prompt_ids: [N, Q] or None.
    """
    if config.guidance_scale in (None, 1):
        return
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"guidance_scale={config.guidance_scale} is not supported with num_beams={config.num_beams}: the unconditional "
            "sequences do not follow the beams. Use greedy decoding or sampling."
        )
    if negative_prompt_ids is None and prompts.is_floating_point():
        raise ValueError(
            f"guidance_scale={config.guidance_scale} with inputs_embeds needs negative_prompt_ids: without them the last "
            "token of the prompt would be the unconditional prompt, and embeddings name no tokens."
        )
    num_rows = prompts.shape[0] * (config.num_return_sequences or 1)
    if negative_prompt_ids is not None and negative_prompt_ids.shape[0] != num_rows:
        raise ValueError(
            f"negative_prompt_ids has {negative_prompt_ids.shape[0]} rows: one is needed for each of the {num_rows} "
            "returned sequences, those of one prompt side by side (negative_prompt_ids.repeat_interleave(n, dim=0))."
        )


def guide(processors: LogitsProcessorList, model: nn.Module, model_kwargs: dict[str, Any]) -> None:
    """Let the guidance among the processors, if there is one, run its sequences as `generate` runs the prompts.

    Raises:
        ValueError: only some of the prompt's tokens are recurrent, which says nothing about the negative prompt's.
    """
    for processor in processors:
        if not isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) or processor.model is not model:
            continue
        mask = model_kwargs.get("recurrent_mask")
        if mask is not None and bool((mask != 0).any()) and not bool((mask != 0).all()):
            raise ValueError(
                "guidance_scale with a recurrent_mask of both kinds of tokens is not supported: it does not say which "
                "tokens of the negative prompt are recurrent. Give prompt_recurrence."
            )
        prompt_recurrence = mask is None or bool((mask != 0).all())
        processor.model = UnconditionalModel(model, model_kwargs.get("solver"), prompt_recurrence)
