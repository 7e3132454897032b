"""Configuration of a retrofitted model."""

from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from transformers import AutoConfig, PreTrainedConfig

from crosscurrent.models.base import shareable_name
from crosscurrent.models.checkpoints import refuse_misspelt_settings, refuse_other_model_type
from crosscurrent.recurrence import GatesRead, Implicit, Jacobi, Schedule, as_solver, solver_to_dict

DEFAULT_SOLVER = Jacobi(iterations=4, gradient=Implicit(iterations=2), scan=True, guess="inputs")  # see docs/solvers.md


class T2MLRConfig(PreTrainedConfig):
    """A base model's configuration and the recurrent range in it (T2MLR, arXiv 2607.15178).

    What is not listed here (hidden_size, vocab_size, ...) is the base's and can be read from this object too.

    Args:
        base_config: configuration of the base model, as an object or as the dictionary that it saves.
        layer_start, layer_end: the half-open range of layers, counted from 0, whose output is fed back.
        feedback_interval: 1: a token reads the state of the token before it; B > 1: that of the last complete chunk
            of B tokens; None: no feedback.
        prompt_recurrence: whether prompt tokens are recurrent in `generate`. Set it as the model was trained.
        detach_residual: no gradient through the R_{t-1} term of the cache update.
        state_dtype: of the carried state ("float32", "bfloat16", ...). None: the model's, but at least float32.
        state_eps: epsilon of the cache update's norm. None: that of the base's norms.
        gates_read: "state": the gates see R itself, as in the paper; "projected_state": W_rec R, as in the authors' code.
        state_bound: None: the cache update ends in an RMSNorm, as in the paper. A number, 5.0 in the authors' code: it
            brings the state to unit RMS by a factor between 1 / state_bound and state_bound, which the gradient takes for a
            constant, without a learned weight, and only where R was read (see `BoundedSum`).
        residual_weight: of R_{t-1} in the cache update, if there is a state_bound.
        solver: what `forward` uses unless told otherwise, as `cc.Jacobi(...)`, `cc.Sequential(...)`, or a dictionary
            `{"name": "jacobi", "iterations": 16, ...}`. None: `DEFAULT_SOLVER`, chosen in docs/solvers.md; the paper's is
            `cc.Jacobi(iterations=16, backward_iterations=4)`.

    Raises:
        ValueError: the range does not lie in the model, or another value is not allowed.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = T2MLRConfig(base_config=LlamaConfig(num_hidden_layers=30), layer_start=12, layer_end=18)
        >>> config.num_hidden_layers
        30
    """

    model_type = "crosscurrent_t2mlr"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "solver_report"]
    auto_map: ClassVar[dict[str, str]] = {}  # no code in checkpoints; TRL asks for it to load a reference model

    base_config: Any = None
    layer_start: int = 0
    layer_end: int = 0
    feedback_interval: int | None = 1
    prompt_recurrence: bool = True
    detach_residual: bool = False
    state_dtype: Any = None
    state_eps: float | None = None
    gates_read: Any = "state"
    state_bound: float | None = None
    residual_weight: float = 1.0
    solver: Any = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        refuse_other_model_type(cls, config_dict)
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        base, self.base_config = self.base_config, None  # set last: what the base has must not look like our own
        base = _as_config(base)
        for_base = {name: kwargs.pop(name) for name in list(kwargs) if _is_own_field(base, name)}
        refuse_misspelt_settings(self, kwargs)
        super().__post_init__(**kwargs)
        self.base_config = base
        for name, value in for_base.items():
            setattr(base, name, value)
        self._attn_implementation = self.__dict__.get(
            "_attn_implementation_internal"
        )  # on to the base, if one was asked for
        Schedule(self.feedback_interval)
        _check_state_settings(self)
        if self.solver is None:
            self.solver = DEFAULT_SOLVER
        if self.base_config is not None:
            check_layer_range(self.layer_start, self.layer_end, self.get_text_config().num_hidden_layers)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """The base's configuration: the one that describes layers, vocabulary and attention."""
        base = self.__dict__.get("base_config")
        return self if base is None else base.get_text_config(*args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers. Of a base that was a local folder only the folder's name is kept."""
        settings: dict[str, Any] = super().to_dict()
        base = settings.get("base_config")
        was_local = settings.pop("_base_was_local", False)
        if isinstance(base, dict) and base.get("_name_or_path"):
            name = shareable_name(base["_name_or_path"])
            base["_name_or_path"] = Path(name).name if was_local else name
        return settings

    @property
    def base_name(self) -> str:
        """The base's id on the hub, or the name of the folder that it was loaded from; empty if it has neither."""
        return self.to_dict()["base_config"].get("_name_or_path") or ""

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.__dict__.get("base_config")
        if _is_own_field(base, name):
            setattr(base, name, value)  # use_cache, pad_token_id, ...: there is one of each, the base's
        elif name == "state_dtype" and value is not None:
            super().__setattr__(name, str(value).removeprefix("torch."))  # as configurations hold it
        elif name == "solver" and value is not None:
            super().__setattr__(name, solver_to_dict(as_solver(value)))
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base_config")
        if base is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(base, name)

    @property
    def _attn_implementation(self) -> str | None:
        base = self.__dict__.get("base_config")
        return self.__dict__.get("_attn_implementation_internal") if base is None else base._attn_implementation

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        self._attn_implementation_internal = value
        base = self.__dict__.get("base_config")
        if base is not None and value is not None:
            base._attn_implementation = value


def _is_own_field(base: Any, name: str) -> bool:
    """Whether a setting is the base's, and not one that every configuration has."""
    if not isinstance(base, PreTrainedConfig) or name in T2MLRConfig.__dataclass_fields__:
        return False
    return name in type(base).__dataclass_fields__ or name in base.attribute_map


def check_layer_range(layer_start: int, layer_end: int, num_hidden_layers: int) -> None:
    """Raise unless 0 <= layer_start < layer_end <= num_hidden_layers, all integers."""
    are_integers = type(layer_start) is int and type(layer_end) is int
    if not are_integers or not 0 <= layer_start < layer_end <= num_hidden_layers:
        raise ValueError(
            f"layer_start={layer_start}, layer_end={layer_end} is not a range of this model's layers: allowed is "
            f"0 <= layer_start < layer_end <= {num_hidden_layers} (half-open: [12, 18) are layers 12 to 17)."
        )


def _check_state_settings(config: T2MLRConfig) -> None:
    if config.gates_read not in get_args(GatesRead):
        raise ValueError(f"gates_read={config.gates_read!r} is not allowed: give one of {get_args(GatesRead)}.")
    dtype = None if config.state_dtype is None else getattr(torch, config.state_dtype, None)
    if config.state_dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"state_dtype={config.state_dtype!r} is not allowed: give 'float32', 'bfloat16', ..., or None."
        )
    if config.state_bound is not None and not config.state_bound > 1:
        raise ValueError(f"state_bound={config.state_bound!r} is not allowed: give a number above 1, or None.")
    if config.state_eps is not None and not config.state_eps >= 0:
        raise ValueError(f"state_eps={config.state_eps!r} is not allowed: give a number of at least 0, or None.")
    if config.residual_weight != 1.0 and config.state_bound is None:
        raise ValueError(
            f"residual_weight={config.residual_weight!r} has no effect without a state_bound: leave it at 1.0."
        )


def _as_config(base: Any) -> PreTrainedConfig | None:
    if base is None or isinstance(base, PreTrainedConfig):
        return base
    settings = dict(base)
    model_type = settings.pop("model_type", None)
    if model_type is None:
        raise ValueError("base_config has no model_type: give a configuration object, or the dictionary that it saves.")
    return AutoConfig.for_model(model_type, **settings)
