"""Equal long prompts at the same time: their KV is computed once and moved once."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.tiny_model import random_prompt
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, engines, running, wait_for
from tests.integration.tiny import tiny_fleet
from tests.nixl import skip_without_nixl

pytestmark = pytest.mark.timeout(600)

NUM_REQUESTS = 8
NUM_TOKENS = 1605  # a hundred full blocks, and five tokens


@pytest.fixture(scope="module", params=["shared_storage", "nixl"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    skip_without_nixl(request.param)
    flags = (f"--connector={request.param}", "--chunk-size=32")
    fleet = tiny_fleet(tmp_path_factory.mktemp("fleet"), *flags, prefill=1, decode=1)
    with running(fleet):
        yield fleet


def test_each_block_moves_once(fleet: Fleet, salt: Salt) -> None:
    prompt, one_salt = random_prompt(random.Random(1), NUM_TOKENS), salt()
    with fleet.client() as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [
            client.generate(prompt, temperature=0.0, max_tokens=20, ignore_eos=True, cache_salt=one_salt)
            for _ in range(NUM_REQUESTS)
        ]
        results = list(pool.map(lambda answer: answer.result(), answers))
    assert len({result.token_ids for result in results}) == 1
    assert {result.report.fallback_reason for result in results} == {""}
    assert sum(result.report.num_blocks_moved for result in results) <= 101
    assert sum(bool(result.report.prefill_worker) for result in results) == 1


def test_the_first_of_them_is_cancelled(fleet: Fleet, salt: Salt) -> None:
    prompt, one_salt = random_prompt(random.Random(2), NUM_TOKENS), salt()
    prefill = next(member for member in fleet.members if member.role == "prefill")
    (engine,) = engines(prefill.process.popen.pid)
    with fleet.client() as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        os.kill(engine, signal.SIGSTOP)  # or it might be done before anything is cancelled
        answers = [
            client.generate(prompt, temperature=0.0, max_tokens=20, ignore_eos=True, cache_salt=one_salt)
            for _ in range(NUM_REQUESTS)
        ]
        wait_for("all of them wait", lambda: _num_running(fleet, "decode") == NUM_REQUESTS)
        answers[0].cancel()
        wait_for("one is cancelled", lambda: _num_running(fleet, "decode") == NUM_REQUESTS - 1)
        os.kill(engine, signal.SIGCONT)
        results = list(pool.map(lambda answer: answer.result(), answers[1:]))
        again = client.generate(prompt, temperature=0.0, max_tokens=20, ignore_eos=True, cache_salt=salt()).result()
    assert {result.token_ids for result in results} == {again.token_ids}


def _num_running(fleet: Fleet, role: str) -> int:
    return sum(worker.num_requests_running for worker in fleet.workers() if worker.role.value == role)
