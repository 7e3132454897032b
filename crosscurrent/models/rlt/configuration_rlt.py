"""Configuration of a recurrent looped Transformer."""

import math
from typing import Any

from transformers import PreTrainedConfig

from crosscurrent.models.checkpoints import refuse_misspelt_settings, refuse_other_model_type
from crosscurrent.recurrence import Schedule, Sequential, as_solver, solver_to_dict


class RLTConfig(PreTrainedConfig):
    """A recurrent looped Transformer: a causal encoder and a recurrent decoder (RLT report, September 2026).

    Args:
        vocab_size: V.
        hidden_size: width D of the stream.
        intermediate_size: width of the SwiGLU feed-forward.
        num_attention_heads: heads of every attention; hidden_size / num_attention_heads must be even (rotary).
        num_encoder_layers: L_E, at least 1.
        num_decoder_layers: L_D, 0 or more. Without any the merged stream is the output, and there is no memory.
        encoder_sliding_window: how many tokens the encoder's self-attention sees, the current one included; None: all, as
            in the report. An extension of this project: with it nothing of the encoder depends on the length.
        memory_sliding_window: how many tokens of the memory a decoder layer sees, the current one included; None: all, as in
            the report. An extension of this project, as the encoder's: with both all but the state is bounded.
        sliding_window: W, how many tokens the decoder's self-attention sees, the current one included.
        num_memory_groups: G, key and value projections of the encoder's output; decoder layer l reads group
            floor(l G / L_D).
        feedback_interval: 1: RLT-1; B > 1: RLT-2; None: RLT-0, without feedback.
        feedback_scale: alpha of the merge.
        state_noise: in training, standard deviation of the noise on the carried state, as a share of its root mean square:
            so the model learns to correct errors of its state. An extension of this project; 0, as in the report: none.
        tie_word_embeddings: the output matrix is the embedding.
        tie_encoder_decoder: decoder layer i shares its self-attention and feed-forward matrices with encoder layer i;
            norms and memory attention stay its own. Needs num_encoder_layers == num_decoder_layers.
        given_positions: whether `forward` takes position_ids as they are, for the rotary embedding alone: several tokens may
            have the same. Windows, documents and the state go by the order of the tokens as always. False: positions are
            counted, and others are refused.
        rope_theta: base of the rotary embedding, which is this project's choice (the report names none).
        rms_norm_eps, initializer_range: as in transformers.
        prompt_recurrence: whether prompt tokens read the state in `generate`; the report's models always do.
        solver: what `forward` uses unless told otherwise; None: `Sequential()`.

    Raises:
        ValueError: a value is not allowed; the message says what is.

    Example:
        >>> RLTConfig(hidden_size=64, intermediate_size=128, feedback_interval=4).head_dim
        16
    """

    model_type = "crosscurrent_rlt"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "solver_report"]

    vocab_size: int = 277
    hidden_size: int = 512
    intermediate_size: int = 1365
    num_attention_heads: int = 4
    num_encoder_layers: int = 4
    num_decoder_layers: int = 4
    encoder_sliding_window: int | None = None
    memory_sliding_window: int | None = None
    sliding_window: int = 8
    num_memory_groups: int = 1
    feedback_interval: int | None = 1
    feedback_scale: float = 0.1
    state_noise: float = 0.0
    tie_word_embeddings: bool = True
    tie_encoder_decoder: bool = False
    given_positions: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    prompt_recurrence: bool = True
    solver: Any = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        refuse_other_model_type(cls, config_dict)
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_misspelt_settings(self, kwargs)
        super().__post_init__(**kwargs)
        Schedule(self.feedback_interval)
        if self.solver is None:
            self.solver = Sequential()
        self._check_sizes()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, solver_to_dict(as_solver(value)) if name == "solver" and value is not None else value)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_hidden_layers(self) -> int:
        return self.num_encoder_layers + self.num_decoder_layers

    def _check_sizes(self) -> None:
        smallest = {
            "vocab_size": 1,
            "hidden_size": 1,
            "intermediate_size": 1,
            "num_attention_heads": 1,
            "num_encoder_layers": 1,
            "num_decoder_layers": 0,
            "sliding_window": 1,
            "num_memory_groups": 1,
        }
        for name in ("encoder_sliding_window", "memory_sliding_window"):
            if getattr(self, name) is not None:
                smallest[name] = 1
        for name, least in smallest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} is not allowed: give an integer of at least {least}.")
        if not math.isfinite(self.feedback_scale):
            raise ValueError(f"feedback_scale={self.feedback_scale} is not allowed: give a finite number.")
        is_number = isinstance(self.state_noise, int | float) and not isinstance(self.state_noise, bool)
        if not is_number or not 0 <= self.state_noise < math.inf:
            raise ValueError(f"state_noise={self.state_noise!r} is not allowed: give a finite number of at least 0.")
        if self.state_noise and self.feedback_interval is None:
            raise ValueError(f"state_noise={self.state_noise} has no effect without feedback: leave it at 0.")
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: give a positive number.")
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} does not divide into num_attention_heads={self.num_attention_heads} heads "
                "of even width: choose hidden_size as a multiple of 2 * num_attention_heads."
            )
        if self.num_memory_groups > max(self.num_decoder_layers, 1):
            raise ValueError(
                f"num_memory_groups={self.num_memory_groups} is more than num_decoder_layers={self.num_decoder_layers}: a "
                "group without a layer would have no effect."
            )
        if self.tie_encoder_decoder and self.num_encoder_layers != self.num_decoder_layers:
            raise ValueError(
                f"tie_encoder_decoder needs as many decoder as encoder layers, not {self.num_encoder_layers} and "
                f"{self.num_decoder_layers}."
            )
