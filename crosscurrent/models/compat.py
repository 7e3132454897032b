"""The one difference between the supported releases of transformers that reaches our code."""

import inspect

from transformers import LlamaForCausalLM

# transformers 5.24 renamed the argument and output field `past_key_values` to `cache`.
CACHE_NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
