"""Small random models in Hugging Face directories, and what transformers computes with them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - what all models need, before test processes fork
from transformers import AutoConfig, AutoModelForCausalLM

from common.config import EngineSettings
from common.sampling import SamplingParams
from common.types import SampledToken
from engine.device import Device
from engine.local.device import LocalDevice
from engine.ranks.group import RankGroup
from engine.sampling.draws import draw
from engine.step import StepRow

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
    "dynamic_rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}},
    "yarn_rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}

# Windows are shorter than the prompts of the tests, and begin within a block.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 21, "head_dim": 20},
    "mistral_without_window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 24,
        "sliding_window": 18,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 24,
        "sliding_window": 18,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        },
    },
    "gemma3_all_sliding": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 37,
        "layer_types": ["sliding_attention"] * 3,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 25},
    "phi3_partial": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
            "long_factor": [2.0, 2.5, 3.0, 4.0, 6.0, 9.0],
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 30},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 16,
    },
    "qwen3_moe_sparse": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "head_dim": 16,
    },
}


def make_model(
    path: Path, overrides: Mapping[str, object] | None = None, *, dtype: torch.dtype = torch.float32
) -> Path:
    """A model with weights large enough that attention and every token matter; a Llama without `model_type`."""
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
    flags = {"model_type": "llama", **sizes, **(overrides or {})}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**flags))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "experts" in name or ".gate.weight" in name:  # some families leave these as they were
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def expected_logprobs(model_dir: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[len(token_ids), vocab_size]` float32, by transformers."""
    return expected_logprobs_of_all(model_dir, [token_ids], dtype)[0]


def expected_logprobs_of_all(
    model_dir: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`[len(sequences), len(sequences[0]), vocab_size]` float32, by transformers. The sequences are equally long."""
    # Other implementations of attention than this one leave out soft caps.
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(token_ids) for token_ids in sequences])).logits
    return logits.float().log_softmax(-1)


def make_runner(
    model_dir: Path,
    *,
    attention: str | None = None,
    num_blocks: int = 64,
    group: RankGroup | None = None,
    **kwargs: object,
) -> LocalDevice:
    """A float32 runner whose cache holds NaN, so that reading a slot that was never written shows."""
    settings = EngineSettings.model_validate(
        {
            "device": "cpu",
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "num_blocks": num_blocks,
            "num_threads": 1,
            **kwargs,
        }
    )
    runner = LocalDevice(model_dir, settings, attention=attention, group=group)
    runner.kv_cache.fill_(float("nan"))
    return runner


class Progress:
    """A prompt on its way through a runner: knows how far it is and which blocks it has."""

    def __init__(self, token_ids: Sequence[int], blocks: list[int]) -> None:
        self.token_ids = list(token_ids)
        self.blocks = blocks
        self.num_computed = 0
        self.logprobs: dict[int, torch.Tensor] = {}  # by position of the token that they follow

    def step(self, num_new: int) -> StepRow:
        start = self.num_computed
        self.num_computed = min(start + num_new, len(self.token_ids))
        params = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
        return StepRow(
            token_ids=self.token_ids[start : self.num_computed],
            num_computed_tokens=start,
            block_ids=self.blocks,
            draw=draw(params=params, num_output_tokens=0),
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


def advance(runner: Device, sequences: Sequence[Progress], sizes: Sequence[int]) -> None:
    """One engine step in which each sequence takes its number of new tokens."""
    for sequence, token in zip(
        sequences,
        runner.execute([s.step(size) for s, size in zip(sequences, sizes, strict=True)]),
        strict=True,
    ):
        sequence.took(token)


def bfloat16_errors(model_dir: Path, kernels: str) -> tuple[float, float]:
    """(Baton's, transformers'): root mean square of what logprobs in bfloat16 differ by from those in float32."""
    runner = make_runner(model_dir, dtype="bfloat16", kernels=kernels)
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    sequences = [random_sequences([60], seed=seed)[0] for seed in range(6)]
    for sequence in sequences:
        for size in (35, 20, 1, 1, 1, 1, 1):  # on both sides of the 32 rows of two tiles
            advance(runner, [sequence], [size])
    all_ids = [sequence.token_ids for sequence in sequences]
    all_exact = expected_logprobs_of_all(model_dir, all_ids)
    all_rounded = expected_logprobs_of_all(model_dir, all_ids, torch.bfloat16)
    for sequence, exact, rounded in zip(sequences, all_exact, all_rounded, strict=True):
        for position, logprobs in sequence.logprobs.items():
            ours.append((logprobs - exact[position]).square().mean())
            theirs.append((rounded[position] - exact[position]).square().mean())
    return float(torch.stack(ours).mean().sqrt()), float(torch.stack(theirs).mean().sqrt())


def edit_config(model_dir: Path, **changes: object) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
