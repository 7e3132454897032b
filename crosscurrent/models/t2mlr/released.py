"""Reads checkpoints that the T2MLR authors' code has saved (135M, 362M and 982M parameters are public).

Their layout: every layer under its usual name behind `t2mlr_model.`, those of the recurrent range one level deeper in
`.model.`, and the fusion beside the first of them. `l_start` and `l_end` are both inclusive.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from crosscurrent.models.checkpoints import CheckpointError
from crosscurrent.models.t2mlr.configuration_t2mlr import T2MLRConfig
from crosscurrent.recurrence import Jacobi

MODEL_TYPE = "t2mlr"
_LAYER = re.compile(r"^(?P<layer>.*layers\.\d+)\.model\.(?P<rest>.*)$")
_FUSION = re.compile(r"^.*layers\.\d+\.t2mlr_mixing_module\.(?P<rest>.*)$")

# Settings of the released code that must stand as here: their other values do something that has no counterpart here.
_REQUIRED = {
    "recurrent_mixing_module_name": "gated",
    "recurrent_residual_to_recurrent_cache": True,
    "recurrent_residual_to_recurrent_cache_post_norm": True,
    "gate_proj_type": "linear",
    "recurrent_state_proj_type": "linear",
    "recurrent_projection_dim": None,
    "recurrent_skip_to_l_end": False,
    "use_recurrent_projection": True,
    "use_learnable_input_gate": True,
    "use_learnable_recurrent_gate": True,
    "concat_recurrent": False,
    "normalize_gates": False,
    "post_norm": False,
    "pre_norm_streams": False,
    "recurrent_weight": 1.0,
    "t2mlr_enabled": True,
}
_NEEDED: dict[str, Any] = {
    "base_config": dict,
    "base_model_type": str,
    "l_start": int,
    "l_end": int,
    "batch_forward_approximate_depth": int,
    "batch_backward_approximate_depth": int,
    "recurrent_residual_to_recurrent_cache_detach": bool,
    "recurrent_residual_to_recurrent_cache_weight": int | float,
    "recurrent_residual_to_recurrent_cache_post_norm_eps": int | float,
    "recurrent_residual_to_recurrent_cache_post_norm_clamp": int | float,
}
_REQUIRED_OF_MIXING = {"use_rezero_residual": True, "rezero_gamma_scalar": True}


def load_released(cls: Any, source: str | Path, **settings: Any) -> Any:
    """See `T2MLRForCausalLM.from_released`."""
    loading = {name: settings.pop(name) for name in ("dtype", "device_map") if name in settings}
    folder = _folder(str(source), settings.pop("revision", None))
    config = _config(folder, settings)
    loading.setdefault("dtype", config.dtype or "auto")
    model, info = cls.from_pretrained(
        None, config=config, state_dict=_renamed(_weights(folder)), output_loading_info=True, **loading
    )
    if info["unexpected_keys"]:
        raise CheckpointError(
            f"{source} holds weights of no known place: {', '.join(sorted(info['unexpected_keys']))}."
        )
    missing = sorted(name for name in info["missing_keys"] if name.startswith("fusion."))
    if missing:
        raise CheckpointError(f"{source}: weights are missing: {', '.join(missing)}. The checkpoint is incomplete.")
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = model.name_or_path = folder.name if Path(source).exists() else str(source)
    return model


def _folder(source: str, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise CheckpointError(f"{source} is no folder here, and was not found on the hub: {error}") from error


def _config(folder: Path, settings: dict[str, Any]) -> T2MLRConfig:
    path = folder / "config.json"
    released = _read_json(path)
    if released.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{path} is of a {released.get('model_type')!r} model, not of the released code's {MODEL_TYPE!r}: load it with "
            "from_pretrained."
        )
    lacking = sorted(name for name, kind in _NEEDED.items() if not isinstance(released.get(name), kind))
    if lacking:
        raise CheckpointError(f"{path}: {', '.join(lacking)} are missing or of the wrong kind. The file is damaged.")
    _refuse_without_counterpart(released, path)
    residual = "recurrent_residual_to_recurrent_cache"
    depth = released["batch_forward_approximate_depth"]
    # Its backward depth K leaves gradient in K + 1 passes.
    with_gradient = min(depth, released["batch_backward_approximate_depth"] + 1)
    found = {
        "base_config": _base_config(released),
        "layer_start": released["l_start"],
        "layer_end": released["l_end"] + 1,
        "prompt_recurrence": False,  # its `generate` runs the prompt as the base does
        "detach_residual": released[f"{residual}_detach"],
        "state_eps": released[f"{residual}_post_norm_eps"],
        "state_bound": released[f"{residual}_post_norm_clamp"],
        "residual_weight": released[f"{residual}_weight"],
        "gates_read": "projected_state",
        "solver": Jacobi(iterations=depth, backward_iterations=with_gradient),
        "dtype": released.get("dtype"),
    }
    return T2MLRConfig(**(found | settings))


def _base_config(released: dict[str, Any]) -> dict[str, Any]:
    """What the base's configuration says, without what transformers writes into any configuration by default."""
    defaults = PreTrainedConfig().to_dict()
    base = dict(released["base_config"])
    kept = {name: value for name, value in base.items() if name not in defaults or name.endswith("_token_id")}
    tied = base.get("tie_word_embeddings", True)
    return kept | {"model_type": released["base_model_type"], "tie_word_embeddings": tied}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not an object. The file is damaged.")
    return found


