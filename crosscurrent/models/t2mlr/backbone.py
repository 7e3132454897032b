"""What lies below the head of a retrofitted model, for code that calls it by itself."""

import threading
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from crosscurrent.models.compat import CACHE_NAME


class RecurrentBackbone:
    """A model's `base_model`: called, it runs the recurrence too. It answers for the attributes of the base's own.

    The base's own module knows nothing of the recurrence, since the base uses it as well. TRL's trainers leave out the
    model's `forward` and apply the head themselves to what `base_model` returns.

    Args:
        model: the retrofitted model.
        module: the base's module below the head.
    """

    def __init__(self, model: Any, module: nn.Module):
        self._model, self._module = model, module

    def __getattr__(self, name: str) -> Any:
        if name in ("_model", "_module"):  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self._module, name)

    def __call__(self, *args: Any, recurrent_mask: Any = None, **kwargs: Any) -> BaseModelOutputWithPast:
        """As the model's `forward`, without labels and logits.

        Returns:
            last_hidden_state [B, T, D], what the head is applied to; cache; hidden_states if asked for.

        Raises:
            ValueError: as `forward` does; or the model's prompts are not recurrent (`config.prompt_recurrence`) and
                nothing tells which tokens are.
        """
        if recurrent_mask is None and not self._model.config.prompt_recurrence:
            raise ValueError(
                "this model's prompts are not recurrent (config.prompt_recurrence is False), and the call does not say "
                "which tokens belong to one. Pass recurrent_mask: in training with TRL's SFTTrainer from the collator "
                "(crosscurrent.data.collation.AnswerRecurrence), in reinforcement learning with "
                "crosscurrent.training.answers.recur_on_answers(trainer.model). Or set config.prompt_recurrence=True."
            )
        outputs: list[Any] = []
        own = threading.get_ident()  # others may run the same module meanwhile

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() == own:
                outputs.append(output)

        hook = self._module.register_forward_hook(keep)
        try:
            # The class's forward: the instance's may have been replaced by one that calls this.
            whole = type(self._model).forward(
                self._model, *args, recurrent_mask=recurrent_mask, logits_to_keep=1, **(kwargs | {"return_dict": True})
            )
        finally:
            hook.remove()
        result = BaseModelOutputWithPast(
            last_hidden_state=outputs[-1].last_hidden_state,
            hidden_states=whole.hidden_states,
            attentions=whole.attentions,
        )
        if whole.get(CACHE_NAME) is not None:
            result[CACHE_NAME] = whole[CACHE_NAME]
        return result
