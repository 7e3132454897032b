"""The models a recipe can name, all by one way of giving a size."""

from abc import abstractmethod
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, field_validator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crosscurrent.experiments.settings import Settings
from crosscurrent.models.baselines import LSTMConfig, LSTMForCausalLM
from crosscurrent.models.rlt import RLTConfig, RLTForCausalLM
from crosscurrent.models.t2mlr import T2MLRConfig, T2MLRForCausalLM
from crosscurrent.recurrence import solver_from_dict
from crosscurrent.suggestions import did_you_mean

Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]


def _valid_solver(solver: dict[str, Any]) -> dict[str, Any]:
    solver_from_dict(solver)
    return solver


SolverSettings = Annotated[dict[str, Any], AfterValidator(_valid_solver)]


class Size(Settings):
    """What every architecture is given.

    Attributes:
        hidden_size: width of the stream.
        num_hidden_layers: all layers, whatever their kind.
        num_attention_heads, intermediate_size: an LSTM has neither and passes over them.
        rope_theta: base of the rotary positions of rlt, t2mlr and transformer.
        vocab_size: None: the task's. The RLT report's models have 277 rows.
    """

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    intermediate_size: Count
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    vocab_size: Count | None = None

    @property
    def takes_positions(self) -> bool:
        """Whether the model can be told where its tokens stand."""
        return False

    @abstractmethod
    def build(self, vocab_size: int) -> PreTrainedModel:
        """A new model with random weights.

        Raises:
            ValueError: the sizes do not fit together.
        """


class TransformerRecipe(Size):
    """A transformers Llama.

    Attributes:
        positions: "rope": rotary; "none": no positional encoding, and rope_theta without effect. A Llama without one is
            a SmolLM3 to transformers.
        num_key_value_heads: null: as many as num_attention_heads.
        rms_norm_eps: of all its norms.
    """

    architecture: Literal["transformer"]
    positions: Literal["rope", "none"] = "rope"
    num_key_value_heads: Count | None = None
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6

    @property
    def takes_positions(self) -> bool:
        return self.positions == "rope"

    def build(self, vocab_size: int) -> PreTrainedModel:
        config = self._llama(vocab_size)
        return SmolLM3ForCausalLM(config) if isinstance(config, SmolLM3Config) else LlamaForCausalLM(config)

    def _llama(self, vocab_size: int) -> LlamaConfig | SmolLM3Config:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}."
            )
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        settings: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if self.positions == "none":
            return SmolLM3Config(**settings, pad_token_id=None, no_rope_layers=[0] * self.num_hidden_layers)
        return LlamaConfig(**settings)


class T2MLRRecipe(TransformerRecipe):
    """A random Llama whose layers [layer_start, layer_end) are recurrent."""

    architecture: Literal["t2mlr"]  # type: ignore[assignment]
    layer_start: Annotated[int, Field(ge=0, strict=True)]
    layer_end: Count
    feedback_interval: Count | None = 1
    solver: SolverSettings = {"name": "jacobi", "iterations": 16, "backward_iterations": 4}

    @property
    def takes_positions(self) -> bool:
        return False  # positions that restart tell it documents

    def build(self, vocab_size: int) -> PreTrainedModel:
        config = T2MLRConfig(
            base_config=self._llama(vocab_size),
            layer_start=self.layer_start,
            layer_end=self.layer_end,
            feedback_interval=self.feedback_interval,
            solver=solver_from_dict(self.solver),
        )
        return T2MLRForCausalLM(config)


