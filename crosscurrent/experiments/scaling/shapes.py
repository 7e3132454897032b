"""The models of the plan: four shapes, and what is made of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosscurrent.experiments.scaling.memory import AUTOCAST, StepMemory, step_memory
from crosscurrent.models.rlt import RLTConfig, RLTForCausalLM
from crosscurrent.models.t2mlr import T2MLRConfig, T2MLRForCausalLM
from crosscurrent.recurrence import Implicit, Jacobi, Sequential, Solver, Sweeps
from crosscurrent.suggestions import did_you_mean

VOCABULARY = 49152  # SmolLM2's tokenizer, whatever the shape


def _llama(
    width: int, inner: int, num_layers: int, num_heads: int, num_kv: int, tied: bool = True
) -> Mapping[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv,
        "tie_word_embeddings": tied,
    }


# SmolLM2-135M and 360M, and the shapes of Llama 3.2 1B and Llama 2 7B with SmolLM2's vocabulary.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "135m": _llama(576, 1536, 30, 9, 3),
    "361m": _llama(960, 2560, 32, 15, 5),
    "1b": _llama(2048, 8192, 16, 32, 8),
    "7b": _llama(4096, 11008, 32, 32, 32, tied=False),
}


@dataclass(frozen=True)
class Kind:
    """What is made of a shape.

    Attributes:
        name: as tables show it.
        architecture: "base", "t2mlr" (a fifth of the layers, in the middle) or "rlt" (half of the layers are its decoder;
            as many heads for keys as for queries).
        solver: of a training step; None for the base.
        feedback_interval: as in configurations.
    """

    name: str
    architecture: str
    solver: Solver | None = None
    feedback_interval: int | None = 1


KINDS: tuple[Kind, ...] = (
    Kind("base", "base"),
    Kind("T2MLR", "t2mlr", Jacobi(4, gradient=Implicit(2), scan=True, guess="inputs")),
    Kind("T2MLR, Jacobi(16, 4)", "t2mlr", Jacobi(16, 4)),
    Kind("RLT-1", "rlt", Sequential()),
    Kind("RLT-1, Sweeps(16, 2)", "rlt", Sweeps(16, 2, gradient=Implicit(2))),
    Kind("RLT-2 (64)", "rlt", Sequential(), feedback_interval=64),
)


@dataclass(frozen=True)
class Subject:
    """A model without storage (on the "meta" device), of a kind."""

    shape: str
    kind: Kind
    model: Any
    _memory: dict[tuple[int, int, bool], StepMemory] = field(default_factory=dict, repr=False, compare=False)

    def step_memory(self, num_rows: int, sequence_length: int, checkpointing: bool) -> StepMemory:
        """What a step under bfloat16 autocast needs on one GPU; many layouts ask for the same."""
        asked = num_rows, sequence_length, checkpointing
        if asked not in self._memory:
            self._memory[asked] = step_memory(
                self.model, num_rows, sequence_length, AUTOCAST, self.kind.solver, checkpointing
            )
        return self._memory[asked]

    @cached_property
    def range_share(self) -> float:
        """Share of all weights that are in the recurrent range."""
        of_range = sum(weight.numel() for layer in self.range_layers for weight in layer.parameters())
        return of_range / self.num_parameters

    @cached_property
    def range_layers(self) -> list[Any]:
        if self.kind.architecture == "rlt":
            return list(self.model.model.decoder.layers)
        if self.kind.architecture == "t2mlr":
            return list(self.model.layers)[self.model.config.layer_start : self.model.config.layer_end]
        return []

    @cached_property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())


def make_subject(shape: str, kind: Kind) -> Subject:
    """A shape as a model of a kind.

    Raises:
        ValueError: there is no such shape.

    Example:
        >>> make_subject("135m", KINDS[0]).num_parameters
        134515008
    """
    if shape not in SHAPES:
        raise ValueError(f"there is no shape {shape!r}: give one of {', '.join(SHAPES)}.{did_you_mean(shape, SHAPES)}")
    sizes = dict(SHAPES[shape])
    with torch.device("meta"):
        if kind.architecture == "rlt":
            return Subject(shape, kind, RLTForCausalLM(_rlt_config(sizes, kind)))
        base = LlamaConfig(**sizes)
        if kind.architecture == "base":
            return Subject(shape, kind, LlamaForCausalLM(base))
        width = round(sizes["num_hidden_layers"] / 5)
        start = (sizes["num_hidden_layers"] - width) // 2
        config = T2MLRConfig(base_config=base, layer_start=start, layer_end=start + width, solver=kind.solver)
        return Subject(shape, kind, T2MLRForCausalLM(config))


def _rlt_config(sizes: dict[str, Any], kind: Kind) -> RLTConfig:
    num_decoder = sizes["num_hidden_layers"] // 2
    taken = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "tie_word_embeddings")
    return RLTConfig(
        **{name: sizes[name] for name in taken},
        num_encoder_layers=sizes["num_hidden_layers"] - num_decoder,
        num_decoder_layers=num_decoder,
        feedback_interval=kind.feedback_interval,
        solver=kind.solver,
    )
