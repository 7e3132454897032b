"""Which tokenizer made some tokens, and what it makes of a text."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# The parts of tokenizer.json that decide which ids a text gets. Others (padding, templates) change with how it was used.
_DECIDING = ("added_tokens", "normalizer", "pre_tokenizer", "model")


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase, name: str) -> dict[str, Any]:
    """What tells tokenizers apart: name, vocab_size, eos_token_id, and fingerprint, the sha256 of what makes ids of texts.

    Args:
        tokenizer: any with a backend of the tokenizers library.
        name: to call it by.

    Raises:
        ValueError: it has no such backend, or no EOS token, which ends each document.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"the tokenizer {name!r} is a {type(tokenizer).__name__} without a tokenizer.json: give one that has it "
            "(a fast tokenizer), or convert it with transformers first."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {name!r} has no EOS token, which is to end each document: set one "
            "(tokenizer.eos_token = ...) and save the tokenizer again, or give another."
        )
    content = json.loads(backend.to_str())
    deciding = json.dumps({part: content.get(part) for part in _DECIDING}, sort_keys=True)
    return {
        "name": name,
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,
        "eos_token_id": tokenizer.eos_token_id,
        "fingerprint": hashlib.sha256(deciding.encode()).hexdigest(),
    }


def document_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of documents: what the tokenizer makes of each text without adding anything, then its EOS."""
    if not texts:
        return []
    found = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id] for ids in found]


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the validation split: this follows from the hash of its text alone.

    So the same text is always on the same side, wherever it comes again.

    Args:
        text: of the document.
        share: of all texts, from 0 to 1, that are held out.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < share * 2**64


def check_share(validation_share: float) -> None:
    """Raise ValueError if so much cannot be held out."""
    if not 0 <= validation_share < 1:
        raise ValueError(f"validation_share={validation_share} is not allowed: give a share from 0 to below 1.")


END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer made of some texts: for small models, whose embeddings a large vocabulary would outweigh.

    Args:
        texts: to learn from; the same ones give the same tokenizer.
        vocab_size: of all tokens, the 256 bytes and the EOS among them.

    Raises:
        ValueError: vocab_size is below 257, or more than the texts give.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"], vocab_size=260)
        >>> tokenizer.decode(tokenizer("not to be")["input_ids"]), tokenizer.eos_token
        ('not to be', '<|endoftext|>')
    """
    if vocab_size < len(pre_tokenizers.ByteLevel.alphabet()) + 1:
        raise ValueError(f"vocab_size={vocab_size} is not allowed: 256 bytes and the EOS need at least 257.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() < vocab_size:
        raise ValueError(
            f"a new tokenizer of {vocab_size} tokens is more than the texts give: from those for training "
            f"{backend.get_vocab_size()} can be made."
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)
