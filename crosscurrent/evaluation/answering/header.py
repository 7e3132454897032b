"""What records of outputs depend on: enough to know whether others may join them or be compared with them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from crosscurrent.evaluation.answering.generating import recurrence_of
from crosscurrent.evaluation.answering.records import FORMAT
from crosscurrent.evaluation.answering.settings import AnsweringSettings
from crosscurrent.models.base import shareable_name
from crosscurrent.suggestions import differences
from crosscurrent.tasks.reasoning import Problem, ReasoningTask

# Of a configuration: where it came from and which software wrote it, neither of which changes an output.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def header_of(
    model: Any,
    task: ReasoningTask,
    problems: Sequence[Problem],
    prompts: Sequence[list[int]],
    settings: AnsweringSettings,
    end_ids: Sequence[int],
    name: str = "",
) -> dict[str, Any]:
    """Plain values that say what outputs depend on.

    Args:
        model: that writes them.
        task: with its options.
        problems: the problems.
        prompts: their token ids.
        settings: how they are put to the model.
        end_ids: tokens at which outputs end.
        name: of the model, to be read by people; of a folder only the last part is kept.
    """
    header = {
        "format": FORMAT,
        "task": {"name": task.name, "options": asdict(task)},  # type: ignore[call-overload]
        "num_problems": len(problems),
        "data": _digest([_parts(problem) for problem in problems]),
        "settings": settings.text_settings(task),
        "prompts": _digest(list(prompts)),
        "recurrence": recurrence_of(model, settings),
        "end_ids": list(end_ids),
        "model": {"name": shareable_name(name), "fingerprint": fingerprint(model)},
    }
    plain: dict[str, Any] = json.loads(json.dumps(header, default=str))  # as it is read again: tuples are lists
    return plain


def _parts(problem: Problem) -> list[Any]:
    """All that a verdict depends on."""
    parts = [problem.id, problem.question, problem.answer]
    return [*parts, dict(problem.details)] if problem.details else parts


def refuse_incomparable(header: dict[str, Any], baseline: dict[str, Any], name: str = "the baseline") -> None:
    """Raise ValueError unless two headers are of the same problems, put in the same way. The models may differ.

    Args:
        header, baseline: as `header_of` makes them.
        name: of the baseline, for the message.
    """
    found = [
        line
        for part in ("task", "num_problems", "data", "settings")
        for line in differences(baseline.get(part), header.get(part), part)
    ]
    if found:
        raise ValueError(
            f"{name} is not of the same problems, asked in the same way ({'; '.join(found[:3])}): evaluate both with the "
            "same tasks, limit and settings."
        )


def fingerprint(model: Any) -> str:
    """A short text that differs for models whose configuration or weights differ, but for weights that changed places.

    The weights of each tensor are added up as integers, which is quick and exact, whatever the device and the order.
    """
    weights = [[name, str(value.dtype), list(value.shape), _sum(value)] for name, value in model.state_dict().items()]
    return _digest([_cleaned(model.config.to_dict()), weights])


def _sum(value: Any) -> int:
    if not isinstance(value, Tensor) or value.numel() == 0:
        return 0
    return int(value.detach().contiguous().view(_INTEGERS[value.element_size()]).sum(dtype=torch.int64))


def _cleaned(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {str(key): _cleaned(value) for key, value in settings.items() if key not in _NOT_OF_THE_MODEL}
    return settings


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
