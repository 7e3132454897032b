"""Temporal recurrence for decoder-only Transformers: T2MLR and RLT on PyTorch and Hugging Face transformers.

Importing this package registers its models with transformers' Auto classes and has no other effect.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from crosscurrent.models.base import load_base, load_tokenizer
from crosscurrent.models.baselines import LSTMConfig, LSTMForCausalLM
from crosscurrent.models.checkpoints import CheckpointError
from crosscurrent.models.rlt import RLTCache, RLTConfig, RLTForCausalLM
from crosscurrent.models.t2mlr import T2MLRCache, T2MLRConfig, T2MLRForCausalLM, retrofit
from crosscurrent.recurrence import (
    ConvergenceError,
    Implicit,
    Jacobi,
    LastPasses,
    RecurrentState,
    Sequential,
    SolverReport,
    Sweeps,
    compiled_steps,
    fixed_weights,
    use_triton,
)
from crosscurrent.version import __version__

__all__ = [
    "CheckpointError",
    "ConvergenceError",
    "Implicit",
    "Jacobi",
    "LSTMConfig",
    "LSTMForCausalLM",
    "LastPasses",
    "RLTCache",
    "RLTConfig",
    "RLTForCausalLM",
    "RecurrentState",
    "Sequential",
    "SolverReport",
    "Sweeps",
    "T2MLRCache",
    "T2MLRConfig",
    "T2MLRForCausalLM",
    "__version__",
    "compiled_steps",
    "fixed_weights",
    "load_base",
    "load_tokenizer",
    "retrofit",
    "use_triton",
]

for _config_class, _model_class in (
    (T2MLRConfig, T2MLRForCausalLM),
    (RLTConfig, RLTForCausalLM),
    (LSTMConfig, LSTMForCausalLM),
):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModelForCausalLM.register(_config_class, _model_class, exist_ok=True)
