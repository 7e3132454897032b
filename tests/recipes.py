"""Recipes of seconds, for tests."""

from typing import Any

from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.settings import merge, validated
from crosscurrent.experiments.study import recipe_names

MODELS: dict[str, dict[str, Any]] = {
    "rlt-1": {"architecture": "rlt", "num_decoder_layers": 1},
    "rlt-2": {"architecture": "rlt", "num_decoder_layers": 1, "feedback_interval": 3},
    "rlt-0": {"architecture": "rlt", "num_decoder_layers": 1, "feedback_interval": None},
    "transformer": {"architecture": "transformer"},
    "lstm": {"architecture": "lstm"},
    "rlt-jacobi": {
        "architecture": "rlt",
        "num_decoder_layers": 1,
        "solver": {"name": "jacobi", "iterations": 3, "backward_iterations": 2},
    },
    "gpt2": {"architecture": "transformers", "model_type": "gpt2"},
    "t2mlr": {"architecture": "t2mlr", "layer_start": 1, "layer_end": 2},
}

_SMALL: dict[str, Any] = {
    "task": {
        "name": "parity",
        "num_test": 12,
        "num_validation": 8,
        "test_lengths": [9, 21],
        "validation_lengths": [11],
    },
    "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    "training": {"max_steps": 6, "batch_size": 8, "learning_rate": 0.01, "eval_steps": 2, "warmup_steps": 2},
    "seed": 5,
}


def tiny_values(model: str = "rlt-1", /, **changes: Any) -> dict[str, Any]:
    """A recipe as plain values, with changes to its sections."""
    return merge(_SMALL, {"model": MODELS[model]}, changes)


def study_defaults(model: str = "transformer", /, **changes: Any) -> dict[str, Any]:
    """The same for a study, which has its seeds elsewhere."""
    return {key: value for key, value in tiny_values(model, **changes).items() if key != "seed"}


def tiny_recipe(model: str = "rlt-1", /, **changes: Any) -> Recipe:
    """A recipe of six steps on parity."""
    return validated(Recipe, tiny_values(model, **changes), "tiny")


def every_task_and_every_model(*families: str) -> list[str]:
    """Shipped recipes of these families in which each task and each model of a study comes at least once."""
    chosen: list[str] = []
    seen: set[tuple[str, str, str]] = set()
    for name in recipe_names():
        study, task, model = name.rsplit("/", 2)
        parts = {(study, "task", task), (study, "model", model)}
        if name.startswith(families) and not parts <= seen:
            chosen.append(name)
            seen |= parts
    return chosen
