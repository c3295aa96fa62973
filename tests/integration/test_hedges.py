"""A prefill worker that hangs costs a request some tenths of a second, if another one is asked beside it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.client.report import Result
from router.running.prefill_times import MIN_PROMPTS
from tests.chaos.tiny_model import random_prompt
from tests.integration.ask import Salt
from tests.integration.stack import START_TIMEOUT_S, Fleet, descendants, running, wait_for
from tests.integration.tiny import tiny_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE_TIMEOUT_S = 60.0
NUM_PROMPT_TOKENS = 200


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = (f"--engine-timeout={ENGINE_TIMEOUT_S:g}",)
    folder = tmp_path_factory.mktemp("fleet")
    fleet = tiny_fleet(folder, *flags, prefill=2, decode=1, router_flags=("--hedge-prefill",))
    with running(fleet):
        yield fleet


@pytest.mark.parametrize("what", ["engine", "worker"])
def test_a_request_goes_on_beside_a_prefill_worker_that_hangs(fleet: Fleet, salt: Salt, what: str) -> None:
    """A front alone would notice its engine in a minute, and a decode worker a whole worker in five seconds."""
    rng = random.Random(what)
    prompts = [random_prompt(rng, NUM_PROMPT_TOKENS) for _ in range(4)]
    with fleet.client() as client:

        def ask(prompt: list[int]) -> Result:
            options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
            return client.generate(prompt, cache_salt=salt(), **options).result()  # type: ignore[arg-type]

        for _ in range(MIN_PROMPTS):
            ask(random_prompt(rng, NUM_PROMPT_TOKENS))
        wanted = [ask(prompt).token_ids for prompt in prompts]
        victim = next(member for member in fleet.members if member.role == "prefill")
        pids = descendants(victim.process.popen.pid) | ({victim.process.popen.pid} if what == "worker" else set())
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(len(prompts)) as pool:
                results = list(pool.map(ask, prompts))
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    assert [result.token_ids for result in results] == wanted
    hedged = [result.report for result in results if result.report.num_hedges]
    assert hedged
    assert all(report.num_hedges_won == 1 and report.num_retries == 0 for report in hedged)
    assert victim.address not in {result.report.prefill_worker for result in results}
    assert all(result.report.timings.total_ms < ENGINE_TIMEOUT_S * 1000 / 4 for result in results)
    wait_for("the worker is back", fleet.all_ready, START_TIMEOUT_S)
