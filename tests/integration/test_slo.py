"""With `--queue-policy slo` and a model of time, greedy answers are transformers' own, whoever is late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from common.batch_time_file import encode
from common.config import EngineSettings
from common.targets import LatencyTargets
from engine.learning.key import key_of, model_file
from engine.local.device import LocalDevice
from engine.simulated.data_sheet import simulated_time
from tests.integration.ask import Salt, check
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import Stack, running

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

TARGETS = (None, LatencyTargets(ttft_ms=100), LatencyTargets(tpot_ms=40), LatencyTargets(ttft_ms=10_000, tpot_ms=200))
NAMES = ("chat-capital", "random-160", "ledger-600")


def write_times(model_dir: Path, cache_dir: Path) -> None:
    """A model of time that workers here use: of a data sheet, as if it had been measured on this machine."""
    settings = EngineSettings(dtype="float32", num_threads=1, num_blocks=16)
    key = key_of(LocalDevice(model_dir, settings), settings)
    cache_dir.mkdir()
    model_file(str(cache_dir), key).write_bytes(encode(replace(simulated_time("xeon-135m").time, key=key)))


@pytest.mark.parametrize(
    "flags", [("--prefill=0", "--decode=0", "--both=1"), ("--min-remote-tokens=1",)], ids=["one worker", "two"]
)
def test_greedy_answers(
    model_dir: Path, tmp_path: Path, expected: dict[str, Expected], salt: Salt, flags: tuple[str, ...]
) -> None:
    write_times(model_dir, tmp_path / "cache")
    places = (f"--model={model_dir}", f"--cache-dir={tmp_path / 'cache'}")
    stack = Stack(tmp_path, *places, "--queue-policy=slo", "--num-blocks=128", *flags)
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
