"""What any worker computed is a hit on any other, and after all of them have been started again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from baton.client.report import Result
from common.cache_hints import Retain
from tests.integration import ask as asking
from tests.integration.prompts import BY_NAME
from tests.integration.reference import Expected
from tests.integration.stack import START_TIMEOUT_S, Fleet, Member, Stack, running, wait_for
from tests.nixl import needs_nixl

pytestmark = pytest.mark.timeout(900)

# Looked for, not imported: the library's log settings are the connector's business.

FIRST = BY_NAME["ledger-250"]
BLOCK_SIZE = 16


def ask(fleet: Fleet, token_ids: list[int], max_tokens: int, salt: str = "") -> Result:
    with fleet.client() as client:
        return client.generate(token_ids, temperature=0.0, max_tokens=max_tokens, cache_salt=salt).result()


def end(member: Member) -> None:
    """SIGTERM: what it computed is stored when it has ended."""
    member.process.popen.send_signal(signal.SIGTERM)
    assert member.process.popen.wait(120) == 0, member.process.tail()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="shared_storage"),
        pytest.param(("--connector=nixl", "--store=shared_storage"), id="nixl and a store", marks=needs_nixl),
    ],
)
def test_a_second_turn_is_a_hit_wherever_it_lands(
    model_dir: Path, tmp_path: Path, expected: dict[str, Expected], flags: tuple[str, ...]
) -> None:
    first = expected[FIRST.name]
    fleet = Fleet(tmp_path, *flags, prefill=1, decode=2)
    with running(fleet):
        answer = ask(fleet, first.prompt_token_ids, FIRST.max_tokens)
        assert first.explain(answer.token_ids) == ""
        # The KV of an answer's last token is never computed.
        turn = [*first.prompt_token_ids, *answer.token_ids]
        num_stored = (len(turn) - 1) // BLOCK_SIZE * BLOCK_SIZE
        second_turn = [*turn, *first.prompt_token_ids[:40]]

        one = fleet.member(answer.report.decode_worker)
        end(one)
        elsewhere = ask(fleet, second_turn, 8)
        assert elsewhere.report.decode_worker != one.address
        assert elsewhere.usage.cached_tokens == num_stored

        for member in list(fleet.members):
            if member is not one:
                end(member)
            fleet.restart(member)
        wait_for("every worker is ready", fleet.all_ready, START_TIMEOUT_S)
        # The second turn itself has been stored too, so another one that goes on from the first is asked.
        third = ask(fleet, [*turn, *range(100, 140)], 8)
        assert third.usage.cached_tokens == num_stored
        again = ask(fleet, second_turn, 8)
        assert again.token_ids == elsewhere.token_ids
        assert again.usage.cached_tokens == (len(second_turn) - 1) // BLOCK_SIZE * BLOCK_SIZE

        other = ask(fleet, second_turn, 8, salt="somebody else")
        assert other.token_ids == elsewhere.token_ids
        assert other.usage.cached_tokens == 0


def test_hints_reach_every_tier(model_dir: Path, tmp_path: Path, expected: dict[str, Expected]) -> None:
    prompt = expected[FIRST.name].prompt_token_ids
    num_blocks = len(prompt) // BLOCK_SIZE
    fleet = Fleet(tmp_path, prefill=1, decode=1)
    with running(fleet):
        with fleet.client() as client:
            answer = client.generate(prompt, temperature=0.0, max_tokens=8, retain=Retain(600)).result()
            kept = client.retain_prefix(600, prompt=prompt)
        assert [one.num_device_blocks for one in kept.workers] == [num_blocks] * 2
        for member in list(fleet.members):
            end(member)
            fleet.restart(member)
        wait_for("every worker is ready", fleet.all_ready, START_TIMEOUT_S)
        with fleet.client() as client:
            (brought,) = client.prefetch_prefix(prompt=prompt).workers
            assert (brought.num_device_blocks, brought.num_stored_blocks, brought.error) == (num_blocks, num_blocks, "")
            assert sum(one.num_stored_blocks for one in client.evict_prefix(prompt=prompt).workers) >= num_blocks
        again = ask(fleet, prompt, 8)
        assert (again.token_ids, again.usage.cached_tokens) == (answer.token_ids, 0)


@needs_nixl
def test_a_cache_that_evicts_all_the_time(model_dir: Path, tmp_path: Path, expected: dict[str, Expected]) -> None:
    """Handoff from memory to memory, a store beside it, host memory below a device of 48 blocks: the same answers."""
    flags = ("--connector=nixl", "--store=shared_storage", "--num-blocks=48", "--host-cache-gb=0.05", "--chunk-size=64")
    names = ["ledger-600", "ledger-250", "random-160", "chat-steps", "random-160", "ledger-600", "ledger-250"]
    stack = Stack(tmp_path, *flags)
    with running(stack):
        cached = {}
        for name in names:
            (result,) = asking.ask(stack, expected, [name], lambda: "").values()
            cached[name] = result.usage.cached_tokens  # the second time's
            stack.settle()
        for name in ("random-160", "ledger-600", "ledger-250"):
            assert cached[name] == (len(expected[name].prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
