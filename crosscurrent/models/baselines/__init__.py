"""Models to compare with that transformers does not have."""

from crosscurrent.models.baselines.configuration_lstm import LSTMConfig
from crosscurrent.models.baselines.modeling_lstm import LSTMForCausalLM

__all__ = ["LSTMConfig", "LSTMForCausalLM"]
