"""The models of this library, and plain ones of transformers, in lm-evaluation-harness: its own Hugging Face model, with a
choice of the solver that scores.

    python -c "import crosscurrent.evaluation.harness; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" \\
        run --model crosscurrent --model_args pretrained=FOLDER,solver=exact --tasks lambada_openai
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from crosscurrent.evaluation.solver_choice import CONFIGURED, scoring_solver
from crosscurrent.models.base import PACKAGED, load_base, load_tokenizer
from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.wrapped import find_recurrent_model
from crosscurrent.recurrence import Solver, as_solver, solver_to_dict


@register_model("crosscurrent")
class CrosscurrentLM(HFLM):
    """lm-evaluation-harness's Hugging Face model, scoring with a chosen solver.

    All but the solver is the harness's own code: prompts, BOS, batches, scores and generation. The model that is given
    keeps its configured solver; the choice holds while this object calls it.

    Args:
        pretrained: a model, a folder, an id on the hub, or "smollm2-135m" (`crosscurrent.load_base`). It may be any causal
            language model of transformers, with or without recurrence.
        solver: as `scoring_solver` takes it. Without recurrence it has no effect, and a choice warns.
        tokenizer: None: what lies beside the model.
        dtype: of the weights, where they are loaded; "auto": as they are saved.
        settings: further ones of `HFLM` (batch_size, add_bos_token, ...); `device` is a GPU if there is one.

    Raises:
        ValueError: the solver is not allowed, there is no tokenizer, or it has no token to begin with.

    Example::

        lm = CrosscurrentLM(cc.retrofit(base, 12, 18), solver="exact", tokenizer=tokenizer, batch_size=8)
        lm_eval.simple_evaluate(lm, tasks=["piqa"])["config"]["solver"]  # {'name': 'sequential', ...}
    """

    def __init__(
        self,
        pretrained: Any,
        solver: str | dict[str, Any] | Solver = CONFIGURED,
        tokenizer: Any = None,
        dtype: Any = "auto",
        **settings: Any,
    ):
        self._chosen = scoring_solver(solver)
        if not isinstance(pretrained, str) and tokenizer is None and not pretrained.name_or_path:
            raise ValueError(f"this {type(pretrained).__name__} comes without a tokenizer: give tokenizer=....")
        usual = {"backend": "causal", "device": "cuda" if torch.cuda.is_available() else "cpu"}
        settings = usual | settings  # the harness does not know our classes, and takes a GPU for granted
        if isinstance(pretrained, str) and pretrained in PACKAGED:
            tokenizer = tokenizer if tokenizer is not None else load_tokenizer(pretrained)
            pretrained = load_base(pretrained, dtype=dtype).to(settings["device"])
        super().__init__(pretrained, tokenizer=tokenizer, dtype=dtype, **settings)
        if self.prefix_token_id is None:
            raise ValueError(
                "the tokenizer has neither a BOS nor an EOS token, one of which the harness puts before what has no "
                'context: set tokenizer.eos_token = "..." and save it again, or give prefix_token_id=....'
            )
        self._recurrent = find_recurrent_model(self.model)
        if self._chosen is not None and self._recurrent is None:
            warnings.warn(
                f"the solver has no effect: {type(self.model).__name__} has no recurrence. Leave it out.", stacklevel=2
            )

    @property
    def solver(self) -> dict[str, Any] | None:
        """The solver that scores, as plain data; None for a model without recurrence."""
        if self._recurrent is None:
            return None
        return solver_to_dict(as_solver(self._recurrent.config.solver if self._chosen is None else self._chosen))

    def get_model_info(self) -> dict[str, Any]:
        """What the harness says of the model in its results, and the solver."""
        return super().get_model_info() | {"solver": self.solver}

    @contextmanager
    def _solving(self) -> Iterator[None]:
        """The model configured with the chosen solver, for the time being."""
        model: RecurrentCausalLM | None = self._recurrent
        if model is None or self._chosen is None:
            yield
            return
        configured = model.config.solver
        model.config.solver = self._chosen
        try:
            yield
        finally:
            model.config.solver = configured

    def _model_call(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._solving():
            return super()._model_call(*args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._solving():
            return super()._model_generate(*args, **kwargs)
