"""A random Llama, small enough that faults and not arithmetic take the time."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.router.tiny_tokenizer import tokenizer_files, vocab_size


def write_tiny_model(folder: Path) -> None:
    """A Hugging Face directory. Weights are large, so that the likeliest token wins by far."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=vocab_size(),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)


@torch.inference_mode()
def greedy_answer(folder: Path, prompts: list[tuple[list[int], int]]) -> list[list[int]]:
    """What transformers continues each prompt with, for the number of tokens that stands beside it."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt, num_tokens in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(vocab_size()) for _ in range(num_tokens)]
