"""Pairs of workers with unlike numbers of ranks, of stages, or of processes that experts are dealt out to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, make_model
from tests.integration.ask import Salt
from tests.integration.ranked import NUM_RANKS, RankedFleet, Size, check_pair
from tests.integration.reference import Expected
from tests.integration.stack import running
from tests.integration.test_quantized_models import greedy
from tests.nixl import needs_nixl
from tests.router.tiny_tokenizer import endless_tokenizer_files

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.mark.parametrize(
    ("connector", "sizes"),
    [
        pytest.param("nixl", (NUM_RANKS, 1), marks=needs_nixl),
        pytest.param("nixl", (NUM_RANKS, NUM_RANKS), marks=needs_nixl),
        ("shared_storage", (NUM_RANKS, (4, 1))),
        pytest.param("nixl", (1, (2, NUM_RANKS)), marks=needs_nixl),
    ],
)
def test_unlike_pairs(
    connector: str,
    sizes: Sequence[Size],
    expected: dict[str, Expected],
    salt: Salt,
    model_dir: object,
    tmp_path: Path,
) -> None:
    """A prefill worker hands over to a decode worker of as many ranks, or more, or fewer, or with another number of
    stages."""
    check_pair(tmp_path, connector, sizes, expected, salt)


@pytest.mark.parametrize("dealt", ["experts", "requests"])
def test_experts_that_are_dealt_out(dealt: str, tmp_path: Path) -> None:
    """A prefill worker whose ranks have some experts each hands over to such a one, and to one process with all. The
    requests of a step may be dealt out, too."""
    path = make_model(tmp_path / "model", FAMILIES["mixtral"])
    for file, content in endless_tokenizer_files().items():
        (path / file).write_bytes(content)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    rng = random.Random(5)
    flags = (f"--model={path}", "--dtype=float32", f"--cache-dir={tmp_path / 'cache'}")
    fleet = RankedFleet(tmp_path, "shared_storage", (2, 2, 1), *flags, dealt=dealt)
    used: set[str] = set()
    num_compared = 0
    with running(fleet), fleet.client() as client:
        for _ in range(20):  # the router chooses
            prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (40, 131, 75, 110)]
            asked = [client.generate(prompt, temperature=0.0, max_tokens=50, ignore_eos=True) for prompt in prompts]
            for prompt, answer in zip(prompts, asked, strict=True):
                result = answer.result()
                assert result.report.prefill_worker
                used.add(result.report.decode_worker)
                with torch.inference_mode():
                    expected = greedy(reference, prompt)
                assert list(result.token_ids[: len(expected)]) == expected
                num_compared += len(expected)
            if len(used) == 2:
                break
    assert len(used) == 2
    assert num_compared > 50
