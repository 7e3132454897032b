"""The README.md that goes with a saved model, so that whoever finds it knows what it is and how to load it."""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel

from crosscurrent.models.base import hub_id
from crosscurrent.recurrence import as_solver
from crosscurrent.version import __version__

INSTALL = "pip install crosscurrent"
FILE = "README.md"

_PAPER = "https://arxiv.org/abs/2607.15178"

# Rows of the card: what it says, and the setting that it is about.
_SETTINGS = {
    "encoder layers": "num_encoder_layers",
    "decoder layers": "num_decoder_layers",
    "encoder's window": "encoder_sliding_window",
    "memory's window": "memory_sliding_window",
    "decoder's window": "sliding_window",
    "memory groups": "num_memory_groups",
    "feedback scale": "feedback_scale",
    "noise on the state in training": "state_noise",
    "feedback interval": "feedback_interval",
    "prompt recurrence": "prompt_recurrence",
}


def write_model_card(
    model: PreTrainedModel, folder: Path, command: str | None = None, tags: Sequence[str] = ()
) -> None:
    """Write `model_card` into a folder that holds a saved model. A README.md that is there already stays as it is."""
    if not (folder / FILE).exists():
        model_card(model, command, tags).save(folder / FILE)


def model_card(model: PreTrainedModel, command: str | None = None, tags: Sequence[str] = ()) -> ModelCard:
    """What a model is, how to load it and how it was made. Local folders are called by their names only.

    Args:
        model: any of this package's.
        command: what was typed to make it. None: the call, as far as the configuration tells it.
        tags: for the hub, besides the usual ones.

    Example:
        >>> from crosscurrent import RLTConfig, RLTForCausalLM
        >>> card = model_card(RLTForCausalLM(RLTConfig(vocab_size=7, hidden_size=8, intermediate_size=8)))
        >>> card.data.library_name
        'crosscurrent'
    """
    config: Any = model.config
    base_config = config.__dict__.get("base_config")
    base = None if base_config is None else config.base_name
    data = ModelCardData(
        library_name="crosscurrent",
        pipeline_tag="text-generation",
        base_model=hub_id(base) if base else None,
        tags=list(dict.fromkeys(["crosscurrent", config.model_type.removeprefix("crosscurrent_"), *tags])),
    )
    if command:
        made = f"```bash\n{_plain(command, longest=2000)}\n```"
    else:
        made = f"A model of its kind, before any training:\n\n```python\n{_call(model)}\n```"
    rows = "\n".join(f"| {what} | {value} |" for what, value in _facts(model, base).items())
    sections = (
        f"# {_title(model, base)}",
        _summary(config, base),
        f"| | |\n| --- | --- |\n{rows}",
        f"## Use\n\n```bash\n{INSTALL}\n```\n\n```python\n{_USE}\n```\n\n{_NOTE}",
        f"## How it was made\n\n{made}",
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


_USE = """import crosscurrent  # makes the model known to transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("this folder, or its id on the hub")"""
_NOTE = "Without `import crosscurrent` transformers says that it does not recognize the architecture."


def _title(model: PreTrainedModel, base: str | None) -> str:
    return f"{_plain(base)} with temporal recurrence" if base else type(model).__name__


def _summary(config: Any, base: str | None) -> str:
    if "base_config" not in config.__dict__:
        return f"A `{config.model_type}` language model of the library crosscurrent."
    start, end = config.layer_start, config.layer_end
    return (
        f"A language model with temporal recurrence ([T2MLR]({_PAPER})): what the layers {start} to {end - 1} made of a "
        f"token is fed back into layer {start} for the next token."
    )


def _facts(model: PreTrainedModel, base: str | None) -> dict[str, str]:
    config: Any = model.config
    facts = {"class": f"`{type(model).__name__}`"}
    if "base_config" in config.__dict__:
        facts["base model"] = _plain(base) if base else f"a `{config.base_config.model_type}` with weights of its own"
        facts["recurrent layers"] = f"[{config.layer_start}, {config.layer_end}) of {config.num_hidden_layers}, from 0"
    own = type(config).__dataclass_fields__
    facts |= {what: f"{getattr(config, name)}" for what, name in _SETTINGS.items() if name in own}
    if "solver" in own:
        facts["solver"] = f"`{as_solver(config.solver)}`"
    facts["parameters"] = f"{model.num_parameters():,}"
    recurrent = set(getattr(model, "recurrent_modules", ()))
    count = sum(p.numel() for name, p in model.named_parameters() if name.startswith(tuple(f"{m}." for m in recurrent)))
    if recurrent:
        facts["of them for the recurrence"] = f"{count:,}"
    facts["library"] = f"crosscurrent {__version__}, transformers {transformers.__version__}"
    return facts


def _call(model: PreTrainedModel) -> str:
    """The call that makes such a model, with all settings that are not the defaults."""
    from crosscurrent.models.t2mlr import retrofit

    config: Any = model.config
    changed = _changed_settings(config)
    solver = changed.pop("solver", None)
    words = [f"{name}={value!r}" for name, value in changed.items()]
    if solver is not None:
        words.append("solver=" + re.sub(r"\b(?=[A-Z]\w*\()", "crosscurrent.", repr(as_solver(solver))))
    if "base_config" in config.__dict__:
        if changed.keys() - inspect.signature(retrofit).parameters.keys():  # as in the authors' checkpoints
            settings = ", ".join(["base_config=base.config", *words])
            return f"crosscurrent.T2MLRForCausalLM(crosscurrent.T2MLRConfig({settings}))"
        return f"crosscurrent.retrofit(base, {', '.join(words)})"
    name = type(config).__name__
    return f"crosscurrent.{type(model).__name__}(crosscurrent.{name}({', '.join(words)}))"


def _changed_settings(config: PreTrainedConfig) -> dict[str, Any]:
    own = type(config).__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys() - {"base_config"}
    default = type(config)()
    return {
        name: getattr(config, name)
        for name in type(config).__dataclass_fields__
        if name in own and getattr(config, name) != getattr(default, name)
    }


def _plain(text: str, longest: int = 100) -> str:
    """Text of a user without what Markdown, HTML or a table would read as their own."""
    return re.sub(r"[^\w ./:=,'\"+~\[\](){}-]", "_", " ".join(text.split()))[:longest]
