"""Loading that answers a broken checkpoint at once, in one message."""

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from crosscurrent.models.checkpoints import CheckpointError, refuse_nonfinite_weights
from crosscurrent.models.weight_names import WITHOUT_WRAPPERS, list_names

_ALIGNMENT = 64  # bytes, of every block that torch allocates on a CPU

# `clone`: tied weights are one tensor there, which a .safetensors file cannot hold under two names.
CONVERT = (
    "import glob, torch; from safetensors.torch import save_file; "
    "parts = [torch.load(f, map_location='cpu', weights_only=True) for f in sorted(glob.glob('pytorch_model*.bin'))]; "
    "save_file({name: w.clone() for part in parts for name, w in part.items()}, 'model.safetensors', {'format': 'pt'})"
)


class CheckedLoading(PreTrainedModel):
    """`from_pretrained` that names what is wrong with a checkpoint.

    Attributes:
        recurrent_modules: names of the modules that only the recurrence uses. They are never quantised.
        resident_modules: names of the modules whose weights are read without calling them. They are never offloaded.
    """

    recurrent_modules: tuple[str, ...] = ()
    resident_modules: tuple[str, ...] = ()

    def post_init(self) -> None:
        # All of transformers' quantisers leave out what is named here.
        self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), *self.recurrent_modules}
        super().post_init()

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Without the modules of the recurrence, which have the dtype of the stream that they work on."""
        plan: dict[str, torch.dtype] = super()._get_dtype_plan(dtype)
        return {name: kept for name, kept in plan.items() if name not in self.recurrent_modules}

    def new_weight_names(self) -> set[str]:
        """The weights that a checkpoint may lack, all together, because it is the base model's: they start fresh."""
        return set()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but weights are read from .safetensors files only.

        What torch.compile, DistributedDataParallel, FSDP and PEFT put before the names of weights is left out. Weights of
        the file that the model has no place for are named in a warning.

        Raises:
            CheckpointError: a file is missing or cut short, none of its weights is the model's, a weight is missing, or
                one is not finite. It is a `ValueError` and an `OSError`.
        """
        source = str(pretrained_model_name_or_path)
        wants_info = kwargs.pop("output_loading_info", False)
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError("use_safetensors=False is not supported: weights are read from .safetensors files only.")
        key_mapping = WITHOUT_WRAPPERS | (kwargs.pop("key_mapping", None) or {})
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                output_loading_info=True,
                use_safetensors=True,
                key_mapping=key_mapping,
                **kwargs,
            )
        except SafetensorError as error:
            raise CheckpointError(
                f"{source}: a .safetensors file cannot be read ({error}). It is cut short or damaged: copy it again."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{source}: {_if_pickled(source) or error}") from error
        model, info = loaded
        _check_names(model, info, source)
        _forget_wrappers(model)
        refuse_nonfinite_weights(model, source)
        _bring_back(model)
        _align_weights(model)
        return (model, info) if wants_info else model


def _if_pickled(source: str) -> str | None:
    """What to do with a folder whose weights are in pickle files only."""
    if not list(Path(source).glob("pytorch_model*.bin")):
        return None
    return (
        "the weights are in pytorch_model.bin, which can run code when it is read: only .safetensors files are loaded. If "
        "you trust the file, convert it (in the folder, for tensors only): "
        f'python -c "{CONVERT}"'
    )


def _check_names(model: CheckedLoading, info: dict[str, Any], source: str) -> None:
    """Raise if the model's weights are not all in the checkpoint; warn if the checkpoint has more."""
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    if missing and missing >= {name for name, _ in model.named_parameters()} - _tied_names(model):
        raise CheckpointError(
            f"{source}: none of the weights in it is one of a {type(model).__name__}. It holds "
            f"{list_names(unexpected) or 'none'}; the model needs {list_names(missing)}."
        )
    if missing and missing != model.new_weight_names():
        adapters = any(".lora_" in name for name in unexpected)
        raise CheckpointError(
            f"{source}: weights are missing: {', '.join(sorted(missing))}. "
            + (
                "Adapters lie beside them: save model.merge_and_unload()."
                if adapters
                else "The checkpoint is incomplete."
            )
        )
    if unexpected:
        warnings.warn(
            f"{source}: a {type(model).__name__} has no place for these weights, which are left out: "
            f"{list_names(unexpected)}.",
            stacklevel=3,
        )


def _tied_names(model: PreTrainedModel) -> set[str]:
    return set(model.all_tied_weights_keys)


def _forget_wrappers(model: PreTrainedModel) -> None:
    """transformers renames back at saving what was renamed at loading."""
    conversions = getattr(model, "_weight_conversions", None) or []
    kept = [one for one in conversions if not WITHOUT_WRAPPERS.keys() & set(one.source_patterns)]
    model._weight_conversions = kept  # type: ignore[assignment]


def _bring_back(model: CheckedLoading) -> None:
    """Undo the offloading of modules whose weights are read without calling them."""
    if not hasattr(model, "hf_device_map"):
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
    from accelerate.utils import align_module_device, has_offloaded_params, set_module_tensor_to_device

    prefixes = tuple(f"{resident}." for resident in model.resident_modules)
    for path, module in model.named_modules():
        if f"{path}.".startswith(prefixes) and has_offloaded_params(module):
            device = module._hf_hook.execution_device
            with align_module_device(module):
                weights = {name: part.detach().clone() for name, part in module.named_parameters(recurse=False)}
            remove_hook_from_module(module)
            for name, weight in weights.items():
                set_module_tensor_to_device(module, name, device, value=weight)
            add_hook_to_module(module, AlignDevicesHook(execution_device=device))


def _align_weights(model: nn.Module) -> None:
    """Move weights to memory as torch allocates it. Matrix products round differently on the odd addresses at which a
    file is mapped, so that a loaded model would not repeat the saved one bit for bit."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()
