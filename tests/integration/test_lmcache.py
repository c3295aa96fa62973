"""`baton up` with an LMCache server of its own: KV goes through it, and is there for the next stack."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from baton.client.report import Result
from baton.stack import lmcache_server
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import CALL_TIMEOUT_S, START_TIMEOUT_S, Stack, alive, descendants, running, wait_for
from tests.kv_store.lmcache_process import executable
from tests.nixl import needs_nixl

pytestmark = pytest.mark.timeout(900)

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
    """Those of groups of blocks."""
    return sum(1 for _ in folder.rglob("*-x*.data"))


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


def process_with(stack: Stack, argument: str) -> tuple[int, list[str]]:
    """Pid and command line of the first process of `stack` that was given `argument`."""
    for pid in sorted(descendants(stack.process.popen.pid)):
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if argument in argv:
            return pid, argv
    raise AssertionError(f"no process was given {argument}")


def pool_of(argv: list[str]) -> Path:
    return lmcache_server.pool_path(argv[argv.index("--shm-name") + 1])


def test_a_server_that_is_killed_comes_back(tmp_path: Path) -> None:
    """Requests are answered while it is away; what is stored afterwards is found, also by workers that start later."""
    executable()
    write_tiny_model(tmp_path / "model")
    prompt = random_prompt(random.Random(1), 300)  # one whole chunk, and some more
    stack = Stack(tmp_path, f"--model={tmp_path / 'model'}", "--connector=lmcache", "--lmcache-size-gb=0.25")

    def ask_tiny(salt: str) -> Result:
        with stack.client() as client:
            return client.generate(prompt, temperature=0.0, max_tokens=12, ignore_eos=True, cache_salt=salt).result()

    def has_logged(line: str) -> bool:
        return line in stack.process.log.read_text()

    with running(stack):
        wanted = ask_tiny("before").token_ids
        server, before = process_with(stack, "--shm-name")
        assert pool_of(before).exists()
        os.kill(server, signal.SIGKILL)
        wait_for("the server has ended", lambda: not alive({server}))
        assert ask_tiny("while it is away").token_ids == wanted

        wait_for("the server is back", lambda: has_logged("a server is back server=lmcache"), START_TIMEOUT_S)
        assert has_logged("a server went away, starting it again server=lmcache")
        _, after = process_with(stack, "--shm-name")
        assert after[after.index("--port") + 1] == before[before.index("--port") + 1]
        assert pool_of(after).exists()
        assert not pool_of(before).exists()
        asked: list[Result] = []

        def moves_blocks() -> bool:
            asked.append(ask_tiny(f"afterwards {len(asked)}"))
            return asked[-1].report.fallback_reason == "" and asked[-1].report.num_blocks_moved > 0

        wait_for("workers have found the new server", moves_blocks, CALL_TIMEOUT_S)
        for salt in SALTS:
            assert ask_tiny(salt).report.fallback_reason == ""
        stack.settle()

        # New workers have no cache of their own: what they find of a prefix is the server's.
        for name in ("prefill", "decode"):
            worker, _ = process_with(stack, name)
            os.kill(worker, signal.SIGKILL)
        for name in ("prefill-1", "decode-1"):
            wait_for("it is back", partial(has_logged, f"a worker is back worker={name}"), START_TIMEOUT_S)
        stack.settle()
        found = [ask_tiny(salt) for salt in SALTS]
    assert {result.token_ids for result in (*asked, *found)} == {wanted}
    assert max(result.usage.cached_tokens for result in found) >= GROUP_BLOCKS * BLOCK_SIZE
