"""Workers of several ranks whose connectors look like one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from common.errors import IncompatibleError
from common.types import KVCacheSpec
from kv_store.base import (
    BlockRef,
    ConnectorConfig,
    Eviction,
    FetchBlock,
    KVConnector,
    LocalBlock,
    TransferKind,
    TransferResult,
)
from kv_store.no_store import NoStore
from kv_store.ranks import join_connectors
from kv_store.registry import create_connector
from kv_store.shards import shard_of
from tests.kv_store.blocks import PATIENCE_S, name_of
from tests.kv_store.conformance import WIDE_SPEC, random_cache


class Worker:
    """Its ranks hold the heads of one random whole cache."""

    def __init__(self, kind: str, worker_id: str, num_ranks: int, kv_dir: Path) -> None:
        section = {"kv_dir": str(kv_dir)}
        config = ConnectorConfig(epoch="e1", worker_id=worker_id, verify_checksums=True, section=section)
        self.connector = create_connector(kind, config, num_ranks)
        self.shards: list[tuple[torch.Tensor, KVCacheSpec]] = []
        self.woken = threading.Event()
        whole = random_cache(8, WIDE_SPEC, seed=len(worker_id))
        for rank in range(num_ranks):
            spec = shard_of(WIDE_SPEC, num_ranks, rank)
            self.shards.append((whole[:, :, :, spec.heads.start : spec.heads.stop].contiguous(), spec))
        self.connector.register_shards(self.shards, self.woken.set)

    def whole(self, block_id: int) -> torch.Tensor:
        return torch.cat([cache[block_id] for cache, _ in self.shards], dim=2).view(torch.uint8)

    def results(self, num: int) -> list[TransferResult]:
        found: list[TransferResult] = []
        while len(found) < num:
            assert self.woken.wait(PATIENCE_S)
            self.woken.clear()
            found += self.connector.poll()
        return sorted(found, key=lambda result: result.index)


@pytest.fixture
def made() -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.connector.close()


@pytest.mark.parametrize("kind", ["memory", "shared_storage"])
@pytest.mark.parametrize("degrees", [(2, 2), (2, 1), (1, 2), (4, 2)])
def test_blocks_go_from_ranks_to_ranks(kind: str, degrees: tuple[int, int], tmp_path: Path, made: list[Worker]) -> None:
    producer, consumer = (
        Worker(kind, name, num, tmp_path) for name, num in zip(("from", "reader"), degrees, strict=True)
    )
    made += [producer, consumer]
    consumer.connector.add_peer(producer.connector.describe())
    producer.connector.publish(
        1, [LocalBlock(index, block_id, name_of(index)) for index, block_id in enumerate((5, 2))]
    )
    published = producer.results(2)
    assert [(one.error, one.index, one.block_id) for one in published] == [(None, 0, 5), (None, 1, 2)]
    refs = [one.ref for one in published if one.ref is not None]
    assert consumer.connector.lookup([name_of(0), name_of(1), name_of(9)]) == (2 if consumer.connector.is_store else 0)
    consumer.connector.fetch(1, [FetchBlock(ref, 7 - ref.index) for ref in refs])
    fetched = consumer.results(2)
    assert [(one.error, one.block_id, one.num_bytes) for one in fetched] == [
        (None, 7, WIDE_SPEC.block_bytes),
        (None, 6, WIDE_SPEC.block_bytes),
    ]
    assert torch.equal(consumer.whole(7), producer.whole(5))
    assert torch.equal(consumer.whole(6), producer.whole(2))
    producer.connector.release(1)
    if kind == "memory":
        consumer.connector.fetch(2, [FetchBlock(refs[0], 1)])
        (late,) = consumer.results(1)
        assert late.error is not None
        assert "no lease" in late.error


def test_a_store_evicts_on_all_ranks(tmp_path: Path, made: list[Worker]) -> None:
    worker = Worker("shared_storage", "one", 2, tmp_path)
    made.append(worker)
    worker.connector.publish(1, [LocalBlock(0, 3, name_of(0))])
    worker.results(1)
    eviction = worker.connector.evict([name_of(0), name_of(1)])
    while eviction.num_blocks is None:
        assert worker.woken.wait(PATIENCE_S)
        worker.woken.clear()
    assert (eviction.num_blocks, eviction.failure) == (1, "")
    assert worker.connector.lookup([name_of(0)]) == 0
    assert not [path for path in tmp_path.rglob("*") if name_of(0).hex() in path.name]


def test_ranks_of_different_workers_are_not_joined(made: list[Worker], tmp_path: Path) -> None:
    worker = Worker("memory", "two", 2, tmp_path)
    made.append(worker)
    joined = join_connectors([create_connector("memory", ConnectorConfig(worker_id=name)) for name in ("a", "b")])
    joined.register_shards(worker.shards, lambda: None)
    with pytest.raises(IncompatibleError, match="is of another worker"):
        joined.describe()
    joined.close()


class Scripted(NoStore):
    """Gives the results that a test puts in."""

    def __init__(self) -> None:
        self.given: list[TransferResult] = []
        self.eviction = Eviction(None)

    def publish(self, job_id: int, blocks: Sequence[LocalBlock]) -> None:
        pass

    def fetch(self, job_id: int, blocks: Sequence[FetchBlock]) -> None:
        pass

    def poll(self) -> list[TransferResult]:
        given, self.given = self.given, []
        return given

    def evict(self, block_hashes: Sequence[bytes]) -> Eviction:
        return self.eviction


def registered(specs: Sequence[KVCacheSpec]) -> tuple[list[Scripted], KVConnector]:
    ranks = [Scripted() for _ in specs]
    joined = join_connectors(ranks)
    joined.register_shards([(torch.empty((1, *spec.block_shape)), spec) for spec in specs], lambda: None)
    return ranks, joined


def fetching(num_ranks: int) -> tuple[list[Scripted], KVConnector]:
    ranks, joined = registered([shard_of(WIDE_SPEC, num_ranks, rank) for rank in range(num_ranks)])
    joined.fetch(4, [FetchBlock(BlockRef(index=0, block_hash=name_of(0)), 9)])
    return ranks, joined


def result(error: str | None = None, *, is_final: bool = True) -> TransferResult:
    return TransferResult(
        job_id=4,
        kind=TransferKind.FETCH,
        index=0,
        block_id=9,
        error=error,
        num_bytes=0 if error else 100,
        is_final=is_final,
    )


def test_a_block_that_one_rank_did_not_get_has_not_come() -> None:
    ranks, joined = fetching(2)
    ranks[0].given.append(result())
    assert joined.poll() == []
    ranks[1].given.append(result("no such file"))
    assert joined.poll() == [result("rank 1: no such file")]
    assert joined.poll() == []


def test_a_transfer_that_hangs_is_told_once_and_is_final_when_it_is_on_all_ranks() -> None:
    ranks, joined = fetching(2)
    late = result("hangs", is_final=False)
    ranks[0].given.append(late)
    ranks[1].given.append(late)
    assert joined.poll() == [result("rank 0: hangs", is_final=False)]
    ranks[1].given.append(result("hangs"))
    assert joined.poll() == []
    ranks[0].given.append(result())  # what came late is worth nothing: the engine has given the block up
    assert joined.poll() == [result("rank 0: hangs")]


def test_an_eviction_is_answered_when_all_ranks_have() -> None:
    ranks, joined = fetching(2)
    pending = [Eviction(), Eviction()]
    for rank, one in zip(ranks, pending, strict=True):
        rank.eviction = one
    eviction = joined.evict([name_of(0)])
    assert eviction.num_blocks is None
    pending[0].num_blocks = 2
    assert eviction.num_blocks is None
    pending[1].failure = "rank 1's disk"
    pending[1].num_blocks = 1
    assert (eviction.num_blocks or 0, eviction.failure) == (2, "rank 1's disk")


def test_of_ranks_with_the_same_heads_one_publishes_and_all_fetch(tmp_path: Path, made: list[Worker]) -> None:
    worker = Worker("shared_storage", "sharing", 2, tmp_path)
    made.append(worker)
    copies = [(cache.clone(), spec) for cache, spec in worker.shards for _ in range(2)]
    config = ConnectorConfig(epoch="e1", worker_id="four", section={"kv_dir": str(tmp_path)})
    four = create_connector("shared_storage", config, 4)
    woken = threading.Event()
    four.register_shards(copies, woken.set)

    def results() -> list[TransferResult]:
        found: list[TransferResult] = []
        while not found:
            assert woken.wait(PATIENCE_S)
            woken.clear()
            found = four.poll()
        return found

    four.publish(1, [LocalBlock(0, 3, name_of(3))])
    (published,) = results()
    assert (published.error, published.num_bytes) == (None, WIDE_SPEC.block_bytes)
    assert published.ref is not None
    four.fetch(2, [FetchBlock(published.ref, 6)])
    (fetched,) = results()
    assert fetched.error is None
    for cache, _ in copies:
        assert torch.equal(cache[6].view(torch.uint8), cache[3].view(torch.uint8))
    four.close()
