"""A random Llama, small enough that faults and not arithmetic take the time."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.sampling.sampler import uniform
from tests.router.tiny_tokenizer import endless_tokenizer_files, vocab_size

TIE = 1e-5  # float32 logits of one token differ by about 1e-6 between batches


def write_tiny_model(
    folder: Path, *, hidden_size: int = 64, num_layers: int = 4, initializer_range: float = 0.3, max_len: int = 4096
) -> None:
    """A Hugging Face directory. Weights are large, so that the likeliest token wins by far."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        initializer_range=initializer_range,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, content in endless_tokenizer_files().items():
        (folder / name).write_bytes(content)


@torch.inference_mode()
def reference_answer(
    model: LlamaForCausalLM, prompt: list[int], max_tokens: int, *, temperature: float, seed: int, tie: float = TIE
) -> list[int]:
    """What transformers' logits and Baton's rule of drawing give.

    Ends before the first token that is a tie: one that rounding, which depends on the batch, could decide.
    """
    answer: list[int] = []
    tokens, past = torch.tensor([prompt]), None
    while len(answer) < max_tokens:
        out = model(tokens, past_key_values=past, use_cache=True)
        token, margin = _choose(out.logits[0, -1].double(), temperature, seed, len(answer))
        if margin < tie:
            break
        answer.append(token)
        tokens, past = torch.tensor([[token]]), out.past_key_values
    return answer


def _choose(logits: torch.Tensor, temperature: float, seed: int, index: int) -> tuple[int, float]:
    """The token, and by how much it is the one."""
    if temperature == 0:
        (first, second), (token, _) = (values.tolist() for values in logits.topk(2))
        return token, first - second
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    target = uniform(seed, index) * float(cumulative[-1])
    token = int(torch.searchsorted(cumulative, torch.tensor([target], dtype=torch.double), right=True)[0])
    below = float(cumulative[token - 1]) if token else 0.0
    return token, min(target - below, float(cumulative[token]) - target)


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(vocab_size()) for _ in range(num_tokens)]
