"""What callers ask of one worker's caches by names of blocks: to keep them for a while, or to forget them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.block_hash import block_hashes, extra_keys, root_hash
from engine import messages as m
from engine.cache_hints import STORE_TIMEOUT_S
from engine.core import EngineCore
from kv_store.base import ConnectorConfig, Eviction
from kv_store.memory import MemoryConnector
from kv_store.shared_storage.connector import SharedStorageConnector
from tests.engine import test_store
from tests.engine.test_block_manager import make_request
from tests.support.fake_device import PATIENCE_S, SPEC, add, assert_idle, make_core, reference, run, still, tokens_of

PROMPT = list(range(22))  # five full blocks


def names(prompt: Sequence[int] = PROMPT, salt: str = "") -> list[bytes]:
    return block_hashes(root_hash(SPEC.fingerprint()), prompt, SPEC.block_size, extra_keys(cache_salt=salt))


def hint(core: EngineCore, action: m.CacheAction, hashes: list[bytes], seconds: float = 0.0) -> m.CacheHinted:
    core.handle(m.HintCache(call_id=7, action=action, block_hashes=hashes, seconds=seconds))
    give_up, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not (events := [event for event in core.take_events() if isinstance(event, m.CacheHinted)]):
        assert time.monotonic() < give_up, "no answer"
        core.step()
        pause.wait(0.001)
    assert core.scheduler.check_integrity() == []
    return events[0]


def test_what_is_evicted_is_computed_again() -> None:
    core, runner = make_core()
    add(core, "first", PROMPT, max_tokens=2)
    run(core)
    core.take_block_news()
    assert hint(core, m.CacheAction.EVICT, names()[:3]) == m.CacheHinted(call_id=7, num_device_blocks=3)
    (news,) = core.take_block_news()
    assert news == m.BlocksChanged(b"", b"".join(names()[:3]))
    runner.num_tokens_per_step.clear()
    add(core, "again", PROMPT, max_tokens=2)
    assert tokens_of(run(core))["again"] == reference(PROMPT, 2)
    assert runner.num_tokens_per_step[0] == 12, "blocks 3 and 4 were found once those before them were there"
    assert hint(core, m.CacheAction.EVICT, names(salt="another")).num_device_blocks == 0
    assert_idle(core)


def test_a_request_that_uses_what_is_evicted_goes_on() -> None:
    core, _ = make_core()
    add(core, "a", PROMPT, max_tokens=6)
    core.step()
    core.step()
    assert hint(core, m.CacheAction.EVICT, names()).num_device_blocks == 5
    assert tokens_of(core.take_events() + run(core))["a"][-3:] == reference(PROMPT, 6)[-3:]
    assert core.blocks.find_prefix(make_request([*PROMPT, 0])) == 0
    assert_idle(core)


def test_host_memory_forgets_it_too() -> None:
    core, _ = make_core(num_blocks=8, host_cache_gb=0.001)
    add(core, "a", PROMPT, max_tokens=2)
    run(core)
    add(core, "b", list(range(40, 62)), max_tokens=2)  # most of a's blocks go to host memory
    run(core)
    found = hint(core, m.CacheAction.EVICT, names())
    assert found.num_host_blocks > 0
    assert found.num_device_blocks + found.num_host_blocks == 5
    assert hint(core, m.CacheAction.EVICT, names()) == m.CacheHinted(call_id=7)


def test_all_is_flushed() -> None:
    """In host memory too. What a running request has stays its own, and is not found by others."""
    core, _ = make_core(num_blocks=8, host_cache_gb=0.001)
    add(core, "a", PROMPT, max_tokens=2)
    run(core)
    add(core, "b", list(range(40, 62)), max_tokens=6)  # most of a's blocks go to host memory
    core.step()
    core.step()
    num_here = len(core.blocks.names())
    flushed = hint(core, m.CacheAction.FLUSH, [])
    assert flushed.num_device_blocks > 0
    assert flushed.num_host_blocks > 0
    assert flushed.num_device_blocks + flushed.num_host_blocks == num_here
    assert len(core.blocks.names()) == 0
    assert tokens_of(core.take_events() + run(core))["b"][-3:] == reference(list(range(40, 62)), 6)[-3:]
    assert_idle(core)


def test_retaining_says_what_is_here() -> None:
    core, _ = make_core()
    add(core, "a", PROMPT, max_tokens=2)
    run(core)
    assert hint(core, m.CacheAction.RETAIN, [*names(), b"x" * 16], 100_000.0).num_device_blocks == 5
    assert len(core.blocks.retention) == 5
    assert hint(core, m.CacheAction.RETAIN, names()[1:2], 0.0).num_device_blocks == 1
    assert len(core.blocks.retention) == 4
    hint(core, m.CacheAction.EVICT, names())
    assert len(core.blocks.retention) == 0


def test_the_store_forgets_it_too(tmp_path: Path) -> None:
    with test_store.engine(tmp_path, clock=still) as (core, _):  # whatever the store's thread has done by then
        add(core, "a", PROMPT, max_tokens=2)
        test_store.run(core)
        assert list(tmp_path.glob("*/runs/*.run"))
        found = hint(core, m.CacheAction.EVICT, names())
        assert (found.num_device_blocks, found.num_stored_blocks, found.failure) == (5, 5, "")
        assert hint(core, m.CacheAction.EVICT, names()) == m.CacheHinted(call_id=7)
        assert not list(tmp_path.glob("*/runs/*.run")), "no bytes are left"
    with test_store.engine(tmp_path) as (core, runner):
        add(core, "a", PROMPT, max_tokens=2)
        test_store.run(core)
        assert runner.num_tokens_per_step[0] == 22


def test_what_is_being_written_is_forgotten_after_that() -> None:
    class SlowStore(MemoryConnector):
        name, is_store = "slow", True
        evicted: list[bytes] = []  # noqa: RUF012 (one test's)

        def evict(self, block_hashes: Sequence[bytes]) -> Eviction:
            self.evicted.extend(block_hashes)
            return Eviction(0)

    store = SlowStore(ConnectorConfig(epoch="s", worker_id="s"))
    core, _ = make_core(store=store)
    add(core, "a", PROMPT, max_tokens=1)
    while not core.remote_kv._transfers.is_writing(names()[0]):
        core.step()
    hint(core, m.CacheAction.EVICT, names())
    for _ in range(50):
        core.step()
    assert store.evicted.count(names()[0]) == 2
    assert not core.remote_kv._transfers.is_writing(names()[0])


@pytest.mark.parametrize(("stored", "words"), [(Eviction(), "did not answer"), (Eviction(0, "why"), "why")])
def test_a_store_that_does_not_do_it_is_told_of(stored: Eviction, words: str) -> None:
    core, _ = make_core()
    core.remote_kv._store.evict = lambda _: stored  # type: ignore[method-assign]
    assert words in hint(core, m.CacheAction.EVICT, names()).failure


def test_a_store_that_hangs_has_its_time(tmp_path: Path) -> None:
    assert STORE_TIMEOUT_S > 1
    connector = SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(tmp_path)}, epoch="e", worker_id="w"))
    core, _ = make_core(connector=connector)
    go_on = threading.Event()
    connector._background.add(lambda: go_on.wait(PATIENCE_S) and None)
    assert "did not answer" in hint(core, m.CacheAction.EVICT, names()).failure
    while connector._background.add(lambda: None):
        pass
    assert "hangs" in hint(core, m.CacheAction.EVICT, names()).failure
    go_on.set()
    core.close()


def prefetch(core: EngineCore, hashes: list[bytes]) -> m.CacheHinted:
    return hint(core, m.CacheAction.PREFETCH, hashes)


def test_what_the_store_has_is_brought_before_anybody_asks(tmp_path: Path) -> None:
    prompt = list(range(82))  # twenty full blocks, more than are fetched at a time
    test_store.fill(tmp_path, prompt)
    with test_store.engine(tmp_path, clock=still) as (core, runner):
        found = prefetch(core, [*names(prompt), b"x" * 16])
        assert found == m.CacheHinted(
            call_id=7, num_device_blocks=20, num_stored_blocks=20, failure="the rest is not stored"
        )
        assert prefetch(core, names(prompt)) == m.CacheHinted(call_id=7, num_device_blocks=20)
        add(core, "a", prompt, max_tokens=2)
        assert tokens_of(test_store.run(core))["a"] == reference(prompt, 2)
        assert runner.num_tokens_per_step[0] == 2
        assert_idle(core)


def test_what_host_memory_has_is_brought_up() -> None:
    core, runner = make_core(clock=still, num_blocks=9, host_cache_gb=0.001)
    for name, start in (("a", 0), ("b", 40)):
        add(core, name, list(range(start, start + 22)), max_tokens=2)
        run(core)
    num_here = core.blocks.named.count_on_device(names())
    found = prefetch(core, names())
    assert found == m.CacheHinted(call_id=7, num_device_blocks=5, num_host_blocks=5 - num_here)
    runner.num_tokens_per_step.clear()
    add(core, "again", PROMPT, max_tokens=2)
    assert tokens_of(run(core))["again"] == reference(PROMPT, 2)
    assert runner.num_tokens_per_step[0] == 2
    assert_idle(core)


def test_it_takes_no_retained_block_and_leaves_some(tmp_path: Path) -> None:
    test_store.fill(tmp_path, PROMPT)
    with test_store.engine(tmp_path, clock=still, num_blocks=8, retain_share=1.0, retain_tenant_share=1.0) as (core, _):
        add(core, "a", list(range(40, 62)), max_tokens=1)
        test_store.run(core)
        assert hint(core, m.CacheAction.RETAIN, names(list(range(40, 62))), 100_000.0).num_device_blocks == 5
        found = prefetch(core, names())
        assert (found.num_device_blocks, found.failure) == (2, "no KV block is to spare")
        assert core.blocks.named.count_on_device(names(list(range(40, 62)))) == 5


def test_it_waits_for_who_waits_and_gives_up() -> None:
    core, _ = make_core()
    core.handle(m.HintCache(call_id=1, action=m.CacheAction.PREFETCH, block_hashes=names()))
    for now in (0.0, 10_000_000.0):
        core.remote_kv._prefetches.go_on(now, lambda _: None, may_move=False)
        told = [event for event in core.take_events() if isinstance(event, m.CacheHinted)]
        assert [("had no time" in event.failure) for event in told] == ([] if now == 0.0 else [True])
    for call_id in range(17):
        core.handle(m.HintCache(call_id=call_id, action=m.CacheAction.PREFETCH, block_hashes=names()))
    (refused,) = core.take_events()
    assert refused == m.CacheHinted(call_id=16, failure="too many prefetches wait")


def test_a_block_that_cannot_be_read_ends_it(tmp_path: Path) -> None:
    test_store.fill(tmp_path, PROMPT)
    (stored,) = tmp_path.glob("*/runs/*.run")
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1  # of the last block: the prompt's tail, or its last full one
    data[4096] ^= 1  # of the first
    stored.write_bytes(data)
    with test_store.engine(tmp_path, clock=still) as (core, _):
        found = prefetch(core, names())
        assert found.num_device_blocks == 0
        assert "checksum" in found.failure
        assert_idle(core)
