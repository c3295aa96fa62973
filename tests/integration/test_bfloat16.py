"""The real model in bfloat16: hardly further from float32 than transformers' own bfloat16 is.

Every position of the prompts counts, not the last of each alone: a position's error depends on how its roundings happen
to fall, and the ratio of four positions alone is anything from 0.6 to 1.6 (5th and 95th percentile).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.config import EngineSettings
from engine.local.device import LocalDevice
from engine.step import StepRow
from tests.engine.kernels.variants import best_and_slow_others
from tests.integration.prompts import BY_NAME

pytestmark = pytest.mark.timeout(600)

NAMES = ("chat-poem", "chinese", "code-python", "random-160", "ledger-250")  # some 500 positions


def prompts(model_dir: Path) -> dict[str, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    found = {name: BY_NAME[name].prompt for name in NAMES}
    return {name: tokenizer(one)["input_ids"] if isinstance(one, str) else list(one) for name, one in found.items()}


def transformers_logprobs(
    model_dir: Path, token_ids: Mapping[str, list[int]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with torch.inference_mode():
        return {name: model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for name, ids in token_ids.items()}


def logprobs(runner: LocalDevice, token_ids: list[int]) -> torch.Tensor:
    """After each token, `[len(token_ids), vocab_size]` float32: what `LocalDevice` computes for the last one alone."""
    step = StepRow(token_ids=token_ids, num_computed_tokens=0, block_ids=list(range(32)), draw=None)
    with torch.inference_mode():
        attention = runner._attention.prepare([step])
        positions = torch.arange(len(token_ids))
        hidden = runner._model.forward(torch.tensor(token_ids), positions, attention, lambda: None)
        return runner._model.logits(hidden).float().log_softmax(-1)


def error(exact: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """Root of the mean square over all positions and tokens of the vocabulary."""
    return torch.cat([(found[name] - one).square().mean(-1) for name, one in exact.items()]).mean().sqrt().item()


@dataclass(slots=True, frozen=True)
class Reference:
    """What transformers computes."""

    token_ids: dict[str, list[int]]
    exact: dict[str, torch.Tensor]  # log probabilities in float32
    bfloat16_error: float


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Reference:
    token_ids = prompts(model_dir)
    exact = transformers_logprobs(model_dir, token_ids, torch.float32)
    return Reference(token_ids, exact, error(exact, transformers_logprobs(model_dir, token_ids, torch.bfloat16)))


@pytest.mark.parametrize("kernels", best_and_slow_others)
def test_logprobs(kernels: str, model_dir: Path, theirs: Reference) -> None:
    settings = {"device": "cpu", "dtype": "bfloat16", "kernels": kernels, "num_blocks": 32, "num_threads": 1}
    runner = LocalDevice(model_dir, EngineSettings.model_validate(settings))
    ours = error(theirs.exact, {name: logprobs(runner, ids) for name, ids in theirs.token_ids.items()})
    print(f"{kernels}: {ours / theirs.bfloat16_error:.3f} of transformers' error")
    assert ours < 1.1 * theirs.bfloat16_error
