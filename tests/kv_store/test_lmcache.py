from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from common import metrics
from common.errors import StartupError, TransferError
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, KVConnector, LocalBlock, TransferResult
from kv_store.lmcache import marks as lmcache_marks
from kv_store.lmcache.client import LMCacheClient
from kv_store.lmcache.connector import LMCacheConnector
from kv_store.lmcache.groups import Bytes, Chunk, Group, GroupLayout
from tests.kv_store.blocks import PATIENCE_S, SPEC, name_of
from tests.kv_store.conformance import ConnectorConformance, Create, RankedWorker, Worker, wait_until
from tests.kv_store.lmcache_process import LMCacheProcess, free_ports

Ranked = Callable[[str, int, int], RankedWorker]
BIG_SPEC = replace(SPEC, num_layers=32, num_kv_heads=8, head_dim=64, block_size=16)  # 1 MiB per block


@pytest.fixture(scope="module")
def running_server() -> Iterator[LMCacheProcess]:
    server = LMCacheProcess()
    yield server
    server.close()


@pytest.fixture
def server(running_server: LMCacheProcess) -> LMCacheProcess:
    """An empty server."""
    running_server.clear()
    return running_server


def config(server: LMCacheProcess, timeout_s: float = PATIENCE_S) -> ConnectorConfig:
    return ConnectorConfig(section={"lmcache_address": server.address}, transfer_timeout_s=timeout_s)


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(
        server: LMCacheProcess, num_blocks: int, timeout_s: float = PATIENCE_S, lookup_timeout_s: float = PATIENCE_S
    ) -> Worker:
        connector = LMCacheConnector(config(server, timeout_s), lookup_timeout_s=lookup_timeout_s)
        made.append(Worker(connector, num_blocks, BIG_SPEC, seed=len(made) + 1))
        return made[-1]

    yield make
    for worker in made:
        worker.connector.close()


def by_rank(results: list[TransferResult]) -> list[list[str | None]]:
    """Errors of a job of two blocks."""
    errors = [(result.index, result.error) for result in results]
    return [[error for _, error in sorted(errors[start : start + 2])] for start in range(0, len(errors), 2)]


def fetch(worker: Worker, refs: list[BlockRef]) -> list[TransferResult]:
    """Each block goes where its index says."""
    worker.fetch([FetchBlock(ref, ref.index) for ref in refs])
    return sorted(worker.results(), key=lambda result: result.index)