class RLTRecipe(Size):
    """An RLT: `num_decoder_layers` of the layers are its decoder, the others its encoder.

    Attributes:
        given_positions: for tasks that say where their tokens stand, such as addition_places.
    """

    architecture: Literal["rlt"]
    num_decoder_layers: Annotated[int, Field(ge=0, strict=True)]
    feedback_interval: Count | None = 1
    feedback_scale: float = 0.1
    state_noise: float = 0.0
    encoder_sliding_window: Count | None = None
    memory_sliding_window: Count | None = None
    sliding_window: Count = 8
    num_memory_groups: Count = 1
    tie_encoder_decoder: bool = False
    given_positions: bool = False
    solver: SolverSettings = {"name": "sequential"}

    @property
    def takes_positions(self) -> bool:
        return self.given_positions

    def build(self, vocab_size: int) -> PreTrainedModel:
        config = RLTConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_encoder_layers=self.num_hidden_layers - self.num_decoder_layers,
            num_decoder_layers=self.num_decoder_layers,
            encoder_sliding_window=self.encoder_sliding_window,
            memory_sliding_window=self.memory_sliding_window,
            sliding_window=self.sliding_window,
            num_memory_groups=self.num_memory_groups,
            feedback_interval=self.feedback_interval,
            feedback_scale=self.feedback_scale,
            state_noise=self.state_noise,
            tie_encoder_decoder=self.tie_encoder_decoder,
            given_positions=self.given_positions,
            rope_theta=self.rope_theta,
            solver=solver_from_dict(self.solver),
        )
        return RLTForCausalLM(config)


_INNER_SIZES = ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size")  # older names of intermediate_size


class AnyRecipe(Size):
    """Any other causal language model of transformers, by its type: gpt2, qwen3, mamba, ...

    Sizes go by the names that its configuration has for them (n_inner, ffn_dim, ...); it passes over those that it lacks.

    Attributes:
        model_type: as in the model's config.json.
        settings: more of its configuration, such as {head_dim: 32}.
    """

    architecture: Literal["transformers"]
    model_type: str
    settings: dict[str, Any] = {}

    @field_validator("model_type")
    @classmethod
    def _is_known(cls, model_type: str) -> str:
        if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            hint = did_you_mean(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, most=3)
            raise ValueError(f"transformers has no causal language model of type {model_type!r}.{hint}")
        return model_type

    def build(self, vocab_size: int) -> PreTrainedModel:
        size = {
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "intermediate_size": self.intermediate_size,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        known = AutoConfig.for_model(self.model_type)
        taken = {*size, *(known.attribute_map[name] for name in size if name in known.attribute_map), "model_type"}
        for name in self.settings:
            if name in taken:
                raise ValueError(f"settings: {name} is given by the keys that all architectures share.")
            if not hasattr(known, name):
                raise ValueError(f"settings: {type(known).__name__} has no {name!r}.{did_you_mean(name, vars(known))}")
        wanted = {name: value for name, value in size.items() if hasattr(known, name)} | self.settings
        if not hasattr(known, "intermediate_size"):
            inner = next((name for name in _INNER_SIZES if hasattr(known, name)), None)
            wanted |= {} if inner is None or inner in wanted else {inner: self.intermediate_size}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(self.model_type, **wanted))
        _refuse_seeing_ahead(model, vocab_size)
        return model

    def check_length(self, num_tokens: int) -> None:
        """Raise ValueError if a model does not take so many tokens."""
        known = AutoConfig.for_model(self.model_type, **self.settings)
        longest = getattr(known, "max_position_embeddings", None)
        if isinstance(longest, int) and 0 < longest < num_tokens:
            raise ValueError(
                f"model: a {self.model_type} takes {longest} tokens, and the longest examples have {num_tokens}: "
                "give shorter lengths, or more positions in model.settings."
            )


@torch.no_grad()
def _refuse_seeing_ahead(model: PreTrainedModel, vocab_size: int) -> None:
    """Raise ValueError if a change of the last token changes an earlier prediction."""
    if model.device.type == "meta":
        return
    ids = torch.arange(6)[None] % vocab_size
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % vocab_size
    is_training = model.training
    model.eval()
    first, second = (model(tokens, use_cache=False).logits[:, :-1] for tokens in (ids, other))
    model.train(is_training)
    if not torch.allclose(first, second, atol=1e-6):
        raise ValueError(f"a {type(model).__name__} sees tokens to come: its answers would be in what it reads.")


class LSTMRecipe(Size):
    """A stack of LSTM layers."""

    architecture: Literal["lstm"]

    def build(self, vocab_size: int) -> PreTrainedModel:
        return LSTMForCausalLM(
            LSTMConfig(vocab_size=vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers)
        )


ModelRecipe = Annotated[
    TransformerRecipe | T2MLRRecipe | RLTRecipe | LSTMRecipe | AnyRecipe, Field(discriminator="architecture")
]
