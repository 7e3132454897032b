"""One `forward` call of a recurrent model: everything that is settled before the first layer runs."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from crosscurrent.models.cache import RecurrentCache, as_recurrent_cache
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.inputs import check_token_ids, document_labels, read_mask, real_tokens
from crosscurrent.models.outputs import RecurrentCausalLMOutput
from crosscurrent.recurrence import (
    PADDING,
    Plan,
    RecurrentState,
    Schedule,
    Solution,
    Solver,
    Tokens,
    as_solver,
)


class Caller(Protocol):
    """What a call needs to know of its model."""

    config: Any
    training: bool

    @property
    def cache_class(self) -> type[RecurrentCache]: ...

    def new_cache(self) -> RecurrentCache: ...

    def start_state(self, batch_size: int) -> RecurrentState: ...


@dataclass(frozen=True)
class Call:
    """A call's tokens, what they read, what it continues from and what it keeps.

    Attributes:
        plan: the schedule for its tokens.
        state: what it continues from.
        solver: how it is solved.
        key_labels: [B, P + T] the document of each token so far, earlier calls included.
        is_plain: no padding and one document per row, so that attention needs no more than causality.
        branch: the cache to write to, or None.
        given: the caller's own cache, untouched until `finish`.
        keeps_cache: whether the caller gets a cache back.
        returns_dict: whether the caller gets an output object, not a tuple.
    """

    plan: Plan
    state: RecurrentState
    solver: Solver
    key_labels: Tensor
    is_plain: bool
    branch: RecurrentCache | None
    given: RecurrentCache | None
    keeps_cache: bool
    returns_dict: bool

    @property
    def keeps_registers(self) -> bool:
        return self.keeps_cache and self.branch is not None and self.branch.records_past

    def finish(self, result: RecurrentCausalLMOutput, solution: Solution) -> RecurrentCausalLMOutput | tuple[Any, ...]:
        """Hand over the cache and the report, now that the call has succeeded."""
        result["solver_report"] = solution.report
        if self.keeps_cache:
            assert self.branch is not None
            self.branch.record(self.state, solution, self.key_labels, self.is_plain)
            result[CACHE_NAME] = self.branch.commit_to(self.given)
        return result if self.returns_dict else result.to_tuple()


def begin_call(
    model: Caller,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    *,
    device: torch.device,
    attention_mask: Tensor | None,
    recurrent_mask: Tensor | None,
    segment_ids: Tensor | None,
    position_ids: Tensor | None,
    cache: Any,
    use_cache: bool | None,
    solver: Solver | None,
    return_dict: bool | None,
) -> Call:
    """Check what was passed to `forward` (its docstring tells what each argument means) and complete it.

    Raises:
        ValueError: something does not fit.
    """
    config: PreTrainedConfig = model.config
    given = as_recurrent_cache(cache, model.cache_class)
    shape = check_token_ids(input_ids, inputs_embeds, config.get_text_config().vocab_size)
    past_labels = given.key_labels if given is not None else None
    if past_labels is not None and past_labels.shape[0] != shape[0]:
        raise ValueError(
            f"the cache holds {past_labels.shape[0]} rows and the call has {shape[0]}: give as many rows, or repeat or "
            "select the cache's rows first (batch_repeat_interleave, batch_select_indices)."
        )
    if given is not None and given.num_places is not None:
        _check_static(given, shape[1], model.training)
    state = given.state if given is not None and given.state is not None else model.start_state(shape[0])
    is_real = real_tokens(attention_mask, shape, past_labels, device)
    if attention_mask is not None or given is not None:
        position_ids = None  # only a batch without either tells its documents by its positions alone
    labels = document_labels(segment_ids, position_ids, is_real, state.segment)
    tokens = Tokens(labels=labels, recurrent=read_mask("recurrent_mask", recurrent_mask, shape, device))
    key_labels = labels if past_labels is None else torch.cat([past_labels, labels], dim=1)
    keeps_cache = _keeps_cache(model, use_cache, given)
    return Call(
        plan=Schedule(config.feedback_interval).plan(tokens, state),
        state=state,
        solver=as_solver(solver if solver is not None else config.solver),
        key_labels=key_labels,
        is_plain=_is_plain(key_labels, attention_mask, segment_ids, position_ids, given),
        branch=(given if given is not None else model.new_cache()).branch()
        if keeps_cache or given is not None
        else None,
        given=given,
        keeps_cache=keeps_cache,
        returns_dict=bool(config.return_dict if return_dict is None else return_dict),
    )


def _check_static(cache: RecurrentCache, num_new: int, is_training: bool) -> None:
    assert cache.num_places is not None
    if is_training and torch.is_grad_enabled():
        raise ValueError(
            "a cache with max_cache_len is overwritten in place, which gradients do not survive: use another."
        )
    if cache.num_columns + num_new > cache.num_places:
        raise ValueError(
            f"the cache has room for {cache.num_places} tokens, holds {cache.num_columns} and is to take {num_new} more: "
            "make a larger one (model.new_cache(max_cache_len=...))."
        )


def _is_plain(
    key_labels: Tensor,
    attention_mask: Tensor | None,
    segment_ids: Tensor | None,
    position_ids: Tensor | None,
    given: RecurrentCache | None,
) -> bool:
    """Known without asking the device if nothing was said of padding or documents, now or earlier."""
    if given is not None and not given.is_plain:
        return False
    if attention_mask is None and segment_ids is None and position_ids is None:
        return True
    return bool(((key_labels == key_labels[:, :1]) & (key_labels != PADDING)).all())


def _keeps_cache(model: Caller, use_cache: bool | None, given: RecurrentCache | None) -> bool:
    if use_cache is not None:
        return use_cache
    return given is not None or (not model.training and bool(getattr(model.config, "use_cache", True)))
