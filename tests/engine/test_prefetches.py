"""What a prefetch costs the engine's thread, and what ends it: a group at a time, and none that was evicted since."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine import messages as m
from engine.core import EngineCore
from engine.remote_kv.prefetches import GROUP_BLOCKS, MAX_WAITING, TIMEOUT_S, TOO_MANY
from kv_store.base import ConnectorConfig, FetchBlock, Lookup, TransferKind, TransferResult
from kv_store.memory import MemoryConnector
from tests.engine.test_cache_hints import names
from tests.support.fake_device import make_core, still

LONG = [token % 90 for token in range(64 * 4 + 1)]
OTHER = [(7 * token + 5) % 90 for token in range(78 * 4)]


class Store(MemoryConnector):
    """A store whose answers and blocks come when the test says so."""

    name, is_store = "late", True

    def __init__(self) -> None:
        super().__init__(ConnectorConfig(epoch="s", worker_id="s"))
        self.lookups: list[Lookup] = []
        self.jobs: dict[int, Sequence[FetchBlock]] = {}

    def start_lookup(self, block_hashes: Sequence[bytes]) -> Lookup:
        self.lookups.append(Lookup())
        return self.lookups[-1]

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self.jobs[job_id] = blocks

    def deliver(self) -> None:
        for job_id, blocks in self.jobs.items():
            self._results.add(
                TransferResult(
                    job_id=job_id, kind=TransferKind.FETCH, index=one.ref.index, block_id=one.block_id, num_bytes=1
                )
                for one in blocks
            )
        self.jobs.clear()


def in_host_memory(clock: Callable[[], float] | None = None) -> EngineCore:
    """All 64 blocks of LONG are there, and the device has others in their place."""
    core, _ = make_core(num_blocks=80, host_cache_gb=0.001, clock=clock)
    for prompt in (LONG, OTHER):
        held = core.blocks.pool.take_held(80)
        for block_id, name in zip(held, names(prompt), strict=False):
            core.blocks.named.keep_prefetched(block_id, name)
        for block_id in held[len(names(prompt)) :]:
            core.blocks.unhold(block_id)
        core._device.copy(core.blocks.take_copies())
    assert core.blocks.named.count_in_host(names(LONG)) == 64
    return core


def prefetch(core: EngineCore, hashes: list[bytes], call_id: int = 1, tenant: str = "") -> None:
    core.handle(m.HintCache(call_id=call_id, action=m.CacheAction.PREFETCH, block_hashes=hashes, tenant=tenant))


def go_on(core: EngineCore, *, now: float = 0.0, may_move: bool = True) -> bool:
    return core.remote_kv._prefetches.go_on(now, core._device.copy, may_move=may_move)


def answers(core: EngineCore) -> list[m.CacheHinted]:
    return [event for event in core.take_events() if isinstance(event, m.CacheHinted)]


def test_one_group_comes_at_a_time_and_a_request_goes_first() -> None:
    core = in_host_memory()
    hashes = names(LONG)
    assert core.blocks.named.count_on_device(hashes) == 0
    prefetch(core, hashes)
    prefetch(core, hashes, call_id=2)
    assert go_on(core), "there is more to do at once"
    assert core.blocks.named.count_on_device(hashes) == GROUP_BLOCKS
    assert not go_on(core, may_move=False)
    assert core.blocks.named.count_on_device(hashes) == GROUP_BLOCKS
    for num_groups in (2, 3, 4):
        assert go_on(core)
        assert core.blocks.named.count_on_device(hashes) == num_groups * GROUP_BLOCKS
        assert core.scheduler.check_integrity() == []
    assert not go_on(core)
    assert answers(core) == [
        m.CacheHinted(call_id=1, num_device_blocks=64, num_host_blocks=64),
        m.CacheHinted(call_id=2, num_device_blocks=64),
    ]


def test_the_engine_goes_on_without_its_idle_poll() -> None:
    core = in_host_memory(still)
    woken: list[int] = []
    core._housekeeping._wake = lambda: woken.append(core.blocks.named.count_on_device(names(LONG)))
    prefetch(core, names(LONG))
    for _ in range(6):
        core.step()
    assert woken == [16, 32, 48, 64]


def test_what_came_is_touched_at_the_start_and_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = in_host_memory()
    hashes, touched = names(LONG), list[int]()
    touch = core.blocks.named.touch

    def counted(some: list[bytes]) -> None:
        touched.append(len(some))
        touch(some)

    monkeypatch.setattr(core.blocks.named, "touch", counted)
    prefetch(core, hashes)
    while go_on(core):
        pass
    assert touched == [0, 64]
    freed_at = [core.blocks.pool._blocks[core.blocks.cache[name]].freed_at for name in hashes]
    assert freed_at == sorted(freed_at, reverse=True), "the end is evicted before the beginning"


def test_it_takes_none_of_its_own_blocks_when_others_are_newer() -> None:
    core = in_host_memory()
    hashes = names(LONG)
    prefetch(core, hashes)
    go_on(core)
    others = [name for name in core.blocks.cache.names() if name not in hashes]
    core.blocks.named.touch(others)  # as if requests used them
    while go_on(core):
        assert core.blocks.named.count_on_device(hashes[:GROUP_BLOCKS]) == GROUP_BLOCKS
    assert core.blocks.named.count_on_device(hashes) == 64


def test_it_notices_what_was_taken_away_meanwhile() -> None:
    core = in_host_memory()
    hashes = names(LONG)
    prefetch(core, hashes)
    go_on(core)
    go_on(core)
    core.blocks.named.evict(hashes[3:4])
    while go_on(core):
        pass
    (answer,) = answers(core)
    assert (answer.num_device_blocks, answer.num_host_blocks) == (3, 64)
    assert answer.failure == "the rest is not stored"


def test_a_lookup_without_an_answer_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    core, _ = make_core(store=store)
    prefetch(core, names(LONG))
    assert not go_on(core)
    for name in ("count_on_device", "count_in_host", "num_spare_blocks", "touch"):
        monkeypatch.setattr(core.blocks.named, name, lambda *_: pytest.fail("looked"))
    assert not go_on(core)
    assert len(store.lookups) == 1


def test_overdue_ones_are_answered_behind_a_fetch_under_way() -> None:
    store = Store()
    core, _ = make_core(store=store)
    prefetch(core, names(LONG))
    go_on(core)
    store.lookups[0].num_blocks = 64
    go_on(core)
    assert store.jobs
    prefetch(core, names(OTHER), call_id=2)
    go_on(core, now=10.0**6)
    (answer,) = answers(core)
    assert (answer.call_id, answer.failure) == (2, f"the worker had no time for it within {TIMEOUT_S:g} s")
    store.deliver()
    core.take_in_transfers()
    go_on(core, now=10.0**6)
    (answer,) = answers(core)
    assert (answer.call_id, answer.num_stored_blocks) == (1, GROUP_BLOCKS)


def test_what_is_evicted_does_not_come_back() -> None:
    store = Store()
    core, _ = make_core(store=store)
    hashes = names(LONG)
    for call_id, some in enumerate((hashes, hashes, names(OTHER))):
        prefetch(core, some, call_id)
    go_on(core)
    store.lookups[0].num_blocks = 64
    go_on(core)
    assert store.jobs
    core.handle(m.HintCache(call_id=9, action=m.CacheAction.EVICT, block_hashes=hashes[:1]))
    store.deliver()
    core.take_in_transfers()
    go_on(core)
    told = {one.call_id: one for one in answers(core)}
    for call_id in (0, 1):
        assert told[call_id] == m.CacheHinted(call_id=call_id, failure="its blocks were evicted meanwhile")
    assert 2 not in told
    assert core.blocks.named.count_on_device(hashes) == 0
    assert core.scheduler.check_integrity() == []
    assert core.blocks.num_available_blocks == core.blocks.num_blocks


def test_a_tenant_that_wants_much_is_behind_itself_and_not_before_others() -> None:
    core, _ = make_core()
    for call_id in range(MAX_WAITING):
        prefetch(core, names(LONG), call_id, "noisy")
    prefetch(core, names(LONG), 100, "noisy")
    assert [one.call_id for one in answers(core)] == [100], "it may have all places, and no more"
    for call_id in range(200, 200 + MAX_WAITING // 2):
        prefetch(core, names(LONG), call_id, "quiet")
    refused = answers(core)
    assert [one.call_id for one in refused] == [15, 14, 13, 12, 11, 10, 9, 8], "the last ones of who has most"
    assert {one.failure for one in refused} == {TOO_MANY}
    for tenant in ("quiet", "noisy"):
        prefetch(core, names(LONG), 300, tenant)
        assert [one.call_id for one in answers(core)] == [300], "each has its share"
    prefetch(core, names(LONG), 400, "third")
    assert [one.call_id for one in answers(core)] == [7]
    for _ in range(MAX_WAITING):
        go_on(core)
    order = [one.call_id for one in answers(core)]
    assert order == [0, 200, 400, 1, 201, 2, 202, 3, 203, 4, 204, 5, 205, 6, 206, 207]