class TestLMCache(ConnectorConformance):
    @pytest.fixture
    def create(self, server: LMCacheProcess) -> Create:
        def create(worker_id: str, epoch: str) -> KVConnector:
            """Its lookups end when they know, however slow this machine is."""
            ours = replace(config(server), worker_id=worker_id, epoch=epoch)
            return LMCacheConnector(ours, lookup_timeout_s=PATIENCE_S)

        return create

    def test_any_part_of_what_was_published(self, workers: Callable[..., Worker]) -> None:
        producer, consumer = workers("producer", 23), workers("consumer", 64)
        refs = producer.published({block_id: name_of(block_id) for block_id in range(23)})
        for part in (refs[3:4], refs[5:18], refs[22:], [refs[20], refs[1]], refs):
            consumer.fetch([FetchBlock(ref, 63 - ref.index) for ref in part])
            assert {result.error for result in consumer.results()} == {None}
            assert all(consumer.bytes_of(63 - ref.index) == producer.bytes_of(ref.index) for ref in part)

    def test_hashes_alone_find_a_prefix(self, workers: Callable[..., Worker]) -> None:
        """Also one that was published in several chunks, beginning anywhere."""
        producer, consumer = workers("producer", 40), workers("consumer", 64)
        names = [name_of(100 + index) for index in range(40)]
        for start, stop in ((0, 7), (7, 24), (24, 40)):
            producer.publish([LocalBlock(index, index, names[index]) for index in range(start, stop)])
            assert {result.error for result in producer.results()} == {None}
        assert consumer.connector.lookup(names) == 40
        assert consumer.connector.lookup(names[:9]) == 9 - 1, "block 8 is in a group that ends with block 11"
        for first in (0, 5, 39):
            results = fetch(consumer, [BlockRef(index=i, block_hash=names[i]) for i in range(first, 40)])
            assert {result.error for result in results} == {None}
            assert all(consumer.bytes_of(i) == producer.bytes_of(i) for i in range(first, 40))
            consumer.cache.zero_()

    def test_another_prompt_finds_all_full_blocks_before_a_tail(self, workers: Callable[..., Worker]) -> None:
        producer, consumer = workers("producer", 8), workers("consumer", 8)
        names = [name_of(200 + index) for index in range(8)]
        full = [LocalBlock(index, index, names[index]) for index in range(7)]
        producer.publish([*full, LocalBlock(7, 7, names[7], is_partial=True)])
        refs = [result.ref for result in producer.results()]
        assert consumer.connector.lookup([*names[:7], name_of(9)]) == 7
        assert {result.error for result in fetch(consumer, [ref for ref in refs if ref is not None])} == {None}
        assert all(consumer.bytes_of(index) == producer.bytes_of(index) for index in range(8))

    def test_hints_of_others_and_unknown_blocks(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        (ref,) = producer.published({3: name_of(1)})
        bad = msgspec.structs.replace(ref, index=1, block_hash=name_of(9))
        results = fetch(
            consumer,
            [msgspec.structs.replace(ref, peer="prefill-1"), bad, msgspec.structs.replace(bad, index=2, peer="")],
        )
        assert [result.error for result in results] == [
            None,
            "corrupt in LMCache: not what its name says",
            f"block {name_of(9).hex()} is not in LMCache",
        ]

    def test_a_block_is_stored_once(self, pair: tuple[Worker, Worker]) -> None:
        producer, consumer = pair
        producer.publish([LocalBlock(0, 3, name_of(1))])
        assert [result.num_bytes for result in producer.results()] == [SPEC.block_bytes]
        consumer.publish([LocalBlock(0, 9, name_of(1))])
        (again,) = consumer.results()
        assert (again.error, again.num_bytes) == (None, 0)
        assert again.ref is not None
        assert fetch(consumer, [again.ref])[0].error is None
        assert consumer.bytes_of(0) == producer.bytes_of(3)

    def test_ranks_of_one_worker_never_meet(self, workers: Callable[..., Worker]) -> None:
        first, second = (workers(f"w{rank}", spec=replace(SPEC, tp_size=2, tp_rank=rank)) for rank in (0, 1))
        (ref,) = first.published({3: name_of(1)})
        assert first.connector.lookup([name_of(1)]) == 1
        assert second.connector.lookup([name_of(1)]) == 0
        for hint in (ref.peer, ""):
            (result,) = fetch(second, [msgspec.structs.replace(ref, peer=hint)])
            assert result.error == f"block {name_of(1).hex()} is not in LMCache"

    @pytest.mark.parametrize("consumer_tp", [1, 2, 4])
    @pytest.mark.parametrize("producer_tp", [1, 2, 4])
    def test_hashes_alone_find_what_another_degree_stored(
        self, ranked: Ranked, producer_tp: int, consumer_tp: int
    ) -> None:
        producer, consumer = ranked("producer", 40, producer_tp), ranked("consumer", 40, consumer_tp)
        names = [name_of(100 + index) for index in range(40)]
        producer.published(dict(enumerate(names)))
        assert {rank.connector.lookup([*names, name_of(9)]) for rank in consumer.ranks} == {40}
        for first in (0, 5, 39):
            refs = [BlockRef(index=index, block_hash=names[index]) for index in range(first, 40)]
            assert {result.error for result in consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])} == {None}
            assert torch.equal(consumer.whole()[first:], producer.whole()[first:])
            for rank in consumer.ranks:
                rank.cache.zero_()

    def test_a_prefix_of_several_degrees(self, ranked: Ranked) -> None:
        """A prompt of one, its answer of another: found as one, whoever looks."""
        first, second, reader = ranked("first", 8, 2), ranked("second", 8, 1), ranked("reader", 8, 4)
        names = [name_of(index) for index in range(8)]
        for worker, start, stop in ((first, 0, 6), (second, 6, 8)):
            for rank in worker.ranks:
                rank.publish([LocalBlock(index, index, names[index]) for index in range(start, stop)])
                assert {result.error for result in rank.results()} == {None}
        assert {rank.connector.lookup(names) for worker in (first, second, reader) for rank in worker.ranks} == {8}
        results = reader.fetch([FetchBlock(BlockRef(index=i, block_hash=name), i) for i, name in enumerate(names)])
        assert {result.error for result in results} == {None}
        assert torch.equal(reader.whole(), torch.cat([first.whole()[:6], second.whole()[6:]]))

    def test_own_blocks_come_before_another_degrees(self, ranked: Ranked) -> None:
        other, own, reader = ranked("other", 4, 2), ranked("own", 4, 1), ranked("reader", 4, 1)
        other.published({1: name_of(1)})
        own.published({1: name_of(1)})
        assert [result.error for result in reader.fetch([FetchBlock(BlockRef(index=0, block_hash=name_of(1)), 3)])] == [
            None
        ]
        assert torch.equal(reader.whole()[3], own.whole()[1])

    def test_a_hint_to_what_is_gone_finds_it_elsewhere(self, ranked: Ranked) -> None:
        """The degree that a hint names is where the block is looked for first, not only."""
        own, reader = ranked("own", 4, 2), ranked("reader", 4, 2)
        (ref,) = own.published({1: name_of(1)})
        for tp_size in (1, 4, 2):
            hint = Group(1, name_of(1)).hint(tp_size)
            results = reader.fetch([FetchBlock(msgspec.structs.replace(ref, peer=hint), 3)])
            assert [result.error for result in results] == [None, None]
            assert torch.equal(reader.whole()[3], own.whole()[1])

    def test_a_block_without_one_of_its_ranks_is_not_there(self, ranked: Ranked) -> None:
        producer, whole, quarter = ranked("producer", 4, 2), ranked("whole", 4, 1), ranked("quarter", 4, 4)
        (ref,) = producer.ranks[0].published({1: name_of(1)})
        missing = f"block {name_of(1).hex()} is not in LMCache"
        assert [rank.connector.lookup([name_of(1)]) for rank in (*whole.ranks, *quarter.ranks)] == [0, 1, 1, 0, 0]
        for hint in (ref.peer, ""):
            fetched = [FetchBlock(msgspec.structs.replace(ref, peer=hint), 3)]
            assert [result.error for result in whole.fetch(fetched)] == [missing]
            assert [result.error for result in quarter.fetch(fetched)] == [None, None, missing, missing]

    def test_another_degrees_shard_that_is_corrupt(self, ranked: Ranked, server: LMCacheProcess) -> None:
        """Its checksum is that of the whole shard, so no rank takes heads out of it, whichever were changed."""
        producer, whole, quarter = ranked("producer", 4, 2), ranked("whole", 4, 1), ranked("quarter", 4, 4)
        refs = producer.published({1: name_of(1), 2: name_of(2)})
        with server.pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[memory.find(producer.ranks[1].bytes_of(1))] ^= 1
        for hints in (True, False):
            fetched = [
                FetchBlock(ref if hints else msgspec.structs.replace(ref, peer=""), target)
                for ref, target in zip(refs, (0, 3), strict=True)
            ]
            corrupt = "corrupt in LMCache: checksum differs"
            assert by_rank(whole.fetch(fetched)) == [[corrupt, None]]
            assert by_rank(quarter.fetch(fetched)) == [[None, None]] * 2 + [[corrupt, None]] * 2
            assert torch.equal(whole.whole()[3], producer.whole()[2])

    def test_a_miss_asks_for_marks_alone(self, ranked: Ranked, monkeypatch: pytest.MonkeyPatch) -> None:
        """If no other degree has stored anything, its groups are not looked for, and the marks only now and then."""
        monkeypatch.setattr(lmcache_marks, "KNOWN_S", PATIENCE_S)
        own, other = ranked("own", 4, 2), ranked("other", 4, 1)
        own.published({1: name_of(1)})
        reader = own.ranks[0].connector
        asked: list[Chunk] = []
        contains = LMCacheClient.contains

        def counted(client: LMCacheClient, chunk: Chunk, deadline: float) -> bool:
            asked.append(chunk)
            return contains(client, chunk, deadline)

        monkeypatch.setattr(LMCacheClient, "contains", counted)
        for number, num_marks in ((5, 2), (6, 0)):
            asked.clear()
            assert reader.lookup([name_of(number)]) == 0
            assert len([chunk for chunk in asked if chunk.model_name.endswith("-degrees")]) == num_marks
            assert len(asked) == 1 + num_marks

        other.published({1: name_of(5)})
        assert reader.lookup([name_of(5)]) == 0
        monkeypatch.setattr(lmcache_marks, "KNOWN_S", 0.0)
        assert reader.lookup([name_of(5)]) == 1

    def test_corrupt_shared_memory_is_found_and_repaired(
        self, pair: tuple[Worker, Worker], server: LMCacheProcess
    ) -> None:
        producer, consumer = pair
        refs = producer.published({3: name_of(1), 4: name_of(2)})
        with server.pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            position = memory.find(producer.bytes_of(4))
            memory[position + 5] ^= 1
        assert [result.error for result in fetch(consumer, refs)] == [None, "corrupt in LMCache: checksum differs"]
        producer.publish([LocalBlock(0, 3, name_of(1)), LocalBlock(1, 4, name_of(2))])
        assert [result.num_bytes for result in producer.results()] == [SPEC.block_bytes] * 2
        assert [result.error for result in fetch(consumer, refs)] == [None, None]
        assert consumer.bytes_of(1) == producer.bytes_of(4)

    def test_a_writer_that_does_not_finish(self, pair: tuple[Worker, Worker], server: LMCacheProcess) -> None:
        """What it reserved is not served, and when the server makes it readable all the same, it is found out."""
        producer, consumer = pair
        lost, layout, group = LMCacheClient(server.address), GroupLayout(SPEC), Group(1, name_of(1))

        def half(slot: Bytes) -> None:
            layout.write(slot, [name_of(1)], [memoryview(b"\x11" * SPEC.block_bytes)])
            slot[: len(slot) // 2] = 0xEE
            raise TransferError("lost")

        with pytest.raises(TransferError, match="lost"):
            lost.store(layout.chunk(group), half, time.monotonic() + PATIENCE_S)
        ref = BlockRef(index=0, block_hash=name_of(1), peer=group.hint(tp_size=1))
        assert consumer.connector.lookup([name_of(1)]) == 0
        assert fetch(consumer, [ref])[0].error == f"block {name_of(1).hex()} is not in LMCache"
        producer.publish([LocalBlock(0, 3, name_of(1))])
        assert [result.error for result in producer.results()] == [
            "LMCache has no room, or waits for another writer of the same blocks"
        ]

        lost.close(PATIENCE_S)
        assert consumer.connector.lookup([name_of(1)]) == 1, "the server believes that it is whole"
        assert fetch(consumer, [ref])[0].error == "corrupt in LMCache: not what its name says"
        producer.published({3: name_of(1)})
        assert fetch(consumer, [ref])[0].error is None
        assert consumer.bytes_of(0) == producer.bytes_of(3)


def test_a_stopped_server(server: LMCacheProcess, make_worker: Callable[..., Worker]) -> None:
    """Every block fails at the deadline, and nothing waits for more; when the server goes on, so do transfers."""
    worker = make_worker(server, 20, timeout_s=1.0, lookup_timeout_s=0.25)
    refs = worker.published({block_id: name_of(block_id) for block_id in range(20)})
    source = [worker.bytes_of(block_id) for block_id in range(20)]
    server.process.send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)
        results = fetch(worker, refs)
        assert all(result.error for result in results)
        assert worker.connector.lookup([name_of(0)]) == 0
        worker.publish([LocalBlock(0, 0, name_of(500))])
        assert all(result.error for result in worker.results())
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: all(result.error is None for result in fetch(worker, refs)))
    assert all(worker.bytes_of(block_id) == source[block_id] for block_id in range(20))


