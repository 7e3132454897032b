"""Reasoning problems as tokens: prompts to answer, and examples to be trained on.

Prompt and completion are tokenised apart, so that a model is trained on exactly the prompts that it is asked with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from crosscurrent.models.outputs import IGNORED
from crosscurrent.tasks.reasoning.task import Part, Problem, PromptFormat, ReasoningTask

_NAMED = 5  # problems in a message


@dataclass(frozen=True)
class ProblemTokenizer:
    """Turns the problems of a task into token ids.

    Args:
        task: which says how it is asked.
        tokenizer: of the model.
        prompt_format: "chat" or "plain"; None: the task's.

    Raises:
        ValueError: a chat was asked for and the tokenizer has no chat template, or it has no end-of-text token.

    Example:
        >>> from crosscurrent.models.base import load_tokenizer
        >>> from crosscurrent.tasks.reasoning import get_reasoning_task
        >>> task = get_reasoning_task("variable_assignment")
        >>> tokens = ProblemTokenizer(task, load_tokenizer("smollm2-135m"))
        >>> problem = task.problems("test", count=1)[0]
        >>> tokens.prompt_text(problem)[-12:], tokens.completion_ids(problem)[-1] == tokens.tokenizer.eos_token_id
        ('value of h: ', True)
    """

    task: ReasoningTask
    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat | None = None

    def __post_init__(self) -> None:
        if self.format == "chat" and not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.task.name} is asked as a chat, and the tokenizer has no chat template: ask it as text "
                "(prompt_format plain), or give the tokenizer a template."
            )
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token (eos_token), by which answers end: set one.")

    @property
    def format(self) -> PromptFormat:
        """As the prompts are written."""
        return self.prompt_format if self.prompt_format is not None else self.task.prompt_format

    def prompt_text(self, problem: Problem) -> str:
        """The whole prompt as text, the template's own tokens included."""
        if self.format == "plain":
            return self.task.plain_prompt(problem)
        from jinja2 import TemplateError  # which plain prompts do without

        messages = [{"role": "user", "content": self.task.message(problem)}]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(
                f"the tokenizer's chat template cannot be used ({error}): mend it, or ask as text (prompt_format plain)."
            ) from error
        assert isinstance(text, str)
        return text

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Of a chat as its template writes it; of plain text with what the tokenizer puts before texts (BOS)."""
        text = self.prompt_text(problem)
        ids: list[int] = self.tokenizer(text, add_special_tokens=self.format == "plain")["input_ids"]
        if not ids:
            raise ValueError(
                f"the prompt of {problem.id} has no tokens: look at the tokenizer's chat template, or ask as text "
                "(prompt_format plain)."
            )
        # Some tokenizers end each text with their end-of-text token, which a prompt has not.
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids

    def completion_ids(self, problem: Problem) -> list[int]:
        """What is to be learned, with the end-of-text token."""
        ids: list[int] = self.tokenizer(problem.completion, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]

    def example(
        self, problem: Problem, loss_on: Part | None = None, recurrent: Part | None = None
    ) -> dict[str, Tensor]:
        """A problem to be trained on: input_ids, labels and recurrent_mask, all [T] int64.

        Args:
            loss_on: the part that has labels; None: the task's.
            recurrent: the part that is recurrent; None: the task's.
        """
        prompt, completion = self.prompt_ids(problem), self.completion_ids(problem)
        ids = torch.tensor([*prompt, *completion])
        is_answer = torch.arange(len(ids)) >= len(prompt)
        answers_only = (loss_on or self.task.loss_on) == "answer"
        all_recur = (recurrent or self.task.recurrent) == "all"
        return {
            "input_ids": ids,
            "labels": torch.where(is_answer, ids, IGNORED) if answers_only else ids.clone(),
            "recurrent_mask": torch.ones_like(ids) if all_recur else is_answer.long(),
        }


def context_length(model: Any) -> int | None:
    """How many tokens a model takes; None if its configuration does not say."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def check_vocabulary(rows: Iterable[Sequence[int]], model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if a token of some rows, or the end-of-text token, has no embedding in the model."""
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    highest = max((max(row) for row in rows if len(row)), default=0)
    for token in (highest, tokenizer.eos_token_id):
        if token >= num_embeddings:
            raise ValueError(
                f"the tokenizer has a token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), and the model embeds "
                f"{num_embeddings}: model.resize_token_embeddings(len(tokenizer)), or take the tokenizer that belongs to it."
            )


def some_of(ids: Sequence[str]) -> str:
    """The first ids of some problems, for a message.

    Example:
        >>> some_of(["test-1", "test-2"]), some_of(list("abcdefg"))
        ('test-1, test-2', 'a, b, c, d, e, ...')
    """
    return ", ".join([*ids[:_NAMED], *(["..."] if len(ids) > _NAMED else [])])


def too_long(lengths: Sequence[int], longest: int | None) -> list[int]:
    """Which of some examples have more than `longest` tokens.

    Example:
        >>> too_long([5, 9, 3], longest=4)
        [0, 1]
    """
    return [] if longest is None else [index for index, length in enumerate(lengths) if length > longest]
