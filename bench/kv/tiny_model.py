"""A model of random weights that computes next to nothing: what is left to measure is the control plane."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.model_files import TOKENIZER_FILES

_OWN_FILES = ("config.json", "generation_config.json")


def make_tiny_model(
    path: Path,
    tokenizer_of: Path,
    *,
    vocab_size: int = 49_152,
    max_model_len: int = 8192,
) -> Path:
    """Random weights, in `path`, with the tokenizer of the model in `tokenizer_of`. One layer, and blocks of 1 KiB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for name in TOKENIZER_FILES:
        if name not in _OWN_FILES and (tokenizer_of / name).is_file():
            shutil.copy(tokenizer_of / name, path / name)
    return path
