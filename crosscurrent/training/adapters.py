"""Training a part of a retrofitted model: LoRA on the base with the fusion beside it, or the fusion alone."""

from typing import Any

from crosscurrent.models.t2mlr import T2MLRForCausalLM

RECURRENT_MODULES = ["fusion", "carry"]  # what the retrofit adds to the base


def lora_config(model: T2MLRForCausalLM, **settings: Any) -> Any:
    """A PEFT `LoraConfig` for a retrofitted model: LoRA on the base's layers; the fusion and the carry's norm are trained
    as they are and saved in the adapter.

    To load the adapter, retrofit the same base with the same layer range and call `PeftModel.from_pretrained`. Neither is
    recorded in the adapter; on a base that is not retrofitted PEFT leaves out the fusion without a word.

    Args:
        model: made by `retrofit`, or loaded.
        settings: of `LoraConfig` (r, lora_alpha, ...). By default target_modules="all-linear", all linear layers of the
            base but its head, and task_type="CAUSAL_LM". modules_to_save is added to.

    Raises:
        ValueError: the model is not a retrofitted one.

    Example:
        >>> from peft import get_peft_model
        >>> from transformers import LlamaConfig
        >>> import crosscurrent as cc
        >>> base = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                    num_attention_heads=4)
        >>> model = cc.T2MLRForCausalLM(cc.T2MLRConfig(base_config=base, layer_start=1, layer_end=3))
        >>> adapted = get_peft_model(model, lora_config(model, r=4))
        >>> adapted.fusion.current_scale.requires_grad, adapted.lm_head.weight.requires_grad
        (True, False)
    """
    from peft import LoraConfig

    _refuse_other_models(model)
    saved = [*RECURRENT_MODULES, *(settings.pop("modules_to_save", None) or ())]
    defaults = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**(defaults | settings), modules_to_save=list(dict.fromkeys(saved)))


def freeze_base(model: T2MLRForCausalLM) -> None:
    """Let only the fusion and the carry's norm be trained: the base's parameters need no gradient any more.

    The base's layers are shared with the model that was retrofitted, so they are frozen there as well.

    Raises:
        ValueError: the model is not a retrofitted one.

    Example:
        >>> from transformers import LlamaConfig
        >>> import crosscurrent as cc
        >>> base = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                    num_attention_heads=4)
        >>> model = cc.T2MLRForCausalLM(cc.T2MLRConfig(base_config=base, layer_start=1, layer_end=3))
        >>> freeze_base(model)
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad) == 5 * 32 * 32 + 3 * 32 + 2
        True
    """
    _refuse_other_models(model)
    trained = model.new_weight_names()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def _refuse_other_models(model: Any) -> None:
    if not isinstance(model, T2MLRForCausalLM):
        raise ValueError(
            f"the model is a {type(model).__name__}: give the retrofitted model itself (cc.retrofit(base, ...)), not yet "
            "wrapped by PEFT."
        )
