"""T2MLR: the middle layers' output for a token, fed back into an earlier middle layer for the next token.

Shapes: B rows, T tokens of this call, P tokens of earlier calls, D hidden_size, V vocab_size.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from crosscurrent.models.cache import RecurrentCache
from crosscurrent.models.call import Call, begin_call
from crosscurrent.models.compat import CACHE_NAME
from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.inputs import drop_kernel_lengths, refuse_misspelt_arguments
from crosscurrent.models.outputs import RecurrentCausalLMOutput, causal_lm_loss
from crosscurrent.models.t2mlr.backbone import RecurrentBackbone
from crosscurrent.models.t2mlr.bases import NORM_EPSILONS, base_class_of, find_layers, refuse_unsupported_layers
from crosscurrent.models.t2mlr.configuration_t2mlr import T2MLRConfig, check_layer_range
from crosscurrent.models.t2mlr.layer_range import (
    WITHOUT_CHECKPOINTING,
    LayerList,
    LayerLoop,
    drops_entries,
    refuse_reentrant_checkpointing,
)
from crosscurrent.models.t2mlr.left_out import warn_if_fusion_is_left_out
from crosscurrent.models.t2mlr.masks import DocumentMask, refuse_padding_inside_documents
from crosscurrent.models.t2mlr.range_run import RangeRun
from crosscurrent.recurrence import (
    PADDING,
    BoundedSum,
    GatedFusion,
    NormalizedSum,
    RecurrentState,
    Solver,
)


class T2MLRCache(RecurrentCache):
    """Keys and values of all layers, and the state of the recurrent range."""


class T2MLRForCausalLM(RecurrentCausalLM):
    """A causal language model with temporal recurrence over a range of its layers.

    Made by `retrofit` from a pretrained model, or from a `T2MLRConfig` with random weights. An instance is also an
    instance of the base model's class, and all of the base's parameters keep their names; `fusion` and `carry` are new.

    Example:
        >>> from transformers import LlamaConfig
        >>> base = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                    num_attention_heads=4)
        >>> model = T2MLRForCausalLM(T2MLRConfig(base_config=base, layer_start=1, layer_end=3))
        >>> type(model).__name__
        'T2MLRLlamaForCausalLM'
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 61])
    """

    config: T2MLRConfig
    config_class = T2MLRConfig
    cache_class = T2MLRCache
    recurrent_modules = ("fusion", "carry")
    resident_modules = recurrent_modules
    fusion: GatedFusion
    carry: Any  # NormalizedSum, or BoundedSum for the authors' released checkpoints
    # Small updates of the gates would be rounded away in the 16 bits that the base may well be kept in.
    _keep_in_fp32_modules_strict = {r"^fusion\.", r"^carry\."}

    def __new__(cls, config: T2MLRConfig | None = None, *args: Any, **kwargs: Any) -> "T2MLRForCausalLM":
        is_concrete = cls is not T2MLRForCausalLM or config is None
        return object.__new__(cls if is_concrete else class_for(base_class_of(config.base_config)))  # type: ignore[union-attr]

    def __init__(self, config: T2MLRConfig):
        super().__init__(config.base_config)
        self._take_over(config)
        self.post_init()

    def _take_over(self, config: T2MLRConfig) -> None:
        """Turn the base model that this object holds so far into a recurrent one."""
        self.config = config
        self.name_or_path = config.name_or_path  # not the base's: what is found there is not recurrent
        text = config.get_text_config()
        owner, name = find_layers(self)
        layers = getattr(owner, name)
        refuse_unsupported_layers(layers, config)
        if not isinstance(layers, LayerList):
            setattr(owner, name, LayerList(layers))
        reference = next(layers[config.layer_start].parameters())
        with torch.device(reference.device):
            std = getattr(text, "initializer_range", 0.02) or 0.02
            self.fusion = GatedFusion(text.hidden_size, std, config.gates_read)
            self.carry = _make_carry(config)
        dtype = torch.promote_types(reference.dtype, torch.float32)
        self.fusion.to(dtype)
        self.carry.to(dtype)
        parts = {type(self.fusion).__name__, type(self.carry).__name__}  # each on one device, and sharded by itself
        self._no_split_modules = {*(self._no_split_modules or ()), *parts}

    @property
    def base_model(self) -> Any:
        """What lies below the head: `base_model(input_ids)` runs the recurrence and gives the final hidden states."""
        return RecurrentBackbone(self, super().base_model)

    @property
    def layers(self) -> LayerList:
        """The decoder layers, the recurrent range among them."""
        owner, name = find_layers(self)
        layers: LayerList = getattr(owner, name)
        return layers

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, GatedFusion):
            for linear in module.modules():
                if isinstance(linear, nn.Linear):
                    init.normal_(linear.weight, std=module.initializer_range)
                    if linear.bias is not None:
                        init.zeros_(linear.bias)
            init.zeros_(module.current_scale)
            init.zeros_(module.recurrent_scale)
        elif isinstance(module, NormalizedSum):
            init.ones_(module.norm.weight)
        else:
            super()._init_weights(module)

    @classmethod
    def from_released(cls, pretrained_model_name_or_path: str | Path, **settings: Any) -> "T2MLRForCausalLM":
        """Load a checkpoint that the T2MLR authors' code has saved, to compute what that code computes.

        Where it differs from the paper is in the configuration of the model: `gates_read`, `state_bound`, `state_eps`,
        `residual_weight`. Saved again it is an ordinary model of this library.

        Args:
            pretrained_model_name_or_path: a local folder, or the id of a repository on the Hugging Face hub.
            settings: of `T2MLRConfig`, in place of those in the checkpoint (solver, prompt_recurrence, ...), and `revision`
                and `dtype` as in `from_pretrained`.

        Raises:
            CheckpointError: files are missing or damaged; a `ValueError`.
            ValueError: the checkpoint uses a part of that code that has no counterpart here.

        Example::

            model = T2MLRForCausalLM.from_released("checkpoints/t2mlr-135m")
        """
        from crosscurrent.models.t2mlr.released import load_released

        return load_released(cls, pretrained_model_name_or_path, **settings)

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers. It is the base model's setting, so it is set as on the base model."""
        config, self.config = self.config, self.config.base_config
        try:
            super().set_attn_implementation(*args, **kwargs)
        finally:
            self.config = config

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the base: transformers looks into the file that a class is defined in."""
        base: Any = next(parent for parent in cls.__mro__ if parent.__module__.startswith("transformers."))
        return base._can_set_experts_implementation()

    def _get_name(self) -> str:
        """The base's: by this name transformers' Trainer knows that a label-smoothing loss has to shift the labels."""
        return base_class_of(self.config.base_config).__name__

    def __repr__(self) -> str:
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    def new_weight_names(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.startswith(("fusion.", "carry."))}

    def start_state(self, batch_size: int) -> RecurrentState:
        register = self.fusion.initial_state(batch_size)
        return RecurrentState.start(register.to(self.carry.dtype_for(register.dtype)))

    def new_cache(self, max_cache_len: int | None = None) -> T2MLRCache:
        return T2MLRCache(self.config.get_text_config(decoder=True), max_cache_len)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: T2MLRCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        recurrent_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        solver: Solver | None = None,
        past_key_values: T2MLRCache | None = None,
        **kwargs: Any,
    ) -> RecurrentCausalLMOutput | tuple[Any, ...]:
        """Score a batch of sequences, or continue them.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T] or [B, P + T], nonzero for real tokens; padding may stand on either side.
            position_ids: [B, T]; None: counted from 0 over the real tokens of each document. If they restart within a
                row and there is neither a mask nor a cache, each restart opens a document, as elsewhere in transformers.
            cache: of the earlier calls. It is changed only if the call succeeds.
            inputs_embeds: [B, T, D] in place of input_ids.
            labels: [B, T] int64, not shifted, -100 to leave out. Padding and first tokens of documents never count.
            use_cache: return a cache. None: if one is given, or the model is not training and `config.use_cache`.
            logits_to_keep: logits of the last so many tokens only, or of the given columns; 0: of all.
            recurrent_mask: [B, T], nonzero for recurrent tokens. None: all are.
            segment_ids: [B, T] integers that number the documents of a row upwards. Nothing crosses from one document
                to the next. None: all tokens continue the row's document.
            solver: None: `config.solver`.
            past_key_values: the older name of `cache`.
            kwargs: passed on to the base model (output_hidden_states, num_items_in_batch, ...).

        Returns:
            logits [B, T, V] and loss; cache; hidden_states if asked for; solver_report.

        Raises:
            ValueError: an input does not fit; the message says what is allowed.
        """
        return_dict, num_items = kwargs.pop("return_dict", None), kwargs.pop("num_items_in_batch", None)
        refuse_misspelt_arguments(kwargs, T2MLRForCausalLM.forward)
        from_positions = position_ids is not None and attention_mask is None
        drop_kernel_lengths(kwargs, documents_are_known=segment_ids is not None or from_positions)
        cache = cache if cache is not None else past_key_values
        use_cache = self._check_mode(cache, use_cache, kwargs)
        call = begin_call(
            self,
            input_ids,
            inputs_embeds,
            device=self.fusion.current_scale.device,
            attention_mask=attention_mask,
            recurrent_mask=recurrent_mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            solver=solver,
            return_dict=return_dict,
        )
        run = RangeRun(self, call)
        loop = LayerLoop(self.layers, self.config.layer_start, self.config.layer_end, run.solve, self._mask_edit(call))
        base_inputs = self._base_inputs(call, position_ids)
        with loop.active():
            output = super().forward(
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                use_cache=call.branch is not None,
                logits_to_keep=logits_to_keep,
                return_dict=True,
                **{CACHE_NAME: call.branch},
                **base_inputs,
                **kwargs,
            )
        if run.solution is None:
            raise ValueError("the model skipped layers of the recurrent range (layerdrop?): switch that off.")
        result = RecurrentCausalLMOutput(
            loss=None if labels is None else causal_lm_loss(output.logits, labels, call.plan.labels, num_items),
            logits=output.logits,
            hidden_states=run.sorted_hidden_states(output.hidden_states),
            attentions=run.sorted_attentions(output.attentions),
        )
        return call.finish(result, run.solution)

    def _check_mode(self, cache: Any, use_cache: bool | None, kwargs: dict[str, Any]) -> bool | None:
        """Refuse or tell what would go wrong unnoticed. Returns use_cache, as it is to be."""
        text = self.config.get_text_config()
        check_layer_range(self.config.layer_start, self.config.layer_end, len(self.layers))
        if kwargs.get("output_router_logits") or getattr(text, "output_router_logits", False):
            raise ValueError(
                "output_router_logits is not supported: the balancing loss would be left out. Switch it off."
            )
        if self.config.output_hidden_states:
            kwargs.setdefault("output_hidden_states", True)
        if self.training and torch.is_grad_enabled():
            warn_if_fusion_is_left_out(self)
        if self.training and torch.is_grad_enabled() and self.fusion.current_scale.dtype.itemsize < 4:
            warnings.warn(
                f"the recurrent path is trained in {self.fusion.current_scale.dtype}: small updates of its gates are "
                "rounded away. Put it back with model.fusion.float(); model.carry.float(), or load the model in the "
                "dtype you want: `retrofit` and `from_pretrained` keep the recurrent path in float32.",
                stacklevel=3,
            )
        if not (torch.is_grad_enabled() and any(map(drops_entries, self.layers._modules.values()))):  # type: ignore[arg-type]
            return use_cache
        refuse_reentrant_checkpointing(self.layers)
        if cache is not None:
            raise ValueError(
                "gradient checkpointing drops the keys and values of earlier tokens, so a call cannot continue from a "
                f"cache: train on whole sequences, or switch checkpointing off: {WITHOUT_CHECKPOINTING}."
            )
        if use_cache:
            warnings.warn("use_cache=True has no effect under gradient checkpointing: no cache is kept.", stacklevel=3)
        return False

    def _mask_edit(self, call: Call) -> DocumentMask | None:
        if call.is_plain:
            return None
        if getattr(self.config.get_text_config(), "sliding_window", None) is not None:
            refuse_padding_inside_documents(call.key_labels)
        num_places = None if call.branch is None else call.branch.num_places
        return DocumentMask(call.key_labels, call.plan.num_tokens, self.config._attn_implementation, num_places)

    def _base_inputs(self, call: Call, position_ids: Tensor | None) -> dict[str, Any]:
        """Masks and positions for the base model: none where it would make the same itself."""
        if call.is_plain:
            return {"attention_mask": None, "position_ids": position_ids}
        is_key = call.key_labels != PADDING
        return {
            "attention_mask": None if bool(is_key.all()) else is_key.long(),
            "position_ids": call.plan.positions if position_ids is None else position_ids,
        }


def _make_carry(config: T2MLRConfig) -> NormalizedSum | BoundedSum:
    text = config.get_text_config()
    eps = config.state_eps
    if eps is None:
        eps = next((getattr(text, name) for name in NORM_EPSILONS if hasattr(text, name)), 1e-6)
    dtype = None if config.state_dtype is None else getattr(torch, config.state_dtype)
    if config.state_bound is None:
        return NormalizedSum(text.hidden_size, eps, config.detach_residual, dtype)
    return BoundedSum(eps, config.state_bound, config.residual_weight, config.detach_residual, dtype)


_classes: dict[type, type[T2MLRForCausalLM]] = {}


def class_for(base_class: type) -> type[T2MLRForCausalLM]:
    """The class of recurrent models over `base_class`: a subclass of both, named T2MLR + its name."""
    if base_class not in _classes:
        name = f"T2MLR{base_class.__name__}"
        members = {"__module__": __name__, "__doc__": f"{base_class.__name__} with temporal recurrence."}
        _classes[base_class] = type(name, (T2MLRForCausalLM, base_class), members | {"config_class": T2MLRConfig})
        _rename_as(base_class, name)
    return _classes[base_class]


def _rename_as(base_class: Any, name: str) -> None:
    """Let the class `name` read and write weights under the names that the base's checkpoints have on disk (the output
    matrix of GPT-NeoX is `embed_out` there). transformers finds conversions inside of the base's modules by itself."""
    found = get_checkpoint_conversion_mapping(base_class.__name__)
    if found is None:
        found = get_checkpoint_conversion_mapping(base_class.config_class.model_type)
    renamings: list[Any] = [conversion for conversion in found or () if type(conversion) is WeightRenaming]
    if renamings:
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)


def __getattr__(name: str) -> Any:
    """Classes made by `class_for`, by name: unpickling in another process looks them up here."""
    if name.startswith("T2MLR"):
        import transformers

        base_class = getattr(transformers, name.removeprefix("T2MLR"), None)
        if isinstance(base_class, type) and issubclass(base_class, PreTrainedModel):
            return class_for(base_class)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