def _refuse_without_counterpart(released: dict[str, Any], path: Path) -> None:
    mixing = released.get("mixing_module_kwargs") or {}
    for found, required in ((released, _REQUIRED), (mixing, _REQUIRED_OF_MIXING)):
        for name, value in required.items():
            if name in found and found[name] != value:
                raise ValueError(
                    f"{path} has {name}={found[name]!r}, which has no counterpart here: only {name}={value!r} is supported."
                )


def _weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): copy it again.") from error
    return weights


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    weight_map = _read_json(index).get("weight_map")
    names: set[Any] = set(weight_map.values()) if isinstance(weight_map, dict) else {None}
    strange = [n for n in names if not isinstance(n, str) or Path(n).name != n or not n.endswith(".safetensors")]
    if strange:
        raise CheckpointError(f"{index} names {strange[0]!r}, which is no .safetensors file beside it.")
    return [folder / name for name in sorted(names)]


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under this library's names, the gates' matrices in their two halves."""
    renamed: dict[str, Tensor] = {}
    for released_name, weight in weights.items():
        name = released_name.removeprefix("t2mlr_model.")
        if fusion := _FUSION.match(name):
            renamed |= _fusion_weights(fusion["rest"], weight)
        elif layer := _LAYER.match(name):
            renamed[f"{layer['layer']}.{layer['rest']}"] = weight
        else:
            renamed[name] = weight
    return renamed


def _fusion_weights(name: str, weight: Tensor) -> dict[str, Tensor]:
    scalars = {"rezero_gamma_input_gate": "current_scale", "rezero_gamma_recurrent_gate": "recurrent_scale"}
    gates = {"input_gate_proj": "current_gate", "recurrent_gate_proj": "recurrent_gate"}
    if name in scalars:
        return {f"fusion.{scalars[name]}": weight.reshape(1)}
    module, _, kind = name.partition(".")
    if module in gates and kind == "weight":
        of_stream, of_state = torch.chunk(weight, 2, dim=1)
        gate = f"fusion.{gates[module]}"
        return {
            f"{gate}.from_stream.weight": of_stream.contiguous(),
            f"{gate}.from_state.weight": of_state.contiguous(),
        }
    if module in gates and kind == "bias":
        return {f"fusion.{gates[module]}.from_state.bias": weight}
    return {f"fusion.{name}": weight}
