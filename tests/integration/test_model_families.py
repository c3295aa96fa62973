"""Models of several families, split over a prefill and a decode worker: every token is transformers' own."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.chaos.tiny_model import TIE
from tests.integration.stack import Fleet, running
from tests.kv_store.lmcache_process import LMCacheProcess
from tests.nixl import skip_without_nixl
from tests.router.tiny_tokenizer import endless_tokenizer_files, vocab_size

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 60
LENGTHS = (5, 48, 131, 250)

_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.8,
}

_SHALLOW: dict[str, object] = {"num_hidden_layers": 4}
_CAPS: dict[str, object] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}

# Windows are shorter than most prompts, and layers differ.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 37, "query_pre_attn_scalar": 16, "pad_token_id": 0},
    "mistral": {"sliding_window": 45, "head_dim": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 29, "max_window_layers": 2, **_SHALLOW},
    "qwen3": {"head_dim": 24, **_SHALLOW},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 37,
        "query_pre_attn_scalar": 20,
        "pad_token_id": 0,
        **_CAPS,
        **_SHALLOW,
    },
    "phi3": {"sliding_window": 45, "pad_token_id": 0, **_SHALLOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 30, **_SHALLOW},
    # Blocks hold latents. Interleaved pairs or not, experts chosen by either rule.
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "topk_group": 1,
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 28,
        "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
}


def write_model(folder: Path, model_type: str) -> None:
    torch.manual_seed(5)
    sizes = {
        "vocab_size": vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,  # the sixth of a Gemma sees everything
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **FAMILIES[model_type]})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or ".gate.weight" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    for name, content in endless_tokenizer_files().items():
        (folder / name).write_bytes(content)


@torch.inference_mode()
def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """Up to the first token that rounding, which depends on the batch, could decide."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        best = model(torch.tensor([tokens])).logits[0, -1].double().topk(2)
        first, second = best.values.tolist()
        if first - second < TIE:
            break
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("connector", ["shared_storage", "nixl"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_split_over_two_workers(tmp_path: Path, model_type: str, connector: str) -> None:
    skip_without_nixl(connector)
    split(tmp_path, model_type, f"--connector={connector}")


def test_latents_through_lmcache(tmp_path: Path) -> None:
    server = LMCacheProcess()
    try:
        split(tmp_path, "deepseek_v3", "--connector=lmcache", f"--lmcache-address={server.address}")
    finally:
        server.close()


def split(tmp_path: Path, model_type: str, *connector: str) -> None:
    model_dir = tmp_path / "model"
    write_model(model_dir, model_type)
    rng = random.Random(model_type)
    prompts = [[rng.randrange(vocab_size()) for _ in range(length)] for length in LENGTHS]
    wanted = [greedy(model_dir, prompt) for prompt in prompts]
    assert sum(map(len, wanted)) > NUM_TOKENS * len(prompts) / 2
    flags = (
        f"--model={model_dir}",
        *connector,
        "--num-blocks=256",
        "--chunk-size=64",
        "--dtype=float32",
    )
    fleet = Fleet(tmp_path, *flags, prefill=1, decode=1, router_flags=["--min-remote-tokens=1"])
    with running(fleet), fleet.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
        for is_warm in (False, True):  # the second time what is known is taken from the prefix cache
            answers = [
                client.generate(prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts
            ]
            results = list(pool.map(lambda answer: answer.result(), answers))
            for result, expected in zip(results, wanted, strict=True):
                assert list(result.token_ids[: len(expected)]) == expected
                assert result.report.fallback_reason == ""
                assert is_warm or result.report.prefill_worker
        fleet.settle()
