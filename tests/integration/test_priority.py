"""1P1D with `--queue-policy=priority`: urgent requests are answered before those that came earlier."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.client.report import Result
from common.sampling import SamplingOptions
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, running, wait_for
from tests.nixl import needs_nixl

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, needs_nixl]

# In the order in which they come. A step of priority is worth ten seconds, all come within a few.
PRIORITIES = {"later": 50, "first": 0, "second": 0, "soon": -50}
NUM_TOKENS = 1000  # of each answer, so that one ends long after the other
MAX_LEN = 32_000  # the answer that all wait for does not end while the test lasts
OPTIONS: SamplingOptions = {"temperature": 0.0, "ignore_eos": True}


def test_the_queue_is_in_the_order_of_priority(tmp_path: Path, salt: Salt) -> None:
    write_tiny_model(tmp_path / "model", max_len=MAX_LEN)
    # Without a store: a request that asks one counts as waiting before it is in the queue.
    flags = (f"--model={tmp_path / 'model'}", "--num-blocks=4096", "--queue-policy=priority", "--max-num-seqs=1")
    fleet = Fleet(tmp_path, *flags, "--connector=nixl", prefill=1, decode=1, router_flags=("--min-remote-tokens=1",))
    ended: list[str] = []
    with running(fleet), fleet.client() as client, ThreadPoolExecutor(len(PRIORITIES)) as pool:

        def ask(name: str) -> Result:
            prompt = random_prompt(random.Random(name), 50)
            options = OPTIONS | {"max_tokens": NUM_TOKENS}
            result = client.generate(prompt, priority=PRIORITIES[name], cache_salt=salt(), **options).result()
            ended.append(name)
            return result

        def num_waiting() -> int:
            return sum(worker.num_requests_waiting for worker in fleet.workers() if worker.role.value == "decode")

        running_one = client.generate(random_prompt(random.Random(1), 50), **OPTIONS | {"max_tokens": MAX_LEN - 100})
        next(iter(running_one))
        futures = []
        for name in PRIORITIES:
            futures.append(pool.submit(ask, name))
            wait_for(f"{name} waits", lambda: num_waiting() == len(futures))
        assert ended == []
        running_one.cancel()
        results = [future.result() for future in futures]
    assert ended == ["soon", "first", "second", "later"]
    for result in results:
        assert len(result.token_ids) == NUM_TOKENS
        assert result.report.prefill_worker
