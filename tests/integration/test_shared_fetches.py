"""Equal long prompts at the same time: their KV is computed once and moved once."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.tiny_model import random_prompt
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, running
from tests.integration.tiny import tiny_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 8
NUM_TOKENS = 1605  # a hundred full blocks, and five tokens


@pytest.fixture(scope="module", params=["shared_storage", "nixl"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if request.param == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("NIXL is not installed")
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
    with fleet.client() as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [
            client.generate(prompt, temperature=0.0, max_tokens=20, ignore_eos=True, cache_salt=one_salt)
            for _ in range(NUM_REQUESTS)
        ]
        fleet.busy("prefill")
        answers[0].cancel()
        results = list(pool.map(lambda answer: answer.result(), answers[1:]))
        again = client.generate(prompt, temperature=0.0, max_tokens=20, ignore_eos=True, cache_salt=salt()).result()
    assert {result.token_ids for result in results} == {again.token_ids}
