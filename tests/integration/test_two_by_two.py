"""Two prefill and two decode workers: the load spreads, and whoever answers, the answer is the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.integration.ask import Salt, ask
from tests.integration.reference import Expected
from tests.integration.stack import Stack, running

NAMES = ["capital", "german", "arabic", "hindi", "thai", "korean", "random-17", "json", "code-c", "emoji", "random-160"]


@pytest.mark.timeout(600)
def test_load_spreads(model_dir: Path, tmp_path: Path, expected: dict[str, Expected], salt: Salt) -> None:
    stack = Stack(tmp_path, "--prefill=2", "--decode=2", "--num-blocks=256", "--min-remote-tokens=1")
    with running(stack):
        results = ask(stack, expected, NAMES, salt)
        stack.settle()
        decode = Counter(result.report.decode_worker for result in results.values())
        prefill = Counter(result.report.prefill_worker for result in results.values())
        workers = {role: {w.address for w in stack.workers() if w.role.value == role} for role in ("prefill", "decode")}
    assert decode.keys() == workers["decode"]
    assert prefill.keys() == workers["prefill"]
    assert min([*decode.values(), *prefill.values()]) >= 2
