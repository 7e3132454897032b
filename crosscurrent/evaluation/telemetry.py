"""What a retrofitted model's recurrence does: its gates, its state against the stream, how long it remembers.

All of it is observed from outside, token by token (`Sequential`): by hooks on the fusion and the carry, and in the cache.

Shapes: B rows, T tokens, D hidden_size, V vocabulary.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosscurrent.evaluation.probing import Batch, at_least_float32, read_inputs, undisturbed
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.t2mlr import T2MLRForCausalLM
from crosscurrent.models.wrapped import recurrent_model
from crosscurrent.recurrence import PADDING, BoundedSum, GatedFusion, NormalizedSum, Sequential, Solver

# Where a model keeps the norm before its output matrix, for the bases that keep their layers in a known place.
FINAL_NORMS = ("model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm", "model.decoder.final_layer_norm")


def gate_openings(model: T2MLRForCausalLM) -> tuple[float, float]:
    """tanh(g_cur) and tanh(g_rec): how far the gates on the stream and on the state are open. 0: closed."""
    fusion = model.fusion
    return math.tanh(fusion.current_scale.item()), math.tanh(fusion.recurrent_scale.item())


def t2mlr_model(model: Any) -> T2MLRForCausalLM:
    """The retrofitted model inside what PEFT, data parallelism or torch.compile wrapped around it.

    Raises:
        ValueError: there is none, or it has no feedback.
    """
    inner = recurrent_model(model)
    if not isinstance(inner, T2MLRForCausalLM):
        raise ValueError(
            f"{type(inner).__name__} has no gates on its stream and its state: this looks into T2MLR models only, "
            "those made by crosscurrent.retrofit."
        )
    if inner.config.feedback_interval is None:
        raise ValueError("this model has feedback_interval=None: nothing is fed back, so there is nothing to look at.")
    return inner


@dataclass(frozen=True)
class Trace:
    """What passed the fusion and the carry, token by token.

    Attributes:
        documents: [B, T] int64, the document of each token, -1 for padding.
        fused: [B, T] bool, the tokens that read a state.
        current_gate, recurrent_gate: [B, T] mean of the gate over the stream's D features; NaN if not fused.
        stream_norm, state_norm: [B, T] 2-norms of the stream and of the state that meet there; NaN if not fused. The
            state is 0 at a document's first token.
        change: [B, T] size of what the fusion adds to the stream, relative to the stream; NaN if not fused.
        states: [B, T, D] the state that each token leaves.
        logits: [B, T, V].
    """

    documents: Tensor
    fused: Tensor
    current_gate: Tensor
    recurrent_gate: Tensor
    stream_norm: Tensor
    state_norm: Tensor
    change: Tensor
    states: Tensor
    logits: Tensor


def trace(model: Any, batch: Batch) -> Trace:
    """Run a batch exactly and record what the recurrence does.

    Args:
        model: a T2MLR model, or one wrapped by PEFT or data parallelism. It is left as it was.
        batch: token ids [B, T], or a mapping as `train_decode_gap` takes it.

    Raises:
        ValueError: the model is not a T2MLR model with feedback, or an input does not fit.

    Example:
        >>> import crosscurrent as cc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> base = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                                     num_attention_heads=4))
        >>> trace(cc.retrofit(base, layer_start=1, layer_end=3), torch.tensor([[1, 2, 3]])).change.tolist()
        [[0.0, 0.0, 0.0]]
    """
    inner = t2mlr_model(model)
    inputs, documents = read_inputs(inner, batch)
    with undisturbed(inner), _recording(inner) as recorder:
        output = inner(**inputs, solver=Sequential(), use_cache=False, return_dict=True)
    return Trace(documents=documents, logits=output.logits, **recorder.columns())


class _Recorder:
    """Takes down what hooks on fusion and carry see. `Sequential` calls both from left to right, the carry once for each
    column, the fusion before it unless none of the columns is fused."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []
        self._met: dict[str, Tensor] = {}

    def saw_gate(self, name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._met[name] = torch.sigmoid(at_least_float32(output)).mean(dim=-1)

    def saw_fusion(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if len(args) < 2 or args[1] is None:
            return  # asked for what it makes of the stream alone
        x, r = map(at_least_float32, args[:2])
        stream_norm = x.norm(dim=-1)
        self._met |= {"stream_norm": stream_norm, "state_norm": r.norm(dim=-1).expand_as(stream_norm)}
        self._met["change"] = (at_least_float32(output) - x).norm(dim=-1) / stream_norm

    def saw_carry(self, _module: nn.Module, args: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        fused = args[2][..., 0]
        nothing = torch.full(fused.shape, math.nan, dtype=at_least_float32(output[:0]).dtype, device=fused.device)
        names = ("current_gate", "recurrent_gate", "stream_norm", "state_norm", "change")
        part = {name: torch.where(fused, self._met.get(name, nothing), nothing) for name in names}
        self._parts.append(part | {"fused": fused, "states": output})
        self._met = {}

    def columns(self) -> dict[str, Tensor]:
        return {name: torch.cat([part[name] for part in self._parts], dim=1) for name in self._parts[0]}


@contextmanager
def _recording(model: T2MLRForCausalLM) -> Iterator[_Recorder]:
    """Hooks on all fusions and carries in the model: PEFT keeps an original beside each copy, and runs one of them."""
    recorder, handles = _Recorder(), []
    for module in model.fusion.modules():
        if isinstance(module, GatedFusion):
            for name in ("current_gate", "recurrent_gate"):
                gate = module.get_submodule(name)
                handles.append(gate.register_forward_hook(partial(recorder.saw_gate, name)))
            handles.append(module.register_forward_hook(recorder.saw_fusion))
    for module in model.carry.modules():
        if isinstance(module, NormalizedSum | BoundedSum):
            handles.append(module.register_forward_hook(recorder.saw_carry))
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Memory:
    """How a perturbation of the carried state dies away.

    Attributes:
        remaining: share of it that is left in the state after n tokens, from n = 0 (where it is 1); mean over rows and
            directions.
        remaining_clean: the same if the attention sees the keys and values of the unperturbed run, so that the state
            alone remembers.
    """

    FORGOTTEN = 0.1  # of the perturbation

    remaining: tuple[float, ...]
    remaining_clean: tuple[float, ...]

    @property
    def tokens(self) -> int | None:
        """The effective memory: after how many tokens a tenth is left; None if it takes longer than was measured."""
        return _first_below(self.remaining, self.FORGOTTEN)

    @property
    def tokens_clean(self) -> int | None:
        """The same with clean keys and values."""
        return _first_below(self.remaining_clean, self.FORGOTTEN)


def _first_below(values: tuple[float, ...], bound: float) -> int | None:
    return next((place for place, value in enumerate(values) if value <= bound), None)


def effective_memory(
    model: Any,
    batch: Batch,
    position: int | None = None,
    horizon: int = 32,
    size: float = 0.05,
    num_directions: int = 4,
    seed: int = 0,
) -> Memory:
    """Perturb the carried state in random directions, go on exactly, and watch the states return to what they were.

    Measure in float32: in bfloat16 rounding alone moves a state by about half a percent.

    Args:
        model: a T2MLR model, or one wrapped by PEFT or data parallelism. It is left as it was.
        batch: token ids [B, T], or a mapping as `train_decode_gap` takes it. Padding, and what follows in other documents,
            is passed over.
        position: perturb the state left by the first `position` columns; None: half of them.
        horizon: watch at most so many tokens.
        size: of the perturbation, relative to the state.
        num_directions: random directions for each row.
        seed: of the directions.

    Raises:
        ValueError: the model is not a T2MLR model with feedback, a setting is not allowed, or no row goes on after the
            position.

    Example:
        >>> import crosscurrent as cc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> base = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                                     num_attention_heads=4))
        >>> model = cc.retrofit(base, layer_start=1, layer_end=3)
        >>> len(effective_memory(model, torch.tensor([[1, 2, 3, 4, 5, 6]]), position=2).remaining)
        5
    """
    inner = t2mlr_model(model)
    inputs, documents = read_inputs(inner, batch)
    num_tokens = documents.shape[1]
    position = num_tokens // 2 if position is None else position
    _check_memory_settings(position, num_tokens, horizon, size, num_directions)
    stop = min(num_tokens, position + horizon)
    with undisturbed(inner):
        cache = _advance(inner, {name: value[:, :position] for name, value in inputs.items()}, None)
        cache.batch_repeat_interleave(num_directions)
        repeated = {name: value.repeat_interleave(num_directions, dim=0) for name, value in inputs.items()}
        steps = [
            {name: value[:, column : column + 1] for name, value in repeated.items()}
            for column in range(position, stop)
        ]
        perturbed = _perturbed(cache.state.register, size, seed)
        started = cache.state.register.norm(dim=-1) > 0  # not before a row's first token
        differences = _differences(inner, steps, cache, perturbed)
    row = documents.repeat_interleave(num_directions, dim=0)
    current = row[:, :position].amax(dim=1, keepdim=True)
    counted = (row[:, position:stop] == current) & (current != PADDING) & started[:, None]
    if not bool(counted.any()):
        raise ValueError(f"no row has a token of the same document after column {position}: give another position.")
    curves = [(1.0, *_mean_curve(found / size, counted)) for found in differences]
    return Memory(*curves)


def _check_memory_settings(position: int, num_tokens: int, horizon: int, size: float, num_directions: int) -> None:
    if num_tokens < 2:
        raise ValueError("the batch has one column: give at least two tokens, one to perturb and one to watch.")
    if not 1 <= position < num_tokens:
        raise ValueError(f"position={position} is not allowed: give 1 to {num_tokens - 1}, for {num_tokens} columns.")
    for name, value in (("horizon", horizon), ("num_directions", num_directions)):
        if value < 1:
            raise ValueError(f"{name}={value} is not allowed: give at least 1.")
    if not size > 0:
        raise ValueError(f"size={size} is not allowed: give a positive number, such as 0.05.")


def _advance(model: T2MLRForCausalLM, inputs: dict[str, Tensor], cache: Any) -> Any:
    """The cache after more tokens."""
    given = {} if cache is None else {CACHE_NAME: cache}
    return getattr(model(**inputs, **given, solver=Sequential(), use_cache=True, return_dict=True), CACHE_NAME)


def _perturbed(register: Tensor, size: float, seed: int) -> Tensor:
    """The states [N, D], each moved by `size` of its norm in a direction of its own."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(register.shape, generator=generator).to(register)
    length = size * register.norm(dim=-1, keepdim=True)
    return register + length * direction / direction.norm(dim=-1, keepdim=True)


def _differences(
    model: T2MLRForCausalLM, steps: list[dict[str, Tensor]], clean: Any, perturbed: Tensor
) -> tuple[Tensor, Tensor]:
    """Relative differences [N, S] of the states after each step: all perturbed, and with clean keys and values."""
    free, state = _with_register(copy.deepcopy(clean), perturbed), perturbed
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step in steps:
        held = _advance(model, step, _with_register(copy.deepcopy(clean), state))
        clean, free = _advance(model, step, clean), _advance(model, step, free)
        state, reference = held.state.register, clean.state.register
        for values, register in zip(found, (free.state.register, state), strict=True):
            values.append((register - reference).norm(dim=-1) / reference.norm(dim=-1))
    return torch.stack(found[0], dim=1), torch.stack(found[1], dim=1)


def _with_register(cache: Any, register: Tensor) -> Any:
    cache.state = replace(cache.state, register=register)
    return cache


def _mean_curve(values: Tensor, counted: Tensor) -> list[float]:
    """Mean over rows [N, S] -> [S'] at the first, second, ... counted column of each."""
    order = (~counted).to(torch.int8).argsort(dim=1, stable=True)
    values, counted = values.gather(1, order), counted.gather(1, order)
    totals, counts = torch.where(counted, values, 0).sum(dim=0), counted.sum(dim=0)
    return (totals / counts)[counts > 0].tolist()


@dataclass(frozen=True)
class Telemetry:
    """A model's recurrence in a few numbers.

    Attributes:
        current_gate, recurrent_gate: mean of the sigmoid gates over tokens and features.
        current_opening, recurrent_opening: tanh of the two scalars.
        stream_norm, state_norm: mean 2-norms of what meets at the fusion, over tokens that have a predecessor.
        change: mean size of what the fusion adds to the stream, relative to it.
        residuals: relative change of the states in each iteration of the model's own solver.
        memory: how a perturbation of the state dies away.
    """

    current_gate: float
    recurrent_gate: float
    current_opening: float
    recurrent_opening: float
    stream_norm: float
    state_norm: float
    change: float
    residuals: tuple[float, ...]
    memory: Memory

    def named(self) -> dict[str, float]:
        """All of it as named numbers. An effective memory longer than was measured is left out."""
        values = {
            name: getattr(self, name)
            for name in (
                "current_gate",
                "recurrent_gate",
                "current_opening",
                "recurrent_opening",
                "stream_norm",
                "state_norm",
                "change",
            )
        }
        values |= {f"residual_{place}": value for place, value in enumerate(self.residuals, start=1)}
        tokens = {
            "effective_memory": self.memory.tokens,
            "effective_memory_clean": self.memory.tokens_clean,
        }
        return values | {name: float(value) for name, value in tokens.items() if value is not None}


def measure_recurrence(model: Any, batch: Batch, horizon: int = 32) -> Telemetry:
    """Measure all of `Telemetry` on one batch. A few rows of some dozens of tokens are enough.

    Costs about T + 3 * horizon single-token steps and one pass with the model's own solver.

    Args:
        model: a T2MLR model, or one wrapped by PEFT or data parallelism. It is left as it was.
        batch: token ids [B, T], or a mapping as `train_decode_gap` takes it.
        horizon: watch a perturbation for at most so many tokens.

    Raises:
        ValueError: the model is not a T2MLR model with feedback, an input does not fit, or no token is recurrent.

    Example:
        >>> import crosscurrent as cc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> base = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                                     num_attention_heads=4))
        >>> measured = measure_recurrence(cc.retrofit(base, layer_start=1, layer_end=3), torch.tensor([[1, 2, 3, 4]]))
        >>> measured.current_opening, measured.change
        (0.0, 0.0)
    """
    inner = t2mlr_model(model)
    found = trace(inner, batch)
    if not bool(found.fused.any()):
        raise ValueError("no token of the batch is recurrent: give a recurrent_mask with some, or none at all.")
    has_predecessor = found.fused & (found.state_norm > 0)
    current, recurrent = gate_openings(inner)
    return Telemetry(
        current_gate=_mean(found.current_gate, found.fused),
        recurrent_gate=_mean(found.recurrent_gate, found.fused),
        current_opening=current,
        recurrent_opening=recurrent,
        stream_norm=_mean(found.stream_norm, has_predecessor),
        state_norm=_mean(found.state_norm, has_predecessor),
        change=_mean(found.change, found.fused),
        residuals=residuals(inner, batch),
        memory=effective_memory(inner, batch, horizon=horizon),
    )


def _mean(values: Tensor, chosen: Tensor) -> float:
    return values[chosen].mean().item() if bool(chosen.any()) else 0.0


def residuals(model: T2MLRForCausalLM, batch: Batch, solver: Solver | None = None) -> tuple[float, ...]:
    """Relative change of the states in each iteration of a solver, by default of the model's own."""
    inputs, _ = read_inputs(model, batch)
    with undisturbed(model):
        report = model(**inputs, solver=solver, use_cache=False, return_dict=True, logits_to_keep=1).solver_report
    return tuple(report.residuals.tolist())


def lens_logits(model: Any, states: Tensor) -> Tensor:
    """Logits [..., V] of states [..., D] read as if they were the last layer's output: final norm, output matrix.

    Raises:
        ValueError: the model is not a T2MLR model, or its final norm is in none of the known places.
    """
    inner = t2mlr_model(model)
    norm = next((_submodule(inner, path) for path in FINAL_NORMS if _submodule(inner, path) is not None), None)
    head: Any = inner.get_output_embeddings()
    if norm is None or head is None:
        raise ValueError(
            f"{type(inner).__name__} has no final norm in a known place ({', '.join(FINAL_NORMS)}) or no output matrix."
        )
    with undisturbed(inner):
        logits: Tensor = head(norm(states.to(head.weight.dtype)))
    cap = getattr(inner.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
