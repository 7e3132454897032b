"""One call of a retrofitted model: the recurrence, solved in the middle of the base's own forward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscurrent.models.call import Call
from crosscurrent.models.sharding import weights_come_and_go
from crosscurrent.models.t2mlr.dtypes import InStreamDtype
from crosscurrent.models.t2mlr.layer_range import LayerCall, LayerRange
from crosscurrent.recurrence import Implicit, Problem, Solution


class RangeRun:
    """The recurrence of one `forward` call, solved in the middle of the base model's own loop."""

    def __init__(self, model: Any, call: Call):
        self.model, self.call = model, call
        self.solution: Solution | None = None
        self.core: LayerRange
        self.inputs: Tensor

    def solve(self, hidden: Tensor, layer_calls: list[LayerCall]) -> Tensor:
        self.inputs = hidden
        self.core = LayerRange(layer_calls, self.call.branch, self.model.config)
        with self.call.steps():
            problem = Problem(
                inputs=hidden,
                plan=self.call.plan,
                state=self.call.state,
                fuse=InStreamDtype(self.model.fusion),
                core=self.core,
                carry=self.model.carry,
                keeps_registers=self.call.keeps_registers,
                shares_weights=self.call.plan.num_tokens > 1 and not weights_come_and_go(self.model.fusion),
            )
            self.solution = solution = self.call.solve(problem)
        if self.call.branch is not None:  # the layers after the range write into the same cache
            self.call.branch.layers = solution.past.layers
        return self._with_all_gradients(solution.outputs)

    def _with_all_gradients(self, outputs: Tensor) -> Tensor:
        """Let the carry have a gradient, be it zero, also where no token reads a state: processes that share a step must
        agree on the parameters that have one. (The fusion always takes part: `Problem.fused`.)"""
        carry = self.model.carry
        if not (torch.is_grad_enabled() and any(weight.requires_grad for weight in carry.parameters())):
            return outputs
        first = outputs[:, :1].detach()
        state = carry(first, first, self.call.plan.fused[:, :1, None])  # called, since its weights may come and go
        return outputs + (0 * state.sum()).to(outputs.dtype)

    def sorted_hidden_states(self, recorded: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        """One entry per layer. What was recorded has the layers of the range once for each time they ran."""
        if recorded is None:
            return None
        start, width = self.model.config.layer_start, len(self.core.calls)
        runs = self._runs("output_hidden_states")
        first = start + 1
        after = first + width * len(runs)
        groups = [recorded[first + width * i : first + width * (i + 1)] for i in range(len(runs))]
        last = [groups[i] for i in self._last_runs(runs)]
        if len(last) == 1:
            in_range = list(last[0])
        else:
            in_range = [torch.cat(parts, dim=1) for parts in zip(*(group[: width - 1] for group in last), strict=True)]
            # The base puts its last layer's entry through the final norm, at full length.
            whole = groups[-1][-1].shape[1] == self.call.plan.num_tokens
            in_range.append(groups[-1][-1] if whole else torch.cat([group[-1] for group in last], dim=1))
        before = recorded[:first]
        if start == 0:
            before = (self.inputs,)
        return (*before, *map(self._without_gradient_if_implicit, in_range), *recorded[after:])

    def _without_gradient_if_implicit(self, recorded: Tensor) -> Tensor:
        """An implicit gradient is completed behind the range: through what is recorded inside of it, it would be wrong."""
        if not (recorded.requires_grad and isinstance(getattr(self.call.solver, "rule", None), Implicit)):
            return recorded

        def refuse(_: Tensor) -> None:
            raise RuntimeError(
                "with an implicit gradient there is none through hidden_states and attentions of the recurrent range. Solve "
                "with gradients through passes, such as cc.Jacobi(iterations=16, backward_iterations=4)."
            )

        shown = recorded.view_as(recorded)
        shown.register_hook(refuse)
        return shown

    def _runs(self, asked_for: str) -> list[range]:
        if not self.core.runs:
            raise ValueError(f"{asked_for} is not supported in compiled code: call the model that is not compiled.")
        return self.core.runs

    @staticmethod
    def _last_runs(runs: list[range]) -> list[int]:
        """Of the runs over each range of columns the last one, in the order of the columns."""
        last = {columns.start: index for index, columns in enumerate(runs) if columns}
        return [last[start] for start in sorted(last)]

    def sorted_attentions(self, recorded: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        """One entry per layer, [B, H, T, K]. Ranges of columns that ran apart did not see all keys: zeros are put there."""
        if not recorded:
            return recorded
        start, width, runs = self.model.config.layer_start, len(self.core.calls), self._runs("output_attentions")
        last = self._last_runs(runs)
        in_range = [
            self._joined([recorded[start + width * index + layer] for index in last], [runs[index] for index in last])
            for layer in range(width)
        ]
        return (*recorded[:start], *in_range, *recorded[start + width * len(runs) :])

    def _joined(self, attentions: list[Tensor], runs: list[range]) -> Tensor:
        is_static = self.call.branch is not None and self.call.branch.num_places is not None
        later = [0 if is_static else self.call.plan.num_tokens - columns.stop for columns in runs]
        num_keys = max(part.shape[-1] + num_later for part, num_later in zip(attentions, later, strict=True))
        # Keys that are missing in front have left a sliding window.
        parts = [
            F.pad(part, (num_keys - part.shape[-1] - num_later, num_later))
            for part, num_later in zip(attentions, later, strict=True)
        ]
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
