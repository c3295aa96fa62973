"""Small random Llamas in Hugging Face directories, and what transformers computes with them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.config import EngineSettings
from common.types import SampledToken, SamplingParams
from engine.batch import SampleInput, SequenceInput
from engine.model_runner import ModelRunner

VOCAB_SIZE = 96
BLOCK_SIZE = 16

SHAPES: dict[str, dict[str, object]] = {
    "grouped_heads": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "all_heads": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one_kv_head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 32},
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
}


def make_model(path: Path, overrides: dict[str, object] | None = None, *, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama with weights large enough that attention and every token matter."""
    torch.manual_seed(sum(map(ord, path.name)))
    sizes: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **(overrides or {})}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.to(dtype).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def expected_logprobs(model_dir: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[len(token_ids), vocab_size]` float32, by transformers."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits.float().log_softmax(-1)


def make_runner(
    model_dir: Path, *, attention: str | None = None, num_blocks: int = 64, **kwargs: object
) -> ModelRunner:
    """A float32 runner whose cache holds NaN, so that reading a slot that was never written shows."""
    settings = EngineSettings.model_validate(
        {"dtype": "float32", "block_size": BLOCK_SIZE, "num_blocks": num_blocks, "num_threads": 1, **kwargs}
    )
    runner = ModelRunner(model_dir, settings, attention=attention)
    runner.kv_cache.fill_(float("nan"))
    return runner


class Progress:
    """A prompt on its way through a runner: knows how far it is and which blocks it has."""

    def __init__(self, token_ids: Sequence[int], blocks: list[int]) -> None:
        self.token_ids = list(token_ids)
        self.blocks = blocks
        self.num_computed = 0
        self.logprobs: dict[int, torch.Tensor] = {}  # by position of the token that they follow

    def step(self, num_new: int) -> SequenceInput:
        start = self.num_computed
        self.num_computed = min(start + num_new, len(self.token_ids))
        params = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
        return SequenceInput(
            token_ids=self.token_ids[start : self.num_computed],
            num_computed_tokens=start,
            block_ids=self.blocks,
            sample=SampleInput(params=params, num_output_tokens=0),
        )

    def took(self, token: SampledToken | None) -> None:
        assert token is not None
        self.logprobs[self.num_computed - 1] = full_logprobs(token)


def full_logprobs(token: SampledToken, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    row = torch.full((vocab_size,), float("nan"))
    for entry in token.top_logprobs:
        row[entry.token_id] = entry.logprob
    return row


def random_sequences(lengths: Sequence[int], *, num_blocks: int = 64, seed: int = 0) -> list[Progress]:
    """Random prompts on blocks in random order, none shared."""
    rng = random.Random(seed)
    free = rng.sample(range(num_blocks), num_blocks)
    result = []
    for length in lengths:
        count = -(-length // BLOCK_SIZE)
        blocks, free = free[:count], free[count:]
        result.append(Progress([rng.randrange(VOCAB_SIZE) for _ in range(length)], blocks))
    return result


def advance(runner: ModelRunner, sequences: Sequence[Progress], sizes: Sequence[int]) -> None:
    """One engine step in which each sequence takes its number of new tokens."""
    for sequence, token in zip(
        sequences,
        runner.execute([s.step(size) for s, size in zip(sequences, sizes, strict=True)]),
        strict=True,
    ):
        sequence.took(token)


def edit_config(model_dir: Path, **changes: object) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
