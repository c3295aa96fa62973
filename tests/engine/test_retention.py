"""Blocks that a hint retains are evicted after all others, for a time, and only so many of each tenant."""

from __future__ import annotations

import pytest

from common.cache_hints import Retain
from engine import messages as m
from engine.blocks.block_manager import BlockManager
from engine.blocks.retention import Retention
from engine.request import Request
from tests.engine.test_block_manager import ROOT, computed, make_request
from tests.support.fake_device import add, assert_idle, make_core, reference, run, tokens_of

A, B = list(range(8)), list(range(20, 28))  # two full blocks of four tokens each


def manager(num_blocks: int = 6, **options: object) -> BlockManager:
    return BlockManager(num_blocks, 4, ROOT, **options)  # type: ignore[arg-type]


def finish(blocks: BlockManager, prompt: list[int], retain: Retain | None = None, tenant: str = "") -> None:
    request = computed(blocks, prompt)
    request.retain, request.tenant = retain, tenant
    blocks.free(request)


def num_found(blocks: BlockManager, prompt: list[int]) -> int:
    return blocks.find_prefix(make_request([*prompt, 0]))


def take(blocks: BlockManager, num_blocks: int) -> Request:
    """A request that needs so many blocks and finds none."""
    request = make_request([90] * 4 * num_blocks, "needy")
    assert blocks.allocate(request, 4 * num_blocks)
    return request


@pytest.mark.parametrize("seconds", [0, 10])
def test_what_is_retained_outlives_what_was_used_later(seconds: int) -> None:
    blocks = manager()
    finish(blocks, A, Retain(seconds) if seconds else None)
    finish(blocks, B)
    needy = take(blocks, 4)
    assert (num_found(blocks, A), num_found(blocks, B)) == ((2, 0) if seconds else (0, 2))
    assert blocks.check_integrity([needy]) == []


def test_only_the_first_tokens_are_retained_if_so_asked() -> None:
    blocks = manager()
    finish(blocks, A, Retain(10, num_tokens=7))
    finish(blocks, B)
    take(blocks, 5)
    assert (num_found(blocks, A), num_found(blocks, B)) == (1, 0)


def test_it_ends() -> None:
    blocks = manager()
    blocks.expire_retention(100.0)
    finish(blocks, A, Retain(10))
    finish(blocks, B)
    blocks.expire_retention(109.9)
    assert len(blocks.retention) == 2
    blocks.expire_retention(110.0)
    assert len(blocks.retention) == 0
    take(blocks, 4)
    assert (num_found(blocks, A), num_found(blocks, B)) == (0, 2)


def test_a_later_hint_makes_it_longer_and_never_shorter() -> None:
    blocks = manager()
    finish(blocks, A, Retain(10))
    finish(blocks, A, Retain(2))
    blocks.expire_retention(5.0)
    assert len(blocks.retention) == 2
    finish(blocks, A, Retain(10))
    blocks.expire_retention(12.0)
    assert len(blocks.retention) == 2


def test_a_request_that_needs_the_blocks_gets_them() -> None:
    """Rather than wait, or have another request preempted."""
    blocks = manager()
    finish(blocks, A, Retain(10))
    finish(blocks, B, Retain(10))
    needy = take(blocks, 6)
    assert num_found(blocks, A) == num_found(blocks, B) == len(blocks.retention) == 0
    assert blocks.counts.take().yielded == 4
    assert blocks.check_integrity([needy]) == []


def test_host_memory_keeps_it_too() -> None:
    blocks = manager(num_blocks=2, num_host_blocks=2, keep_evicted=True)
    finish(blocks, A, Retain(10))
    finish(blocks, B)  # A goes to host memory
    finish(blocks, list(range(40, 48)))  # B would, and A would make room
    assert (num_found(blocks, A), num_found(blocks, B)) == (2, 0)
    blocks.expire_retention(10.0)
    finish(blocks, B)
    assert num_found(blocks, A) == 0


def test_the_end_of_a_long_prompt_is_what_a_tenant_may_not_retain() -> None:
    blocks = manager(num_blocks=8, retain_tenant_share=0.5)
    finish(blocks, list(range(24)), Retain(10))
    assert len(blocks.retention) == 4
    assert blocks.counts.take().outbid == 2
    take(blocks, 4)
    assert num_found(blocks, list(range(24))) == 4


def test_beyond_a_tenants_share_the_oldest_gives_way() -> None:
    blocks = manager(num_blocks=8, retain_tenant_share=0.375)
    finish(blocks, A, Retain(10), "t")
    finish(blocks, B, Retain(10), "t")
    take(blocks, 5)
    assert (num_found(blocks, A), num_found(blocks, B)) == (1, 2), "of A its end went first"


def test_beyond_the_share_of_all_the_tenant_with_the_most_gives_way() -> None:
    names = [bytes([number]) * 16 for number in range(6)]
    retention = Retention(4, 4)
    retention.retain("large", names[:3], 10.0)
    changed, num_lost = retention.retain("small", names[3:5], 5.0)
    assert (num_lost, names[2] in changed) == (1, True)
    assert set(retention.names()) == {*names[:2], *names[3:5]}
    assert retention.check_integrity(names) == []


def test_what_two_tenants_retain_ends_with_the_later_one() -> None:
    retention, name = Retention(4, 4), b"n" * 16
    retention.retain("a", [name], 10.0)
    retention.retain("b", [name], 20.0)
    assert retention.expire(10.0) == []
    assert retention.release("a", [name]) == []
    assert retention.release("b", [name]) == [name]
    assert retention.check_integrity([]) == []


@pytest.mark.parametrize("retains", [False, True])
def test_a_request_says_so(retains: bool) -> None:
    core, runner = make_core(num_blocks=12, retain_tenant_share=0.5)
    prompt, others = list(range(14)), [list(range(start, start + 14)) for start in (20, 40, 60, 80)]
    add(core, "first", prompt, max_tokens=2, retain=Retain(10_000.0) if retains else None, tenant="t")
    run(core)
    for number, other in enumerate(others):
        add(core, f"other-{number}", other, max_tokens=2)
        run(core)
    runner.num_tokens_per_step.clear()
    add(core, "again", prompt, max_tokens=2)
    assert tokens_of(run(core))["again"] == reference(prompt, 2)
    assert runner.num_tokens_per_step[0] == (2 if retains else 14)
    assert_idle(core)


def test_a_prefill_worker_retains_it_when_the_lease_has_ended() -> None:
    core, _ = make_core()
    add(core, "a", list(range(9)), mode=m.RequestMode.PREFILL, retain=Retain(1000.0))
    run(core)
    assert len(core.blocks.retention) == 0
    core.handle(m.Release("a"))
    assert len(core.blocks.retention) == 2
