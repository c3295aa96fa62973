"""What every connector must do, whatever it moves blocks with.

A connector's test module subclasses `ConnectorConformance` and provides the fixture `create`. Connectors of one test
can reach each other, and two of the same `worker_id` are one worker before and after a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest
import torch

from common.errors import IncompatibleError, TransferError
from common.types import KVCacheSpec
from kv_store.base import BlockRef, FetchBlock, KVConnector, LocalBlock, TransferKind, TransferResult
from kv_store.host_pages import prepare_pages
from kv_store.peers import join_peers, join_refs
from kv_store.shards import shard_of
from tests.kv_store.blocks import PATIENCE_S, SPEC, name_of

LARGE_SPEC = replace(SPEC, num_layers=32, num_kv_heads=8, head_dim=64, block_size=16)  # 1 MiB per block
TP_DEGREES = [  # of the producer and the consumer
    (1, 2),
    (2, 1),
    (4, 2),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (2, 2), (4, 4), (1, 4), (4, 1), (2, 4))),
]
WIDE_SPEC = replace(SPEC, num_kv_heads=4)  # that of a whole block, for workers of several ranks
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Create = Callable[[str, str], KVConnector]  # worker_id, epoch


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.01)


class Worker:
    """What the engine is to a connector: owns a cache, gives jobs, takes results."""

    def __init__(
        self,
        connector: KVConnector,
        num_blocks: int,
        spec: KVCacheSpec = SPEC,
        seed: int = 0,
        device: str = "cpu",
        cache: torch.Tensor | None = None,
    ) -> None:
        self.connector = connector
        self.spec = spec
        self.cache = random_cache(num_blocks, spec, seed).to(device) if cache is None else cache
        self.woken = threading.Event()
        self.last_job = seed * 1_000_000
        self._due: dict[int, set[tuple[TransferKind, int, int]]] = {}
        self._ahead: list[TransferResult] = []
        connector.register_kv_cache(self.cache, spec, self.woken.set)

    def publish(self, blocks: Sequence[LocalBlock]) -> int:
        job_id = self._new_job({(TransferKind.PUBLISH, block.index, block.block_id) for block in blocks})
        self.connector.publish(job_id, blocks)
        return job_id

    def fetch(self, blocks: Sequence[FetchBlock]) -> int:
        job_id = self._new_job({(TransferKind.FETCH, block.ref.index, block.block_id) for block in blocks})
        self.connector.fetch(job_id, blocks)
        return job_id

    def results(self) -> list[TransferResult]:
        """Waits for every final result that is due, and checks that there is exactly one of each."""
        results: list[TransferResult] = []
        give_up = time.monotonic() + PATIENCE_S
        while any(self._due.values()):
            assert self.woken.wait(max(0, give_up - time.monotonic())), f"no wake; still due: {self._due}"
            results += self.poll()
        assert self.connector.poll() == []
        return results

    def next_result(self) -> TransferResult:
        """Waits for one result, final or not; those that come with it are given by the next calls."""
        give_up = time.monotonic() + PATIENCE_S
        while not self._ahead:
            assert self.woken.wait(max(0, give_up - time.monotonic())), f"no wake; still due: {self._due}"
            self._ahead = self.poll()
        return self._ahead.pop(0)

    def poll(self) -> list[TransferResult]:
        """What has come, checked to be due."""
        self.woken.clear()
        results = self.connector.poll()
        for result in results:
            due = (result.kind, result.index, result.block_id)
            if result.is_final:
                self._due[result.job_id].remove(due)
            else:
                assert due in self._due[result.job_id]
                assert result.error
        return results

    def is_due(self, job_id: int) -> bool:
        return bool(self._due[job_id])

    def bytes_of(self, block_id: int) -> bytes:
        return self.cache[block_id].cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    def fill(self, block_id: int, value: int) -> None:
        self.cache[block_id].view(-1).view(torch.uint8).fill_(value)

    def published(self, hashes: dict[int, bytes]) -> list[BlockRef]:
        """Publishes {block_id: hash}; their references, in order of the index (0, 1, …)."""
        self.publish([LocalBlock(index, block_id, name) for index, (block_id, name) in enumerate(hashes.items())])
        results = sorted(self.results(), key=lambda result: result.index)
        assert [result.error for result in results] == [None] * len(hashes)
        return [result.ref for result in results if result.ref is not None]

    def _new_job(self, due: set[tuple[TransferKind, int, int]]) -> int:
        self.last_job += 1
        self._due[self.last_job] = due
        return self.last_job


def random_cache(num_blocks: int, spec: KVCacheSpec, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty((num_blocks, spec.block_bytes), dtype=torch.uint8)
    prepare_pages(values)
    values.random_(0, 256, generator=generator)
    return values.view(DTYPES[spec.dtype]).view(num_blocks, *spec.block_shape)


class RankedWorker:
    """A worker of tensor-parallel degree `tp_size`: its ranks hold the heads of one random whole cache."""

    def __init__(self, create: Create, worker_id: str, num_blocks: int, tp_size: int, seed: int) -> None:
        whole = random_cache(num_blocks, WIDE_SPEC, seed)
        self.ranks: list[Worker] = []
        for rank in range(tp_size):
            spec = shard_of(WIDE_SPEC, tp_size, rank)
            heads = whole[:, :, :, rank * spec.num_kv_heads : (rank + 1) * spec.num_kv_heads].contiguous()
            self.ranks.append(Worker(create(worker_id, "e1"), num_blocks, spec, seed, cache=heads))

    def whole(self) -> torch.Tensor:
        """A copy, `[num_blocks, *WIDE_SPEC.block_shape]` as bytes of the last axis."""
        return torch.cat([rank.cache for rank in self.ranks], dim=3).view(torch.uint8)

    def describe(self) -> bytes:
        """The ranks in an order of their own."""
        if self.ranks[0].connector.is_store:
            return b""
        return join_peers([rank.connector.describe() for rank in reversed(self.ranks)])

    def add_peer(self, peer: bytes) -> None:
        for rank in self.ranks:
            rank.connector.add_peer(peer)

    def published(self, hashes: dict[int, bytes]) -> list[BlockRef]:
        by_rank = [rank.published(hashes) for rank in self.ranks]
        return [join_refs(refs) for refs in zip(*by_rank, strict=True)]

    def fetch(self, blocks: Sequence[FetchBlock]) -> list[TransferResult]:
        for rank in self.ranks:
            rank.fetch(blocks)
        return [result for rank in self.ranks for result in rank.results()]


class ConnectorConformance:
    takes_turns: ClassVar[bool] = True
    """False for a connector that is done when `fetch` returns."""

    @pytest.fixture
    def workers(self, create: Create) -> Iterator[Callable[..., Worker]]:
        """Makes workers, and closes them after the test."""
        made: list[Worker] = []

        def make(
            worker_id: str, num_blocks: int = 16, *, spec: KVCacheSpec = SPEC, epoch: str = "e1", seed: int = 0
        ) -> Worker:
            made.append(Worker(create(worker_id, epoch), num_blocks, spec, seed or len(made) + 1))
            return made[-1]

        yield make
        for worker in made:
            worker.connector.close()

    @pytest.fixture
    def pair(self, workers: Callable[..., Worker]) -> tuple[Worker, Worker]:
        """Producer and consumer, with caches of different sizes."""
        producer, consumer = workers("producer", 16), workers("consumer", 24)
        consumer.connector.add_peer(producer.connector.describe())
        return producer, consumer

    def test_one_that_was_never_given_a_cache_closes(self, create: Create) -> None:
        """As after a start that failed."""
        create("w", "e1").close()

    def test_blocks_arrive_whole_and_touch_nothing_else(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        refs = producer.published({3: name_of(1), 15: name_of(2), 0: name_of(3)})
        before = consumer.cache.clone()
        consumer.fetch([FetchBlock(ref, block_id) for ref, block_id in zip(refs, (23, 0, 7), strict=True)])
        results = consumer.results()
        assert [result.error for result in results] == [None] * 3
        assert [result.num_bytes for result in results] == [SPEC.block_bytes] * 3
        for source, target in ((3, 23), (15, 0), (0, 7)):
            assert consumer.bytes_of(target) == producer.bytes_of(source)
        others = [block_id for block_id in range(24) if block_id not in (23, 0, 7)]
        assert torch.equal(consumer.cache[others].view(torch.uint8), before[others].view(torch.uint8))

    @pytest.mark.parametrize(
        "spec",
        [
            replace(SPEC, dtype="float32"),
            replace(SPEC, dtype="float16"),
            replace(SPEC, num_planes=1, num_kv_heads=1, head_dim=9),  # latents
        ],
    )
    def test_other_layouts(self, workers: Callable[..., Worker], spec: KVCacheSpec) -> None:
        producer, consumer = workers("producer", spec=spec), workers("consumer", spec=spec)
        consumer.connector.add_peer(producer.connector.describe())
        (ref,) = producer.published({5: name_of(1)})
        consumer.fetch([FetchBlock(ref, 1)])
        assert [result.error for result in consumer.results()] == [None]
        assert consumer.bytes_of(1) == producer.bytes_of(5)

    def test_references_say_what_was_published(self, pair: tuple[Worker, Worker]) -> None:
        producer, _ = pair
        job_id = producer.publish([LocalBlock(7, 4, name_of(70)), LocalBlock(8, 2, name_of(80))])
        results = sorted(producer.results(), key=lambda result: result.index)
        assert [(result.job_id, result.kind, result.error) for result in results] == [
            (job_id, TransferKind.PUBLISH, None)
        ] * 2
        refs = [result.ref for result in results]
        assert [(ref.index, ref.block_hash) for ref in refs if ref] == [(7, name_of(70)), (8, name_of(80))]
        if not producer.connector.is_store:
            assert [(ref.peer, ref.epoch, ref.block_id) for ref in refs if ref] == [
                ("producer", "e1", 4),
                ("producer", "e1", 2),
            ]

    def test_empty_jobs_have_no_results(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        producer.publish([])
        consumer.fetch([])
        assert producer.results() == []
        assert consumer.results() == []

    def test_unreachable_blocks_fail_and_the_others_arrive(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        (good,) = producer.published({3: name_of(1)})
        bad = BlockRef(index=9, block_hash=name_of(99), peer="stranger", epoch="e1", block_id=1)
        consumer.fetch([FetchBlock(bad, 1), FetchBlock(good, 2), FetchBlock(msgspec.structs.replace(bad, index=10), 3)])
        errors = {result.block_id: result.error for result in consumer.results()}
        assert errors[2] is None
        assert errors[1]
        assert errors[3]
        assert consumer.bytes_of(2) == producer.bytes_of(3)

    def test_nothing_lands_after_a_failed_result(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        ref = BlockRef(index=0, block_hash=name_of(99), peer="stranger", epoch="e1", block_id=1)
        consumer.fetch([FetchBlock(ref, block_id) for block_id in range(24)])
        assert all(result.error for result in consumer.results())
        for block_id in range(24):
            consumer.fill(block_id, 0xEE)
        # Another transfer runs from end to end meanwhile.
        (good,) = producer.published({3: name_of(1)})
        consumer.fetch([FetchBlock(good, 5)])
        assert [result.error for result in consumer.results()] == [None]
        assert all(consumer.bytes_of(i) == b"\xee" * SPEC.block_bytes for i in range(24) if i != 5)

    def test_many_jobs_at_once(self, workers: Callable[..., Worker]) -> None:
        producer, consumer = workers("producer", 64), workers("consumer", 64)
        consumer.connector.add_peer(producer.connector.describe())
        refs = producer.published({block_id: name_of(block_id) for block_id in range(64)})
        for start in range(0, 64, 8):
            consumer.fetch([FetchBlock(ref, 63 - ref.index) for ref in refs[start : start + 8]])
        results = consumer.results()
        assert len(results) == 64
        assert {result.error for result in results} == {None}
        assert all(consumer.bytes_of(63 - block_id) == producer.bytes_of(block_id) for block_id in range(64))

    @pytest.mark.slow  # the queue's turns alone: test_fair_queue.py
    def test_a_short_fetch_does_not_wait_for_a_long_one(self, workers: Callable[..., Worker]) -> None:
        """They share the link: the short one is done when a good part of the long one is still to come."""
        if not self.takes_turns:
            pytest.skip("nothing can be fetched meanwhile")
        producer, consumer = workers("producer", 98, spec=LARGE_SPEC), workers("consumer", 98, spec=LARGE_SPEC)
        consumer.connector.add_peer(producer.connector.describe())
        refs = producer.published({block_id: name_of(block_id) for block_id in range(98)})
        overtaken: list[int] = []
        for _ in range(5):  # the machine may have something else to do between the two calls
            consumer.fetch([FetchBlock(ref, ref.index) for ref in refs[:96]])
            short = consumer.fetch([FetchBlock(ref, ref.index) for ref in refs[96:]])
            results = consumer.results()
            assert {result.error for result in results} == {None}
            last = max(number for number, result in enumerate(results) if result.job_id == short)
            overtaken.append(len(results) - 1 - last)
            if overtaken[-1] > 96 / 4:
                break
        assert max(overtaken) > 96 / 4

    def test_both_directions_at_once(self, pair: tuple[Worker, Worker]) -> None:
        first, second = pair
        first.connector.add_peer(second.connector.describe())
        (from_first,) = first.published({1: name_of(1)})
        (from_second,) = second.published({1: name_of(2)})
        second.fetch([FetchBlock(from_first, 5)])
        first.fetch([FetchBlock(from_second, 5)])
        assert [result.error for result in first.results() + second.results()] == [None, None]
        assert second.bytes_of(5) == first.bytes_of(1)
        assert first.bytes_of(5) == second.bytes_of(1)

    def test_adding_a_peer_twice_does_nothing(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        consumer.connector.add_peer(producer.connector.describe())
        (ref,) = producer.published({2: name_of(1)})
        consumer.fetch([FetchBlock(ref, 2)])
        assert [result.error for result in consumer.results()] == [None]
        consumer.connector.add_peer(producer.connector.describe())

    @pytest.mark.parametrize(
        ("field", "value"),
        [("model_id", "other"), ("block_size", 8), ("dtype", "float16"), ("num_layers", 6), ("num_planes", 1)],
    )
    def test_other_layouts_never_meet(self, workers: Callable[..., Worker], field: str, value: str | int) -> None:
        other = replace(SPEC, **{field: value})  # type: ignore[arg-type]
        producer, consumer = workers("producer", spec=other), workers("consumer")
        (ref,) = producer.published({2: name_of(1)})
        if producer.connector.is_store:
            assert consumer.connector.lookup([name_of(1)]) == 0
        else:
            with pytest.raises(IncompatibleError, match=field):
                consumer.connector.add_peer(producer.connector.describe())
        consumer.fetch([FetchBlock(ref, 2)])
        assert [bool(result.error) for result in consumer.results()] == [True]

    @pytest.fixture
    def ranked(self, create: Create) -> Iterator[Callable[[str, int, int], RankedWorker]]:
        made: list[RankedWorker] = []

        def make(worker_id: str, num_blocks: int, tp_size: int) -> RankedWorker:
            made.append(RankedWorker(create, worker_id, num_blocks, tp_size, seed=len(made) + 1))
            return made[-1]

        yield make
        for worker in made:
            for rank in worker.ranks:
                rank.connector.close()

    @pytest.mark.parametrize(("producer_tp", "consumer_tp"), TP_DEGREES)
    def test_tensor_parallel_degrees(
        self, ranked: Callable[[str, int, int], RankedWorker], producer_tp: int, consumer_tp: int
    ) -> None:
        """Every rank gets its heads out of whatever ranks hold them, and nothing else changes. The caches differ in
        size, too."""
        producer, consumer = ranked("producer", 12, producer_tp), ranked("consumer", 7, consumer_tp)
        consumer.add_peer(producer.describe())
        refs = producer.published({3: name_of(1), 11: name_of(2), 4: name_of(3), 5: name_of(4)})
        expected, source, targets = consumer.whole(), producer.whole(), (6, 0, 2, 3)
        results = consumer.fetch([FetchBlock(ref, target) for ref, target in zip(refs, targets, strict=True)])
        assert {result.error for result in results} == {None}
        assert {result.num_bytes for result in results} == {consumer.ranks[0].spec.block_bytes}
        expected[list(targets)] = source[[3, 11, 4, 5]]
        assert torch.equal(consumer.whole(), expected)
        if producer.ranks[0].connector.is_store:
            found = {rank.connector.lookup([name_of(number) for number in range(1, 5)]) for rank in consumer.ranks}
            assert found == {4}

    def test_a_rank_that_is_gone(self, ranked: Callable[[str, int, int], RankedWorker]) -> None:
        """A block that needs it fails as a whole; a store has its files still."""
        producer, consumer = ranked("producer", 4, 4), ranked("consumer", 4, 2)
        consumer.add_peer(producer.describe())
        refs = producer.published({1: name_of(1), 2: name_of(2)})
        producer.ranks[3].connector.close()
        results = consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        errors = [result.error is not None for result in results]  # of rank 0, then of rank 1
        if not producer.ranks[0].connector.is_store:
            assert errors == [False, False, True, True]
        else:
            assert errors == [False] * 4

    def test_a_worker_of_which_a_rank_is_missing(self, ranked: Callable[[str, int, int], RankedWorker]) -> None:
        producer, consumer = ranked("producer", 4, 2), ranked("consumer", 4, 1)
        if producer.ranks[0].connector.is_store:
            pytest.skip("a store needs no peers")
        with pytest.raises(IncompatibleError, match="rank 1 of 2"):
            consumer.add_peer(producer.ranks[0].connector.describe())

    def test_lookup_counts_the_leading_run(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        names = [name_of(number) for number in range(6)]
        producer.published({1: names[0], 2: names[1], 3: names[3]})
        assert consumer.connector.lookup([]) == 0
        assert consumer.connector.lookup(names) == (2 if consumer.connector.is_store else 0)
        assert consumer.connector.lookup(names[2:]) == 0
        started = consumer.connector.start_lookup(names)
        give_up = time.monotonic() + PATIENCE_S
        while started.num_blocks is None and time.monotonic() < give_up:
            time.sleep(0.01)
        assert started.num_blocks == consumer.connector.lookup(names)
        assert started.is_certain

    def test_release_of_an_unknown_job_is_ignored(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        producer.connector.release(424242)
        (ref,) = producer.published({2: name_of(1)})
        consumer.connector.release(424243)
        consumer.fetch([FetchBlock(ref, 2)])
        assert [result.error for result in consumer.results()] == [None]

    def test_garbage_is_no_peer(self, pair: tuple[Worker, Worker]) -> None:
        _, consumer = pair
        if consumer.connector.is_store:
            consumer.connector.add_peer(b"")
            return
        for garbage in (b"", b"\xc1", b"\x80", b"not a peer"):
            with pytest.raises(TransferError, match="peer"):
                consumer.connector.add_peer(garbage)

    def test_a_closed_producer(self, pair: tuple[Worker, Worker]) -> None:
        """Stores outlive their producers; a peer that is gone fails its blocks."""
        producer, consumer = pair
        refs = producer.published({2: name_of(1), 3: name_of(2)})
        source = producer.bytes_of(2)
        producer.connector.close()
        producer.connector.close()  # twice is once
        consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        errors = [result.error for result in consumer.results()]
        if producer.connector.is_store:
            assert errors == [None, None]
            assert consumer.bytes_of(0) == source
        else:
            assert all(errors)

    def test_a_restarted_producer(self, pair: tuple[Worker, Worker], workers: Callable[..., Worker]) -> None:
        """References of the life before fail (P2P); those of the new life work."""
        producer, consumer = pair
        (old,) = producer.published({2: name_of(1)})
        producer.connector.close()
        again = workers("producer", 16, epoch="e2")
        consumer.connector.add_peer(again.connector.describe())
        (new,) = again.published({4: name_of(2)})
        consumer.fetch([FetchBlock(new, 1)])
        assert [result.error for result in consumer.results()] == [None]
        assert consumer.bytes_of(1) == again.bytes_of(4)
        consumer.fetch([FetchBlock(old, 2)])
        assert [bool(result.error) for result in consumer.results()] == [not consumer.connector.is_store]

    def test_the_same_block_of_a_restarted_producer(
        self, pair: tuple[Worker, Worker], workers: Callable[..., Worker]
    ) -> None:
        """Nothing but the epoch tells the reference of the life before from one of the new life."""
        producer, consumer = pair
        (old,) = producer.published({2: name_of(1)})
        producer.connector.close()
        again = workers("producer", 16, epoch="e2")
        consumer.connector.add_peer(again.connector.describe())
        (new,) = again.published({2: name_of(1)})
        consumer.fetch([FetchBlock(old, 1), FetchBlock(new, 2)])
        errors = {result.block_id: result.error for result in consumer.results()}
        assert bool(errors[1]) is not consumer.connector.is_store
        assert errors[2] is None

    def test_close_with_work_under_way(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        refs = producer.published({block_id: name_of(block_id) for block_id in range(16)})
        for _ in range(20):
            consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        consumer.connector.close()
        producer.connector.release(producer.last_job)
        for block_id in range(24):
            consumer.fill(block_id, 0xEE)
        (again,) = producer.published({3: name_of(100)})
        assert again.index == 0
        assert all(consumer.bytes_of(block_id) == b"\xee" * SPEC.block_bytes for block_id in range(24))
