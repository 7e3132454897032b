"""Configuration of the LSTM baseline."""

from typing import Any

from transformers import PreTrainedConfig

from crosscurrent.models.checkpoints import refuse_misspelt_settings, refuse_other_model_type


class LSTMConfig(PreTrainedConfig):
    """A stack of LSTM layers between an embedding and an output matrix.

    Args:
        vocab_size: V.
        hidden_size: width D of the embedding and of every layer.
        num_hidden_layers: layers; each has 8 D^2 + 8 D parameters.
        tie_word_embeddings: the output matrix is the embedding.
        initializer_range: standard deviation of the embedding at the start; with 0.02, as Transformers have it, little of
            the input reaches the layers. They start as torch's do.

    Raises:
        ValueError: a size is not a positive integer.

    Example:
        >>> LSTMConfig(vocab_size=3, hidden_size=64).num_hidden_layers
        2
    """

    model_type = "crosscurrent_lstm"

    vocab_size: int = 277
    hidden_size: int = 512
    num_hidden_layers: int = 2
    tie_word_embeddings: bool = True
    initializer_range: float = 0.1
    use_cache: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        refuse_other_model_type(cls, config_dict)
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_misspelt_settings(self, kwargs)
        super().__post_init__(**kwargs)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not allowed: give an integer of at least 1.")
