"""The prepared text of a run, as rows, and the model that is to read it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, set_seed

from crosscurrent.data.packing import PackedRows
from crosscurrent.data.shards import PreparedText
from crosscurrent.experiments.architectures import AnyRecipe
from crosscurrent.experiments.text_recipe import TextRecipe


def build_text_model(recipe: TextRecipe, text: PreparedText) -> PreTrainedModel:
    """The recipe's model with its starting weights."""
    set_seed(recipe.seed)
    model = recipe.model.build(recipe.model.vocab_size or text.vocab_size)
    model.config.eos_token_id = text.eos_token_id
    if model.generation_config is not None:
        model.generation_config.eos_token_id = text.eos_token_id
    return model


class TextOfRun:
    """The prepared text of a recipe, as rows."""

    def __init__(self, recipe: TextRecipe):
        self.recipe = recipe
        self.prepared = PreparedText(recipe.folder)

    def check(self) -> None:
        """Raise ValueError if the model cannot be trained on it."""
        self.prepared.tokenizer()
        if self.recipe.model.vocab_size is not None:
            self.prepared.check_vocab_size(self.recipe.model.vocab_size)
        longest, num_tokens = self.recipe.data.sequence_length, self.prepared.num_tokens("train")
        if longest > num_tokens:
            raise ValueError(
                f"data.sequence_length={longest} is more than the {num_tokens} tokens that {self.prepared.folder} has for "
                "training: give shorter rows, or prepare more text."
            )
        assert len(self.train_rows) and self.validation_rows is not None  # rows refuse to be none
        if isinstance(self.recipe.model, AnyRecipe):
            _refuse_crossing(build_text_model(self.recipe, self.prepared), self.recipe.model.model_type)

    @cached_property
    def rows(self) -> PackedRows:
        data = self.recipe.data
        return PackedRows(self.prepared, "train", data.sequence_length, seed=data.seed)

    @property
    def train_rows(self) -> "FirstRows":
        return FirstRows(self.rows, self.recipe.training.batch_size * self.recipe.training.max_steps)

    @cached_property
    def validation_rows(self) -> "FirstRows":
        rows = PackedRows(self.prepared, "validation", self.recipe.data.sequence_length, shuffle=False)
        return FirstRows(rows, min(len(rows), self.recipe.evaluation.max_rows or len(rows)))

    @property
    def num_epochs(self) -> float:
        """How often every document is read."""
        return len(self.train_rows) / self.rows.rows_per_epoch

    def gap_batches(self) -> list[dict[str, Tensor]]:
        """The beginnings of some validation rows."""
        evaluation = self.recipe.evaluation
        rows = [self.validation_rows[index] for index in range(min(evaluation.gap_rows, len(self.validation_rows)))]
        names = ("input_ids", "segment_ids", "attention_mask")
        return [{name: row[name][None, : evaluation.gap_length] for name in names} for row in rows]


@dataclass(frozen=True)
class FirstRows(Dataset[dict[str, Tensor]]):
    """The first `count` rows, over as many epochs as it takes."""

    rows: PackedRows
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


@torch.no_grad()
def _refuse_crossing(model: PreTrainedModel, model_type: str) -> None:
    """Raise ValueError if what a document of a row says reaches the next one."""
    ids = torch.tensor([[3, 4, 5, 6, 3, 4]]) % model.config.vocab_size
    other = ids.clone()
    other[0, 1] = (ids[0, 1] + 1) % model.config.vocab_size
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2]])
    model.eval()
    try:
        first, second = (model(one, position_ids=position_ids, use_cache=False).logits[:, 3:] for one in (ids, other))
    except TypeError as error:
        raise ValueError(
            f"model: a {model_type} takes no position_ids, which tell the documents of a row: {error}"
        ) from None
    if not torch.allclose(first, second, atol=1e-6):
        raise ValueError(
            f"model: in a {model_type} what one document of a row says reaches the next one, so it cannot be trained on "
            "packed rows. Take another model_type."
        )
