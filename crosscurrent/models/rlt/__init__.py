"""RLT: a causal encoder and a recurrent decoder."""

from crosscurrent.models.rlt.configuration_rlt import RLTConfig
from crosscurrent.models.rlt.modeling_rlt import RLTCache, RLTForCausalLM

__all__ = ["RLTCache", "RLTConfig", "RLTForCausalLM"]
