"""Started in a new process: load a saved model as any user of transformers would, and report what it computes.

    echo '{"folder": "...", "probe": "...", "problem": "..."}' | python -m crosscurrent.experiments.demo.reload LOGITS

writes the logits of the probe into the file LOGITS and prints the rest as JSON.
"""

import json
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers import logging as transformers_logging

import crosscurrent  # noqa: F401  # its import is what lets AutoModelForCausalLM know the model
from crosscurrent.experiments.checks import fingerprint, logits_of

NUM_CONTINUATION_TOKENS = 16


def main() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    request = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    model: Any = AutoModelForCausalLM.from_pretrained(request["folder"])
    probe = tokenizer(request["probe"], return_tensors="pt")["input_ids"]
    save_file({"logits": logits_of(model, probe)}, sys.argv[1])
    answers = {
        "model_class": type(model).__name__,
        "fingerprint": fingerprint(model),
        "answer": continuation(model, tokenizer, request["problem"], num_tokens=1),
        "continuation": continuation(model, tokenizer, request["probe"], NUM_CONTINUATION_TOKENS),
    }
    print(json.dumps(answers))


@torch.no_grad()
def continuation(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, num_tokens: int) -> str:
    """The text that the model generates after a prompt, greedily."""
    inputs = tokenizer(prompt, return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
