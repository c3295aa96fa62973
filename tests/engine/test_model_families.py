"""Every family against transformers: logits and greedy tokens, by torch and by each variant of the kernels."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.local.device import LocalDevice
from engine.models.decoder import Decoder
from tests.engine.kernels.variants import best_and_slow_others
from tests.engine.tiny_models import (
    BLOCK_SIZE,
    FAMILIES,
    VOCAB_SIZE,
    Progress,
    advance,
    bfloat16_errors,
    expected_logprobs,
    make_model,
    make_runner,
    random_sequences,
)

TOLERANCE = 2e-4  # of float32 logprobs, whose spread is about 10

each_family = pytest.mark.parametrize("family", FAMILIES)
VARIATIONS = ("mistral_without_window", "qwen2_windows", "gemma3_all_sliding", "phi3_partial", "qwen3_moe_sparse")
family_and_slow_variations = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIATIONS else []) for name in FAMILIES]
)
"""For what a family's flags do to logits, all are compared in the quick tier, too."""
each_kernel = pytest.mark.parametrize("kernels", best_and_slow_others)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(models: Path, family: str) -> Path:
    path = models / family
    return path if path.exists() else make_model(path, FAMILIES[family])


def runner_for(models: Path, family: str, kernels: str, **settings: Any) -> LocalDevice:
    runner = make_runner(model(models, family), kernels=kernels, num_threads=2, **settings)
    decoder = runner._model
    assert isinstance(decoder, Decoder)
    assert (decoder.native is not None) == (kernels != "torch")
    return runner


def check(path: Path, sequence: Progress) -> None:
    expected = expected_logprobs(path, sequence.token_ids)
    assert sequence.logprobs, "nothing was computed"
    for position, logprobs in sequence.logprobs.items():
        torch.testing.assert_close(logprobs, expected[position], atol=TOLERANCE, rtol=0)


@each_kernel
@each_family
def test_logits_in_chunks_and_single_tokens(models: Path, family: str, kernels: str) -> None:
    runner = runner_for(models, family, kernels)
    first, second = random_sequences([90, 40])
    for sizes in ((53, 1), (20, 30), (1, 1), (1, 1), (7, 1), (1, 5), (7, 1)):
        advance(runner, [first, second], sizes)
    check(model(models, family), first)
    check(model(models, family), second)


@cache
def greedy_of_transformers(path: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    token_ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = reference.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in answer[0, len(prompt) :]]


@each_kernel
@pytest.mark.parametrize(
    "family", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_greedy_tokens(models: Path, family: str, kernels: str) -> None:
    """Whole and in chunks, over the edges of blocks and windows. In the quick tier, those of the other families are
    compared by `test_model_engine.py`, as an engine computes them."""
    prompt = [random.Random(family).randrange(VOCAB_SIZE) for _ in range(61)]
    expected = greedy_of_transformers(model(models, family), tuple(prompt), 24)
    runner = runner_for(models, family, kernels)
    for chunk in (61, 16, 7):
        runner.kv_cache.fill_(float("nan"))
        progress = Progress(prompt, random.Random(chunk).sample(range(64), -(-90 // BLOCK_SIZE)))
        while progress.num_computed < len(prompt):
            result = runner.execute([progress.step(chunk)])
        for _ in expected:
            (token,) = result
            assert token is not None
            progress.token_ids.append(token.token_id)
            result = runner.execute([progress.step(1)])
        assert progress.token_ids[len(prompt) :] == expected


@each_kernel
@family_and_slow_variations
def test_bfloat16_is_at_most_a_tenth_worse_than_transformers(models: Path, family: str, kernels: str) -> None:
    """Both round to bfloat16 along the way; root mean square of what their logprobs differ by from float32's."""
    ours, theirs = bfloat16_errors(model(models, family), kernels=kernels)
    assert ours <= 1.1 * theirs
