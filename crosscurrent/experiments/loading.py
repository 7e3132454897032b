"""Loading a base model that is to be changed and saved again."""

from transformers import PreTrainedModel

from crosscurrent.models.base import load_base


def load_savable_base(name: str) -> PreTrainedModel:
    """`load_base(name)`, free of the note that its weights were read from GGUF.

    Unpacked at loading, they are ordinary weights; but transformers from 5.24 on still takes the model for a quantised
    one and would refuse to save it.

    Example::

        base = load_savable_base("smollm2-135m")
    """
    base = load_base(name)
    quantizer = getattr(base, "hf_quantizer", None)
    is_unpacked = all(weight.is_floating_point() for weight in base.state_dict().values())
    if quantizer is not None and getattr(base, "quantization_method", None) == "gguf" and is_unpacked:
        quantizer.remove_quantization_config(base)
    return base
