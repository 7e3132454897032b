"""Reinforcement learning of models whose prompts are not recurrent."""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from crosscurrent.models.outputs import IGNORED


def recur_on_answers(model: nn.Module) -> RemovableHandle:
    """Make only the tokens with a label recurrent in every call of `model` that has labels and no recurrent_mask.

    For trainers that put their batches together themselves, such as TRL's GRPOTrainer: they label the completion, so a
    completion is scored as `generate(prompt_recurrence=False)` made it. Where the trainer takes a collator, use
    `crosscurrent.data.collation.AnswerRecurrence` instead.

    Args:
        model: what the trainer calls, `trainer.model`; a reference model, `trainer.ref_model`, as well.

    Returns:
        A handle; its `remove()` undoes this.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig
        >>> import crosscurrent as cc
        >>> base = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                    num_attention_heads=4)
        >>> config = cc.T2MLRConfig(base_config=base, layer_start=1, layer_end=3, prompt_recurrence=False)
        >>> model = cc.T2MLRForCausalLM(config)
        >>> handle = recur_on_answers(model)
        >>> ids, labels = torch.tensor([[1, 2, 3]]), torch.tensor([[-100, -100, 3]])
        >>> loss = model(input_ids=ids, labels=labels).loss  # token 3 alone is recurrent
    """

    def add_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("labels") is None or kwargs.get("recurrent_mask") is not None:
            return None
        return args, kwargs | {"recurrent_mask": (kwargs["labels"] != IGNORED).long()}

    return model.register_forward_pre_hook(add_mask, with_kwargs=True)
