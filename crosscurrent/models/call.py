"""One `forward` call of a recurrent model: everything that is settled before the first layer runs."""

from contextlib import AbstractContextManager, nullcontext
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
    Implicit,
    Plan,
    Problem,
    RecurrentState,
    Schedule,
    Solution,
    Solver,
    Tokens,
    as_solver,
    solve_single,
)
from crosscurrent.recurrence.steps import steps_of_decoding


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

    def solve(self, problem: Problem) -> Solution:
        """The solution by the call's solver. One token needs none; for training the solver's own gradient rule applies."""
        if self.plan.num_tokens == 1 and not torch.is_grad_enabled():
            return solve_single(problem, self.solver.name)
        return self.solver.solve(problem)

    def steps(self) -> AbstractContextManager[Any]:
        """Within this, a token that is decoded on a CPU finds the weights as `fixed_weights` keeps them."""
        steps = steps_of_decoding()
        is_decoding = self.plan.num_tokens == 1 and self.keeps_cache and not torch.is_grad_enabled()
        if steps is None or not is_decoding or self.plan.fused.device.type != "cpu":
            return nullcontext()
        return steps.active()

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
    chosen = as_solver(solver if solver is not None else config.solver)
    if given is not None and given.num_places is not None:
        _check_static(given, shape[1], model.training or isinstance(getattr(chosen, "rule", None), Implicit))
    state = given.state if given is not None and given.state is not None else model.start_state(shape[0])
    if attention_mask is not None or given is not None:
        position_ids = None  # only a batch without either tells its documents by its positions alone
    if (given is None or given.is_plain) and _hides_nothing(attention_mask, shape, past_labels):
        attention_mask = None
    says_nothing = attention_mask is None and segment_ids is None and position_ids is None
    schedule = Schedule(config.feedback_interval)
    if shape[1] == 1 and says_nothing and recurrent_mask is None and given is not None and given.has_plain_tokens:
        plan, is_plain = schedule.plan_next(state), True
    else:
        is_real = real_tokens(attention_mask, shape, past_labels, device)
        labels = document_labels(segment_ids, position_ids, is_real, state.segment)
        is_plain = (given is None or given.is_plain) and (says_nothing or _is_one_document(labels, state, given))
        recurrent = read_mask("recurrent_mask", recurrent_mask, shape, device)
        plan = schedule.plan(Tokens(labels=labels, recurrent=recurrent), state)
    keeps_cache = _keeps_cache(model, use_cache, given)
    return Call(
        plan=plan,
        state=state,
        solver=chosen,
        key_labels=_key_labels(past_labels, plan.labels, is_plain),
        is_plain=is_plain,
        branch=(given if given is not None else model.new_cache()).branch()
        if keeps_cache or given is not None
        else None,
        given=given,
        keeps_cache=keeps_cache,
        returns_dict=bool(config.return_dict if return_dict is None else return_dict),
    )


def _check_static(cache: RecurrentCache, num_new: int, makes_gradients: bool) -> None:
    assert cache.num_places is not None
    if makes_gradients and torch.is_grad_enabled():
        raise ValueError(
            "a cache with max_cache_len is overwritten in place, which gradients do not survive: use another, or call the "
            "model within torch.no_grad()."
        )
    if cache.num_columns + num_new > cache.num_places:
        raise ValueError(
            f"the cache has room for {cache.num_places} tokens, holds {cache.num_columns} and is to take {num_new} more: "
            "make a larger one (model.new_cache(max_cache_len=...))."
        )


def _hides_nothing(mask: Tensor | None, shape: tuple[int, int], past_labels: Tensor | None) -> bool:
    """Whether a mask calls all tokens real. One that does not fit is left to `real_tokens` to refuse."""
    if mask is None or mask.dim() != 2 or torch.compiler.is_compiling():  # compiled code must not look into tensors
        return False
    num_past = 0 if past_labels is None else past_labels.shape[1]
    return mask.shape[0] == shape[0] and mask.shape[1] - shape[1] in (0, num_past) and bool(mask.all())


def _is_one_document(labels: Tensor, state: RecurrentState, given: RecurrentCache | None) -> bool:
    """Whether new tokens [B, T] are all real and of one document per row, the one that a row of the cache is in."""
    document = labels[:, 0] if given is None or given.num_columns == 0 else state.segment
    return bool(((labels == document[:, None]) & (labels != PADDING)).all())


def _key_labels(past_labels: Tensor | None, labels: Tensor, is_plain: bool) -> Tensor:
    if past_labels is None:
        return labels
    if is_plain:  # all of a row are the same: a view of one, where decoding would copy all of them for each token
        return labels[:, :1].expand(-1, past_labels.shape[1] + labels.shape[1])
    return torch.cat([past_labels, labels], dim=1)


def _keeps_cache(model: Caller, use_cache: bool | None, given: RecurrentCache | None) -> bool:
    if use_cache is not None:
        return use_cache
    return given is not None or (not model.training and bool(getattr(model.config, "use_cache", True)))
