"""`baton up` with an LMCache server of its own: KV goes through it, and is there for the next stack."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.report import Result
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import CALL_TIMEOUT_S, Stack, running, wait_for
from tests.kv_store.lmcache_process import executable
from tests.nixl import needs_nixl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASE = BY_NAME["ledger-250"]
BLOCK_SIZE = 16
GROUP_BLOCKS = 16  # of a chunk of 256 tokens
SALTS = [f"tenant-{number}" for number in range(4)]


def ask(stack: Stack, expected: Expected, salt: str) -> Result:
    with stack.client() as client:
        result = client.generate(
            expected.prompt_token_ids, temperature=0.0, max_tokens=CASE.max_tokens, cache_salt=salt
        ).result()
    assert expected.explain(result.token_ids) == ""
    return result


def num_files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.data"))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--connector=lmcache",), id="lmcache"),
        pytest.param(("--connector=nixl", "--store=lmcache"), id="nixl and lmcache", marks=needs_nixl),
    ],
)
def test_the_next_stack_finds_what_this_one_computed(
    model_dir: Path, tmp_path: Path, expected: dict[str, Expected], flags: tuple[str, ...]
) -> None:
    executable()
    flags, wanted = (*flags, "--lmcache-size-gb=0.5"), expected[CASE.name]
    num_full = (len(wanted.prompt_token_ids) - 1) // BLOCK_SIZE
    stack = Stack(tmp_path, *flags)
    with running(stack), ThreadPoolExecutor(len(SALTS)) as pool:
        for result in pool.map(lambda salt: ask(stack, wanted, salt), SALTS):
            assert result.usage.cached_tokens == 0
            assert result.report.fallback_reason == ""
            assert result.report.num_blocks_moved >= num_full
        stack.settle()
        # The server writes its files when it has nothing else to do, one for each group of up to 16 blocks.
        wait_for("each tenant's KV is in files", lambda: num_files(stack.kv_dir) >= 4 * len(SALTS), CALL_TIMEOUT_S)

    (tmp_path / "up.log").unlink()  # the next one is to be read from its beginning
    stack = Stack(tmp_path, *flags)
    with running(stack):
        # Looking up is given little time, so not each of them has to be found on a busy machine.
        found = [ask(stack, wanted, salt).usage.cached_tokens for salt in SALTS]
        # What follows the last whole chunk may be in a group with the prompt's tail, which no lookup names.
        assert max(found) >= num_full // GROUP_BLOCKS * GROUP_BLOCKS * BLOCK_SIZE > 0, found
        assert ask(stack, wanted, "somebody else").usage.cached_tokens == 0
