"""The real model in bfloat16: no further from float32 than transformers' own bfloat16 is by half."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import EngineSettings
from common.types import SamplingParams
from engine.batch import SampleInput, SequenceInput
from engine.model_runner import ModelRunner
from tests.engine.tiny_models import expected_logprobs, full_logprobs
from tests.integration.reference import Expected

pytestmark = pytest.mark.timeout(600)

NAMES = ("chat-poem", "chinese", "code-python", "random-160")


def test_logprobs(model_dir: Path, expected: dict[str, Expected]) -> None:
    settings = EngineSettings.model_validate({"dtype": "bfloat16", "num_blocks": 32, "num_threads": 1})
    runner = ModelRunner(model_dir, settings)
    sample = SampleInput(params=SamplingParams(temperature=0.0, logprobs=runner.vocab_size), num_output_tokens=0)
    ours, theirs = [], []
    for name in NAMES:
        token_ids = expected[name].prompt_token_ids
        exact = expected_logprobs(model_dir, token_ids)[-1]
        rounded = expected_logprobs(model_dir, token_ids, torch.bfloat16)[-1]
        step = SequenceInput(token_ids=token_ids, num_computed_tokens=0, block_ids=list(range(16)), sample=sample)
        (token,) = runner.execute([step])
        assert token is not None
        ours.append((full_logprobs(token, runner.vocab_size) - exact).square().mean())
        theirs.append((rounded - exact).square().mean())
    assert torch.stack(ours).mean().sqrt() < 1.5 * torch.stack(theirs).mean().sqrt()
