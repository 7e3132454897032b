"""Floating point operations of a training step, those of the recurrence counted apart.

Counted are the products of matrices: m x k by k x n is 2 m k n, a multiplication and an addition each. A weight matrix costs
twice its elements per token forward, and twice that backward, where it and its input get a gradient. Attention is counted
fully, T keys for each of T queries as in the usual model FLOPs utilisation (PaLM, arXiv 2204.02311), not halved for
causality; a sliding window counts its own width. Elementwise work (norms, activations, softmax, gates, the carry scan) and
the embedding's look-up are not counted, nor what activation checkpointing computes twice.

Shapes: B rows, T tokens, N = B T, D hidden_size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from crosscurrent.models.rlt import RLTForCausalLM
from crosscurrent.models.t2mlr import T2MLRForCausalLM
from crosscurrent.recurrence import Implicit, Jacobi, Sequential, Solver, Sweeps, as_solver

BACKWARD = 2  # products backward for each one forward: the gradient of its input and that of its weight

# Dense bfloat16 (and float16) products with float32 accumulation, in FLOP/s, from the makers' data sheets. The first name
# whose words are all in the device's name counts, so more special ones stand first.
_PEAKS = {
    "A100": 312e12,
    "A10": 125e12,
    "A40": 149.7e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


@dataclass(frozen=True)
class StepFlops:
    """Floating point operations of a training step: forward and backward pass, without the optimizer.

    Attributes:
        model: of the same model without recurrence: the base of a T2MLR, the RLT-0 of an RLT.
        recurrence: all that the recurrence adds: the fusion, and passes of the range beyond one.

    Example:
        >>> StepFlops(model=3e9, recurrence=1e9).total
        4000000000.0
    """

    model: float
    recurrence: float

    @property
    def total(self) -> float:
        return self.model + self.recurrence


@dataclass(frozen=True)
class Passes:
    """What a solver and its gradient rule make of a training step, in passes of the range over all tokens.

    Attributes:
        unfused: without fusion and without gradient: a guess.
        constant: fused, without gradient.
        differentiated: fused and differentiated: forward and backward.
        adjoint: products with the transposed Jacobian of a pass: backward, without the weights' gradients.
        steps: dependent steps of the forward pass, each a run of the layers of the range.
        reads: states that the fusion reads in each row and pass.
    """

    unfused: int
    constant: int
    differentiated: int
    adjoint: int
    steps: int
    reads: int


def passes_of(solver: Solver, num_tokens: int, feedback_interval: int | None) -> Passes:
    """The passes of a training step on rows of one document, all tokens recurrent; as many as there are at most.

    Raises:
        ValueError: the solver is not one of this library's.

    Example:
        >>> passes_of(Jacobi(iterations=16, backward_iterations=4), num_tokens=128, feedback_interval=1)
        Passes(unfused=1, constant=12, differentiated=4, adjoint=0, steps=17, reads=128)
    """
    depth = 1 if feedback_interval is None else -(-num_tokens // feedback_interval)
    if isinstance(solver, Sequential):
        # What is kept only at every n-th column is computed once more, as by a pass without gradient.
        return Passes(0, int(solver.recompute_every is not None), 1, 0, steps=depth, reads=depth)
    if isinstance(solver, Jacobi):
        rule, num_passes = solver.rule, min(solver.iterations, depth)
        unfused = int(solver.guess == "pass" and depth > 1)
        constant = num_passes - min(rule.num_passes, num_passes)
        steps = unfused + num_passes
    elif isinstance(solver, Sweeps):
        num_chunks = -(-num_tokens // solver.chunk_size)
        rule, unfused = solver.gradient, int(depth > 1)
        constant = min(solver.sweeps, num_chunks) if depth > 1 else 0
        steps = unfused + constant * min(solver.chunk_size, num_tokens) + min(rule.num_passes, depth)
    else:
        raise ValueError(
            f"the passes of {type(solver).__name__} are not known: give a solver of this library, such as cc.Jacobi(...)."
        )
    adjoint = min(rule.iterations, depth - 1) if isinstance(rule, Implicit) else 0
    return Passes(unfused, constant, min(rule.num_passes, depth), adjoint, steps, reads=num_tokens)


def step_flops(model: nn.Module, num_rows: int, sequence_length: int, solver: Solver | None = None) -> StepFlops:
    """Floating point operations of one training step, forward and backward, every weight trained.

    Every row is one document without padding, and all tokens are recurrent. A solver with a tolerance counts as if it never
    stopped early. What is counted, and what is not: see the head of this file.

    Args:
        model: a `T2MLRForCausalLM`, an `RLTForCausalLM`, an `LSTMForCausalLM` or a causal language model of transformers
            whose layers are attention and linear maps; on any device ("meta" too), or wrapped (DDP, FSDP2, PEFT).
        num_rows: B, of the whole step.
        sequence_length: T.
        solver: None: `model.config.solver`.

    Raises:
        ValueError: a size is below 1; the model has weights of which it is not known how often a token meets them (mixtures
            of experts, state space models); or a solver was given for a model without recurrence.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536,
        ...         num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True))
        >>> flops = step_flops(model, num_rows=1, sequence_length=2048)
        >>> f"{flops.total:.3e} {flops.recurrence}"
        '2.522e+12 0.0'
    """
    for name, value in (("num_rows", num_rows), ("sequence_length", sequence_length)):
        if value < 1:
            raise ValueError(f"{name}={value} is not allowed: give at least 1.")
    inner = _language_model(model)
    is_recurrent = isinstance(inner, T2MLRForCausalLM | RLTForCausalLM)
    if solver is not None and not is_recurrent:
        raise ValueError(f"a {type(inner).__name__} has no recurrence to solve: leave the solver out.")
    _refuse_unknown_weights(inner)
    batch = _Batch(num_rows, sequence_length)
    if isinstance(inner, T2MLRForCausalLM):
        return _t2mlr_flops(inner, batch, solver)
    if isinstance(inner, RLTForCausalLM):
        return _rlt_flops(inner, batch, solver)
    pass_ = batch.linear([inner]) + batch.attention(attention_widths(inner.config, sequence_length))
    return StepFlops(pass_.differentiated, 0.0)


@dataclass(frozen=True)
class _Pass:
    """Operations of one forward pass, by kind: in attention both factors of a product have a gradient, never weights."""

    linear: float
    attention: float

    def __add__(self, other: "_Pass") -> "_Pass":
        return _Pass(self.linear + other.linear, self.attention + other.attention)

    @property
    def forward(self) -> float:
        return self.linear + self.attention

    @property
    def differentiated(self) -> float:
        return (1 + BACKWARD) * self.forward

    @property
    def adjoint(self) -> float:
        return self.linear + BACKWARD * self.attention


@dataclass(frozen=True)
class _Batch:
    num_rows: int
    num_tokens: int

    def linear(self, modules: Iterable[nn.Module]) -> _Pass:
        """Every weight matrix in some modules, met once by every token."""
        num_weights = sum(weight.numel() for module in modules for weight in _matrices(module))
        return _Pass(2.0 * num_weights * self.num_rows * self.num_tokens, 0.0)

    def attention(self, widths: Iterable[int]) -> _Pass:
        """Scores and weighted sums; of each attention the product of heads, their width and the keys that a query sees."""
        return _Pass(0.0, 4.0 * sum(widths) * self.num_rows * self.num_tokens)

    def maps(self, width: int, num_maps: int, num_columns: int) -> float:
        """So many linear maps from D to D, of so many columns of each row."""
        return 2.0 * num_maps * width**2 * self.num_rows * num_columns


def _t2mlr_flops(model: T2MLRForCausalLM, batch: _Batch, solver: Solver | None) -> StepFlops:
    config = model.config
    widths = attention_widths(config, batch.num_tokens)
    recurrent = slice(config.layer_start, config.layer_end)
    range_ = batch.linear(list(model.layers)[recurrent]) + batch.attention(widths[recurrent])
    whole = batch.linear([model]) + batch.attention(widths)
    base = whole.differentiated - batch.linear([model.fusion]).differentiated
    # W_rec and each gate's half for R: three maps a read; the gates' halves for h: two maps, once.
    fusion = _Fusion(config.get_text_config().hidden_size, of_stream=2, of_state=3)
    return StepFlops(base, _added(config, batch, range_, fusion, solver))


def _rlt_flops(model: RLTForCausalLM, batch: _Batch, solver: Solver | None) -> StepFlops:
    config, num_tokens = model.config, batch.num_tokens
    encoder = min(config.encoder_sliding_window or num_tokens, num_tokens) * config.hidden_size
    memory = min(config.memory_sliding_window or num_tokens, num_tokens)
    decoder = (min(config.sliding_window, num_tokens) + memory) * config.hidden_size
    layers = model.model.decoder.layers
    range_ = batch.linear(layers) + batch.attention([decoder] * len(layers))
    parallel = [*model.model.encoder, *model.model.memory, model.lm_head]
    others = batch.linear(parallel) + batch.attention([encoder] * config.num_encoder_layers)
    base = (others + range_).differentiated
    if model.model.merge is None:
        return StepFlops(base, 0.0)
    fusion = _Fusion(config.hidden_size, of_stream=1, of_state=2)
    return StepFlops(base, _added(config, batch, range_, fusion, solver))


@dataclass(frozen=True)
class _Fusion:
    """How many maps from D to D a fusion applies to the stream, once, and to every state that is read."""

    hidden_size: int
    of_stream: int
    of_state: int


def _added(config: Any, batch: _Batch, range_: _Pass, fusion: _Fusion, solver: Solver | None) -> float:
    """What solving adds to the one differentiated pass of the range that the model without recurrence makes."""
    chosen = as_solver(config.solver if solver is None else solver)
    passes = passes_of(chosen, batch.num_tokens, config.feedback_interval)
    read = batch.maps(fusion.hidden_size, fusion.of_state, passes.reads)
    fused = passes.constant + passes.adjoint + (1 + BACKWARD) * passes.differentiated
    return (
        (passes.unfused + passes.constant) * range_.forward
        + passes.adjoint * range_.adjoint
        + (passes.differentiated - 1) * range_.differentiated
        + fused * read
        + (1 + BACKWARD) * batch.maps(fusion.hidden_size, fusion.of_stream, batch.num_tokens)
    )


def attention_widths(config: Any, num_tokens: int) -> list[int]:
    """For each layer the heads times their width times the keys that a query sees, all of a row or a window of them."""
    text = config.get_text_config(decoder=True)
    num_heads = getattr(text, "num_attention_heads", None)
    if num_heads is None:  # an LSTM
        return [0] * text.num_hidden_layers
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    window = getattr(text, "sliding_window", None) or num_tokens
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    seen = [min(window, num_tokens) if kind == "sliding_attention" else num_tokens for kind in types]
    return [num_heads * head_dim * num_keys for num_keys in seen]


def _language_model(model: nn.Module) -> Any:
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} is no causal language model of transformers or of this library.")
    return found


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    """The weights that every token is multiplied by."""
    for part in module.modules():
        if isinstance(part, nn.Linear | Conv1D):
            yield part.weight
        elif isinstance(part, nn.LSTM):
            yield from (weight for weight in part.parameters(recurse=False) if weight.dim() == 2)


def _refuse_unknown_weights(model: nn.Module) -> None:
    known = {id(weight) for weight in _matrices(model)}
    known |= {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and id(weight) not in known:
            raise ValueError(
                f"the operations of a {type(model).__name__} are not known: {name} is no weight of a linear layer that "
                "every token meets. Only attention layers, linear layers and LSTMs are counted."
            )


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The most dense products per second that a GPU is said to make, in FLOP/s, to relate what it does to.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it.
        dtype: that products are computed in.

    Returns:
        None if the device, or its peak in anything but bfloat16 and float16, is not in the table.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16)
        989000000000000.0
        >>> peak_flops("cpu", torch.bfloat16)
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    given = device_name.replace("-", " ").split()
    return next((peak for name, peak in _PEAKS.items() if set(name.split()) <= set(given)), None)
