"""By slack, with a model of time, greedy answers are transformers' own, whoever is late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.targets import LatencyTargets
from tests.integration.ask import Salt, check
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import Stack, running
from tests.integration.written_times import write_times

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

TARGETS = (None, LatencyTargets(ttft_ms=100), LatencyTargets(tpot_ms=40), LatencyTargets(ttft_ms=10_000, tpot_ms=200))
NAMES = ("chat-capital", "random-160", "ledger-600")


@pytest.mark.parametrize(
    "flags",
    [("--prefill=0", "--decode=0", "--both=1", "--queue-policy=slo"), ("--min-remote-tokens=1",)],
    ids=["one worker, slo", "two workers, auto"],
)
def test_greedy_answers(
    model_dir: Path, tmp_path: Path, expected: dict[str, Expected], salt: Salt, flags: tuple[str, ...]
) -> None:
    write_times(model_dir, tmp_path / "cache")
    places = (f"--model={model_dir}", f"--cache-dir={tmp_path / 'cache'}")
    stack = Stack(tmp_path, *places, "--num-blocks=128", *flags)
    with running(stack), stack.client() as client, ThreadPoolExecutor(32) as pool:
        futures = {
            (name, number): pool.submit(
                client.generate(
                    expected[name].prompt_token_ids,
                    temperature=0.0,
                    max_tokens=BY_NAME[name].max_tokens,
                    cache_salt=salt(),
                    slo=targets,
                    request_id=f"{name}/{number}",
                ).result
            )
            for name in NAMES
            for number, targets in enumerate(TARGETS)
        }
        results = {key: future.result() for key, future in futures.items()}
        stack.settle()
    for number in range(len(TARGETS)):
        check({name: results[name, number] for name in NAMES}, expected)
    log = (tmp_path / "up.log").read_text()
    assert "source=file" in log, "the workers decide by the model of time"
    assert "cannot meet its latency targets" in log, "some are late, and are answered all the same"
