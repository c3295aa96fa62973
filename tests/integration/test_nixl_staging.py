"""NIXL through host memory, between workers, with less room for staged blocks than one prompt has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.tiny_model import random_prompt
from tests.integration.ask import Salt
from tests.integration.stack import Fleet, running
from tests.integration.tiny import tiny_fleet
from tests.nixl import needs_nixl

pytestmark = [
    pytest.mark.timeout(600),
    needs_nixl,
]

NUM_TOKENS = 1605  # a hundred full blocks of 16 KiB, and five tokens


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ("--connector=nixl", "--nixl-staging=always", "--nixl-staging-gb=0.0005", "--transfer-timeout-s=60")
    fleet = tiny_fleet(tmp_path_factory.mktemp("fleet"), *flags, prefill=1, decode=1)  # 32 slots
    with running(fleet):
        yield fleet


def test_prompts_larger_than_the_pool(fleet: Fleet, salt: Salt) -> None:
    """Slots come back as blocks are read, long before the leases end; nothing is computed twice."""
    # Two at a time: a third would be computed in place, as the prefill worker is busy.
    prompts = [random_prompt(random.Random(number), NUM_TOKENS) for number in range(2)]
    with fleet.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
        answers = [
            client.generate(prompt, temperature=0.0, max_tokens=8, ignore_eos=True, cache_salt=salt())
            for prompt in prompts
        ]
        results = list(pool.map(lambda answer: answer.result(), answers))
        again = client.generate(prompts[0], temperature=0.0, max_tokens=8, ignore_eos=True, cache_salt=salt()).result()
    assert {result.report.fallback_reason for result in results} == {""}
    assert [result.report.num_blocks_moved for result in results] == [101] * 2
    assert again.token_ids == results[0].token_ids
