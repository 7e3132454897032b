"""State tracking and retrieval at once: products of permutations, and beside each step a value to be looked up.

Reads a dictionary, "|" and the steps after BOS: `20134 k d e q 10234 a z b o ... | 10234 _ _ _ _ 20134 _ _ _ _ ...`. Each
entry of the dictionary is a permutation and 4 random letters, in random order and without delimiters; each step is a
permutation and 4 slots. Predicts at the permutation of a step the running product so far, and at its slots the letters of
the step's key: `10234 a z b o 21034 k d e q`. BOS, the dictionary and "|" are the prompt, which is not recurrent.

The key of a step is its own permutation in `s5_retrieval`, as in the authors' generator, so that tracking and retrieval run
side by side. In `s5_retrieval_state` it is the product so far, as their paper's text has it, so that the state is needed
to look anything up. (This project's reading:) the dictionary of the former holds 16 permutations drawn anew for each
example, from which the steps are drawn; that of the latter holds all 120, so that it does not tell which states are reached.
"""

import random
import string
from typing import ClassVar

from crosscurrent.tasks.permutations import IDENTITY, PERMUTATIONS, then
from crosscurrent.tasks.splits import Split
from crosscurrent.tasks.task import BOS, Layout, Lengths, Symbols, Task

VALUE_LENGTH = 4
STEP_LENGTH = 1 + VALUE_LENGTH  # tokens of a step, and of an entry of the dictionary
DELIMITER, SLOT = "|", "_"


class S5Retrieval(Task):
    """Products of permutations, and beside each product the letters that a dictionary has for the step's permutation.

    Attributes:
        num_entries: of the dictionary.
    """

    name = "s5_retrieval"
    num_entries: ClassVar[int] = 16
    vocabulary = (*PERMUTATIONS, *string.ascii_lowercase, DELIMITER, SLOT, BOS)
    chance = (1 / len(PERMUTATIONS) + VALUE_LENGTH / len(string.ascii_lowercase)) / STEP_LENGTH  # of a token
    lengths = Lengths(tuple(range(1, 33)), (16, 32), (8, 16, 24, 32, 40, 48))
    num_validation = 64
    num_test = 256
    min_held_out_length = 1  # the dictionary alone sets examples apart
    metrics: ClassVar[tuple[str, ...]] = ("tokens", "states", "values", "sequence")
    prefix_supervision = True

    def key(self, action: str, state: str) -> str:
        """What a step looks up, given its permutation and the product so far, its own among it."""
        return action

    def draw(self, numbers: random.Random, length: int, split: Split) -> Symbols:
        """The dictionary, "|" and `length` permutations."""
        keys = numbers.sample(PERMUTATIONS, self.num_entries)
        entries = [(key, *numbers.choices(string.ascii_lowercase, k=VALUE_LENGTH)) for key in keys]
        return (*(symbol for entry in entries for symbol in entry), DELIMITER, *numbers.choices(keys, k=length))

    def layout(self, payload: Symbols, prefix_supervision: bool) -> Layout:
        end = payload.index(DELIMITER)
        prompt, actions = payload[: end + 1], payload[end + 1 :]
        values = {prompt[place]: prompt[place + 1 : place + STEP_LENGTH] for place in range(0, end, STEP_LENGTH)}
        state, read, answers = IDENTITY, list(prompt), list[str | None]()
        for action in actions:
            state = then(state, action)
            read += [action, *[SLOT] * VALUE_LENGTH]
            answers += [state, *values[self.key(action, state)]]
        if not prefix_supervision:
            answers[:-STEP_LENGTH] = [None] * (len(answers) - STEP_LENGTH)
        return Layout(tuple(read), (*[None] * len(prompt), *answers), num_prompt=len(prompt))


class S5RetrievalState(S5Retrieval):
    """Products of permutations, and beside each product the letters that a dictionary has for it."""

    name = "s5_retrieval_state"
    num_entries = len(PERMUTATIONS)

    def key(self, action: str, state: str) -> str:
        return state
