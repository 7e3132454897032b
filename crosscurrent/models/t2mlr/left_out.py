"""Tells when an adapter is trained without the recurrent path that it belongs to."""

import warnings
from typing import Any

_REMEDY = (
    "Make the adapter's configuration with crosscurrent.training.adapters.lora_config(model, ...), or add "
    "modules_to_save=['fusion', 'carry'] to it."
)


def warn_if_fusion_is_left_out(model: Any) -> None:
    """Warn if PEFT trains an adapter that does not hold the fusion, and this would go unnoticed.

    An adapter on a recurrent model that was trained and saved before is fine without: then the fusion is in that model.
    """
    if getattr(model, "peft_config", None) is None:
        return
    if hasattr(model.fusion, "modules_to_save") and model.fusion.active_adapters:
        return
    scales = (
        model.fusion.current_scale,
        model.fusion.recurrent_scale,
    )  # an adapter may sit in the fusion, not on these
    if any(scale.requires_grad for scale in scales):
        warnings.warn(
            f"the fusion is trained but is no part of the adapter: saving the adapter would lose it. {_REMEDY}",
            stacklevel=5,
        )
    elif not any(scale.any() for scale in scales):
        warnings.warn(
            "the fusion is frozen at its start, where it adds nothing: the adapter is trained on the base model without "
            f"recurrence. {_REMEDY}",
            stacklevel=5,
        )