@pytest.mark.slow
def test_a_killed_server(tmp_path: Path, make_worker: Callable[..., Worker]) -> None:
    """Files that it kept are served by the next one; without files the next one is empty. Workers notice themselves."""
    server = LMCacheProcess(kv_dir=tmp_path)
    try:
        producer, consumer = make_worker(server, 64), make_worker(server, 64)
        names = [name_of(block_id) for block_id in range(64)]
        refs = producer.published(dict(enumerate(names)))
        wait_until(lambda: len(list(tmp_path.glob("*-x16*.data"))) == 4)  # files are written in the background
        consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        consumer.woken.wait(PATIENCE_S)
        server.kill()
        for result in consumer.results():
            assert result.error or consumer.bytes_of(result.block_id) == producer.bytes_of(result.block_id)
        assert {result.error is None for result in fetch(consumer, refs)} == {False}
        assert consumer.connector.lookup(names) == 0
        producer.publish([LocalBlock(0, 0, name_of(500))])
        assert {result.error is None for result in producer.results()} == {False}

        server.start()
        consumer.cache.zero_()
        wait_until(lambda: consumer.connector.lookup(names) == 64)
        assert {result.error for result in fetch(consumer, refs)} == {None}
        assert all(consumer.bytes_of(block_id) == producer.bytes_of(block_id) for block_id in range(64))

        server.kill()
        for file in tmp_path.iterdir():
            file.unlink()
        server.start()
        assert consumer.connector.lookup(names) == 0
        assert all(result.error for result in fetch(consumer, refs))
        wait_until(lambda: publish_all(producer, names))
        assert {result.error for result in fetch(consumer, refs)} == {None}
    finally:
        server.close()


