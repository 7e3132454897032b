"""T2MLR: recurrence over the middle layers of any transformers causal language model."""

from crosscurrent.models.t2mlr.configuration_t2mlr import T2MLRConfig
from crosscurrent.models.t2mlr.modeling_t2mlr import T2MLRCache, T2MLRForCausalLM
from crosscurrent.models.t2mlr.retrofitting import retrofit

__all__ = ["T2MLRCache", "T2MLRConfig", "T2MLRForCausalLM", "retrofit"]
