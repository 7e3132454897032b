"""A base model of a few thousand weights with a tokenizer of single characters, saved as a pretrained one would be."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import crosscurrent as cc

CHARACTERS = ["<pad>", "<unk>", *string.printable]
CHAT_TEMPLATE = "{% for message in messages %}Q: {{ message['content'] }}\nA: {% endfor %}"


def save_tiny_base(folder: Path) -> Path:
    """Save a Llama of 4 layers and its tokenizer into `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        initializer_range=0.3,  # far enough from 0 for texts to differ
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def save_opened_retrofit(base: Path, folder: Path, solver: Any = None) -> Path:
    """Save a retrofit of it whose recurrence matters: its gates are open, and few iterations are not enough."""
    torch.manual_seed(1)
    model = cc.retrofit(AutoModelForCausalLM.from_pretrained(base), 1, 3, solver=solver)
    with torch.no_grad():
        for parameter in model.fusion.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def character_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({character: index for index, character in enumerate(CHARACTERS)}, "<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