@pytest.mark.slow
def test_a_kind_of_chunks_first_used_after_a_restart() -> None:
    """Its place is one in the new server's memory, although nothing has said yet that the old one is gone."""
    server = LMCacheProcess()
    writer, reader = LMCacheClient(server.address), LMCacheClient(server.address)
    try:
        deadline = time.monotonic() + PATIENCE_S
        assert writer.store(Chunk("old", 64, name_of(1)), lambda slot: slot.fill(1), deadline)
        server.kill()
        server.start()
        writer.wait_until_up(PATIENCE_S)
        new = Chunk("new", 64, name_of(1))
        assert writer.store(new, lambda slot: slot.fill(2), deadline)
        with reader.loaded(new, deadline) as slot:
            assert slot is not None
            assert slot.tolist() == [2] * 64
        assert not writer.contains(Chunk("old", 64, name_of(1)), deadline)
    finally:
        for client in (writer, reader):
            client.close(PATIENCE_S)
        server.close()


def publish_all(worker: Worker, names: list[bytes]) -> bool:
    worker.publish([LocalBlock(index, index, name) for index, name in enumerate(names)])
    return all(result.error is None for result in worker.results())


def test_lookups_of_a_server_that_hangs(running_server: LMCacheProcess, make_worker: Callable[..., Worker]) -> None:
    """They don't hold up who asks, and end after the time of one, however many they are."""
    worker = make_worker(running_server, 4, lookup_timeout_s=0.5)
    num_failed = metrics.kv_store_failed_lookups._value.get()
    with running_server.stopped():
        started = time.monotonic()
        lookups = [worker.connector.start_lookup([name_of(number)]) for number in range(100)]
        assert [lookup.num_blocks for lookup in lookups] == [None] * 100
        wait_until(lambda: all(lookup.num_blocks == 0 for lookup in lookups))
        assert not any(lookup.is_certain for lookup in lookups)
        assert metrics.kv_store_failed_lookups._value.get() == num_failed + 100
        assert time.monotonic() - started < 100 * 0.5 / 2


def test_without_a_server() -> None:
    with pytest.raises(StartupError, match="lmcache_address: host:port"):
        LMCacheConnector(ConnectorConfig())
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(StartupError, match=f"no LMCache server answers at '{address}'"):
        LMCacheConnector(ConnectorConfig(section={"lmcache_address": address}), start_timeout_s=0.2)


def test_two_writers_of_one_prefix(server: LMCacheProcess, make_worker: Callable[..., Worker]) -> None:
    """Both succeed, whoever of them writes."""
    first, second = make_worker(server, 32), make_worker(server, 32)
    second.cache.copy_(first.cache)
    for round_number in range(5):
        names = [name_of(1000 * round_number + index) for index in range(32)]
        for worker in (first, second):
            worker.publish([LocalBlock(index, index, name) for index, name in enumerate(names)])
        assert {result.error for worker in (first, second) for result in worker.results()} == {None}
        server.clear()
