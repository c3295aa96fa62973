"""Greedy answers are transformers' own with each variant of the kernels, on both sides of a handoff."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.kernels.variants import ALL
from tests.integration.ask import Salt, ask
from tests.integration.stack import Stack, running
from tests.integration.test_equality import BLOCK_SIZE, FEW, FEWEST, Answers

pytestmark = pytest.mark.timeout(600)  # machines differ much in what they compute


@pytest.mark.parametrize("kernels", ALL)
def test_each_variant(model_dir: Path, tmp_path: Path, expected: Answers, salt: Salt, kernels: str) -> None:
    """Cold, and from the prefix caches of both workers."""
    stack = Stack(tmp_path, f"--kernels={kernels}", "--min-remote-tokens=1")
    with running(stack):
        ask(stack, expected, FEW, salt)
        for _ in range(2):
            results = ask(stack, expected, FEWEST, lambda: "warm")
        stack.settle()
        log = (tmp_path / "up.log").read_text(errors="replace")
    for name, result in results.items():
        assert result.usage.cached_tokens == (len(expected[name].prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE, name
    assert re.findall(r"\bkernels kernels=(\w+)", log) == [kernels] * 2
