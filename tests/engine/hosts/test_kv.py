"""KV blocks of a worker whose ranks are on two hosts: here two caches, and a connection between threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter

from common.errors import StartupError, TransferError
from common.metric_relay import Change, MetricRelay
from common.types import KVCacheSpec
from engine.device import KVPlane, do_nothing
from engine.hosts.kv import KVLink, join_hosts
from engine.hosts.kv_messages import Open
from engine.hosts.member_kv import MemberKV
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, KVConnector, LocalBlock, TransferKind, TransferResult
from kv_store.no_store import NoStore
from kv_store.registry import create_connector
from kv_store.shards import shard_of
from tests.kv_store.blocks import PATIENCE_S, name_of
from tests.kv_store.conformance import WIDE_SPEC, random_cache
from tests.nixl import needs_nixl

OPENING = Open(connector="shared_storage", store="", epoch="e1", worker_id="group")
SPECS = [shard_of(WIDE_SPEC, 2, rank) for rank in range(2)]


class Changes(MetricRelay):
    """Of another process: the changes that a test puts in."""

    def __init__(self) -> None:
        super().__init__([])
        self.given: list[Change] = []

    def changes(self) -> list[Change]:
        given, self.given = self.given, []
        return given


class Group:
    """Rank 0, and the rank of another host."""

    def __init__(self, caches: Sequence[torch.Tensor], make: Callable[[Open], Sequence[KVConnector]]) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.num_copies = 0  # that rank 0 has sent
        self.caches = caches
        self.changes = Changes()
        self.member = MemberKV(self.theirs, KVPlane(spec=SPECS[1], cache=caches[1]), make, self.changes)
        self.member.start()
        self.counter = Counter("evicted", "", registry=CollectorRegistry())
        self.link = KVLink(1, self.ours, lambda: self.num_copies, MetricRelay([self.counter]))
        self.woken = threading.Event()

    def open(self, own: KVConnector) -> KVConnector:
        [joined] = join_hosts([own], [self.link], OPENING, do_nothing)
        nothing = torch.empty((0, *SPECS[1].block_shape))
        joined.register_shards([(self.caches[0], SPECS[0]), (nothing, SPECS[1])], self.woken.set)
        self.joined = joined
        return joined

    def whole(self, block_id: int) -> torch.Tensor:
        return torch.cat([cache[block_id] for cache in self.caches], dim=2).view(torch.uint8)

    def results(self, num: int) -> list[TransferResult]:
        return results_of(self.joined, self.woken, num)

    def close(self) -> None:
        for end in (self.ours, self.theirs):
            end.shutdown(socket.SHUT_RDWR)
        self.link.close()
        self.member.close()
        for end in (self.ours, self.theirs):
            end.close()


def results_of(connector: KVConnector, woken: threading.Event, num: int) -> list[TransferResult]:
    found: list[TransferResult] = []
    while len(found) < num:
        assert woken.wait(PATIENCE_S)
        woken.clear()
        found += connector.poll()
    return sorted(found, key=lambda result: result.index)


def parts_of(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:, :, :, spec.heads.start : spec.heads.stop].contiguous() for spec in SPECS]


def opened(kind: str, kv_dir: Path, worker_id: str) -> KVConnector:
    return create_connector(kind, ConnectorConfig(epoch="e1", worker_id=worker_id, section={"kv_dir": str(kv_dir)}))


@pytest.fixture
def made() -> Iterator[list[Group | KVConnector]]:
    """What is closed at the end."""
    made: list[Group | KVConnector] = []
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", ["memory", "shared_storage", pytest.param("nixl", marks=needs_nixl)])
def test_blocks_come_and_go_with_each_ranks_part(kind: str, tmp_path: Path, made: list[Group | KVConnector]) -> None:
    """To a worker of one rank, and back."""
    group = Group(parts_of(random_cache(8, WIDE_SPEC, seed=1)), lambda _: [opened(kind, tmp_path, "group")])
    own = opened(kind, tmp_path, "group")
    joined, alone, woken = group.open(own), opened(kind, tmp_path, "alone"), threading.Event()
    made += [alone, joined, group]
    cache = random_cache(8, WIDE_SPEC, seed=2)
    alone.register_kv_cache(cache, WIDE_SPEC, woken.set)

    joined.publish(1, [LocalBlock(0, 5, name_of(0)), LocalBlock(1, 2, name_of(1))])
    published = group.results(2)
    assert [(one.error, one.index, one.block_id) for one in published] == [(None, 0, 5), (None, 1, 2)]
    if peer := joined.describe():
        alone.add_peer(peer)
    alone.fetch(1, [FetchBlock(one.ref, 7 - one.index) for one in published if one.ref is not None])
    assert [one.error for one in results_of(alone, woken, 2)] == [None, None]
    assert torch.equal(cache[7].view(torch.uint8), group.whole(5))
    assert torch.equal(cache[6].view(torch.uint8), group.whole(2))
    joined.release(1)

    alone.publish(2, [LocalBlock(0, 3, name_of(9))])
    [back] = results_of(alone, woken, 1)
    assert back.ref is not None
    if peer := alone.describe():
        joined.add_peer(peer)
    joined.fetch(2, [FetchBlock(back.ref, 4)])
    [fetched] = group.results(1)
    assert (fetched.error, fetched.num_bytes) == (None, WIDE_SPEC.block_bytes)
    assert torch.equal(group.whole(4), cache[3].view(torch.uint8))


def test_a_part_that_another_host_cannot_read_fails_the_block(tmp_path: Path, made: list[Group | KVConnector]) -> None:
    """Rank 0 has its part; the other host looks into a directory of its own, as if that were not mounted."""
    (tmp_path / "unshared").mkdir()
    group = Group(
        parts_of(random_cache(8, WIDE_SPEC, seed=1)),
        lambda _: [opened("shared_storage", tmp_path / "unshared", "group")],
    )
    joined, alone, woken = (
        group.open(opened("shared_storage", tmp_path, "group")),
        opened("shared_storage", tmp_path, "alone"),
        threading.Event(),
    )
    made += [alone, joined, group]
    alone.register_kv_cache(random_cache(8, WIDE_SPEC, seed=2), WIDE_SPEC, woken.set)
    alone.publish(1, [LocalBlock(0, 3, name_of(9))])
    [published] = results_of(alone, woken, 1)
    assert published.ref is not None
    joined.fetch(2, [FetchBlock(published.ref, 4)])
    [fetched] = group.results(1)
    assert fetched.error == f"rank 1: block {name_of(9).hex()} is not in the store"


def test_blocks_are_evicted_on_all_hosts(tmp_path: Path, made: list[Group | KVConnector]) -> None:
    group = Group(parts_of(random_cache(8, WIDE_SPEC, seed=1)), lambda _: [opened("shared_storage", tmp_path, "group")])
    joined = group.open(opened("shared_storage", tmp_path, "group"))
    made += [joined, group]
    joined.publish(1, [LocalBlock(0, 3, name_of(0))])
    group.results(1)
    joined.touch([name_of(0)])
    eviction = joined.evict([name_of(0), name_of(1)])
    while eviction.num_blocks is None:
        assert group.woken.wait(PATIENCE_S)
        group.woken.clear()
    assert (eviction.num_blocks, eviction.failure) == (1, "")
    assert not [path for path in tmp_path.rglob("*") if name_of(0).hex() in path.name]


class Told(NoStore):
    """Says what it was asked for, and answers at once."""

    def __init__(self, *, refuses_peers: bool = False) -> None:
        self.told: list[str] = []
        self.is_told = threading.Event()
        self._refuses_peers = refuses_peers
        self._results: list[TransferResult] = []

    def register_kv_cache(self, cache: object, spec: KVCacheSpec, wake: Callable[[], None]) -> None:
        self._wake = wake

    def add_peer(self, peer: bytes) -> None:
        if self._refuses_peers:
            raise TransferError("no way there")

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        self._say(TransferKind.PUBLISH, job_id, [(block.index, block.block_id) for block in blocks])

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        self._say(TransferKind.FETCH, job_id, [(block.ref.index, block.block_id) for block in blocks])

    def poll(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def _say(self, kind: TransferKind, job_id: int, blocks: Sequence[tuple[int, int]]) -> None:
        self.told.append(f"{kind.value} {job_id}")
        self.is_told.set()
        self._results += [
            TransferResult(job_id=job_id, kind=kind, index=index, block_id=block_id) for index, block_id in blocks
        ]
        self._wake()


def test_a_block_is_published_after_the_copies_before_it(made: list[Group | KVConnector]) -> None:
    """A copy may fill the block, and the other rank comes to it later."""
    theirs = Told()
    group = Group(parts_of(random_cache(8, WIDE_SPEC, seed=1)), lambda _: [theirs])
    joined = group.open(Told())
    made += [joined, group]
    joined.publish(1, [LocalBlock(0, 5, name_of(0))])
    group.results(1)
    group.num_copies = 2
    theirs.is_told.clear()
    joined.publish(2, [LocalBlock(0, 6, name_of(1))])
    joined.fetch(3, [FetchBlock(BlockRef(index=0, block_hash=name_of(2)), 7)])
    group.member.copied()
    assert not theirs.is_told.wait(0.05)
    group.member.copied()
    group.results(2)
    assert theirs.told == ["publish 1", "publish 2", "fetch 3"]


def test_what_another_host_counts_is_in_the_workers_metrics(made: list[Group | KVConnector]) -> None:
    group = Group(parts_of(random_cache(8, WIDE_SPEC, seed=1)), lambda _: [Told()])
    joined = group.open(Told())
    made += [joined, group]
    group.changes.given = [("evicted", (), 5.0)]
    for job_id in (1, 2):  # the counts come behind the results of the first
        joined.publish(job_id, [LocalBlock(0, 5, name_of(0))])
        group.results(1)
    assert group.counter.collect()[0].samples[0].value == 5


def test_a_peer_that_another_host_cannot_reach_is_logged(
    made: list[Group | KVConnector], caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(parts_of(random_cache(8, WIDE_SPEC, seed=1)), lambda _: [Told(refuses_peers=True)])
    joined = group.open(Told())
    made += [joined, group]
    joined.add_peer(b"somebody")
    joined.fetch(1, [FetchBlock(BlockRef(index=0, block_hash=name_of(0)), 1)])
    assert [one.error for one in group.results(1)] == [None], "it goes on"
    assert [record.reason for record in caplog.records if "cannot be read" in record.message] == ["no way there"]  # type: ignore[attr-defined]


def test_a_rank_that_cannot_open_its_connector_is_named(made: list[Group | KVConnector]) -> None:
    def fails(_: Open) -> Sequence[KVConnector]:
        raise StartupError("kv_dir: cannot write to '/kv': Read-only file system")

    group = Group(parts_of(random_cache(8, WIDE_SPEC, seed=1)), fails)
    made.append(group)
    with pytest.raises(StartupError, match=r"^rank 1: kv_dir: cannot write to '/kv': Read-only file system$"):
        group.open(Told())
