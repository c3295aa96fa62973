from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common import metrics
from common.errors import StartupError
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, KVConnector, LocalBlock, Lookup
from kv_store.host_copy import HostCopy
from kv_store.shared_storage.block_files import STALE_TEMP_S
from kv_store.shared_storage.connector import SharedStorageConnector
from kv_store.shared_storage.run_file import HEADER_BYTES
from kv_store.shared_storage.sharded_files import ShardedFiles
from tests.kv_store.blocks import PATIENCE_S, SPEC, name_of
from tests.kv_store.conformance import WIDE_SPEC, ConnectorConformance, Create, RankedWorker, Worker, wait_until
from tests.kv_store.stored import files_of, flip, hanging, hanging_writes, path_of, runs_of


def counted(calls: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which puts `name` on `calls` each time."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return call(*args, **kwargs)

    return wrapper


@contextmanager
def hanging_lookups(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """As in a network file system whose server is gone, until the event or the end."""
    goes_on = threading.Event()
    contains = ShardedFiles.contains

    def hang(files: ShardedFiles, block_hash: bytes) -> bool:
        return goes_on.wait(PATIENCE_S) and contains(files, block_hash)

    with monkeypatch.context() as patch:
        patch.setattr(ShardedFiles, "contains", hang)
        try:
            yield goes_on
        finally:
            goes_on.set()


def impatient(kv_dir: Path) -> Worker:
    return Worker(SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(kv_dir)}, transfer_timeout_s=1.0)), 16)


def count_failed(kind: str) -> float:
    count: float = metrics.kv_store_failed_blocks.labels(kind)._value.get()
    return count


def answer(lookup: Lookup) -> tuple[int | None, bool]:
    """Waits for it."""
    wait_until(lambda: lookup.num_blocks is not None)
    return lookup.num_blocks, lookup.is_certain


class TestSharedStorage(ConnectorConformance):
    @pytest.fixture
    def times(self) -> dict[str, float]:
        """Lookups end when they know, however slow this machine is."""
        return {"lookup_timeout_s": PATIENCE_S}

    @pytest.mark.parametrize("times", [{"lookup_timeout_s": 0.5}])
    def test_lookups_in_a_file_system_that_hangs(
        self, workers: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        worker = workers("w")
        worker.published({3: name_of(1)})
        names = [name_of(1), name_of(2)]
        num_failed = metrics.kv_store_failed_lookups._value.get()
        with hanging_lookups(monkeypatch) as goes_on:
            worker.woken.clear()
            started = time.monotonic()
            lookups = [worker.connector.start_lookup(names) for _ in range(10)]
            assert [lookup.num_blocks for lookup in lookups] == [None] * 10
            assert worker.woken.wait(PATIENCE_S)
            assert [answer(lookup) for lookup in lookups] == [(0, False)] * 10
            assert time.monotonic() - started < 10 * 0.5
            for _ in range(3):
                late = worker.connector.start_lookup(names)
                assert (late.num_blocks, late.is_certain) == (0, False), "the first one still hangs"
            assert metrics.kv_store_failed_lookups._value.get() == num_failed + 13
            assert caplog.text.count("kv_dir did not answer") == 1
            goes_on.set()
            wait_until(lambda: answer(worker.connector.start_lookup(names)) == (1, True))
        assert lookups[0].num_blocks == 0, "an answer does not change"

    @pytest.mark.parametrize("times", [{"lookup_timeout_s": 2.0}])
    def test_a_slow_lookup_has_found_what_it_found_in_time(
        self, workers: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = workers("w")

        def contains(*_: object) -> bool:
            time.sleep(0.5)
            return True

        monkeypatch.setattr(ShardedFiles, "contains", contains)
        num_found, is_certain = answer(worker.connector.start_lookup([name_of(number) for number in range(10)]))
        assert num_found in (1, 2, 3, 4)
        assert not is_certain

    @pytest.mark.parametrize("times", [{"lookup_timeout_s": 0.5, "join_timeout_s": 0.2}])
    def test_close_does_not_wait_for_a_lookup_that_hangs(
        self, workers: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        worker = workers("w")
        with hanging_lookups(monkeypatch):
            answer(worker.connector.start_lookup([name_of(1)]))
            worker.connector.close()
        assert "still waits for the file system" in caplog.text

    @pytest.fixture
    def kv_dir(self, tmp_path: Path) -> Path:
        return tmp_path / "kv"

    @pytest.fixture
    def create(self, kv_dir: Path, times: dict[str, float]) -> Create:
        def create(worker_id: str, epoch: str) -> KVConnector:
            config = ConnectorConfig(section={"kv_dir": str(kv_dir)}, worker_id=worker_id, epoch=epoch)
            return SharedStorageConnector(config, **times)

        return create

    def test_a_block_is_written_once(self, pair: tuple[Worker, Worker], kv_dir: Path) -> None:
        producer, consumer = pair
        producer.publish([LocalBlock(0, 3, name_of(1))])
        assert [result.num_bytes for result in producer.results()] == [SPEC.block_bytes]
        consumer.publish([LocalBlock(0, 9, name_of(1))])
        (again,) = consumer.results()
        assert (again.error, again.num_bytes) == (None, 0)
        consumer.fetch([FetchBlock(BlockRef(index=0, block_hash=name_of(1)), 5)])
        assert [result.error for result in consumer.results()] == [None]
        assert consumer.bytes_of(5) == producer.bytes_of(3)
        path = path_of(kv_dir, name_of(1))
        assert path == kv_dir / f"v2-{SPEC.fingerprint()}" / "blocks" / "00" / f"{name_of(1).hex()}.kv"
        assert path.stat().st_size == HEADER_BYTES + SPEC.block_bytes
        (run,) = runs_of(kv_dir)
        assert run.samefile(path)

    def test_writing_what_is_there_costs_a_look_and_notes_the_use(
        self, pair: tuple[Worker, Worker], kv_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer, consumer = pair
        producer.published({3: name_of(1), 4: name_of(2)})
        (run,) = runs_of(kv_dir)
        os.utime(run, (0, 0))
        monkeypatch.setattr(HostCopy, "load", None)  # nothing is copied from the device
        consumer.publish([LocalBlock(0, 8, name_of(1)), LocalBlock(1, 9, name_of(2))])
        assert [(result.error, result.num_bytes) for result in consumer.results()] == [(None, 0)] * 2
        assert run.stat().st_mtime > 0

    def test_blocks_outlive_all_workers(self, workers: Callable[..., Worker]) -> None:
        producer = workers("producer")
        producer.published({3: name_of(1)})
        producer.connector.close()
        later = workers("later", epoch="e2")
        assert later.connector.lookup([name_of(1), name_of(2)]) == 1
        later.fetch([FetchBlock(BlockRef(index=0, block_hash=name_of(1)), 5)])
        assert [result.error for result in later.results()] == [None]
        assert later.bytes_of(5) == producer.bytes_of(3)

    def test_ranks_of_one_worker_never_meet(self, workers: Callable[..., Worker]) -> None:
        first, second = (workers(f"w{rank}", spec=replace(SPEC, tp_size=2, tp_rank=rank)) for rank in (0, 1))
        first.published({3: name_of(1)})
        assert first.connector.lookup([name_of(1)]) == 1
        assert second.connector.lookup([name_of(1)]) == 0

    def test_another_degrees_shard_that_is_corrupt(
        self, ranked: Callable[[str, int, int], RankedWorker], kv_dir: Path
    ) -> None:
        """Its checksum is that of the whole shard, so no rank takes heads out of it; the rank that needs others may."""
        producer, consumer = ranked("producer", 4, 2), ranked("consumer", 4, 4)
        refs = producer.published({1: name_of(1), 2: name_of(2)})
        (run,) = (kv_dir / f"v2-{WIDE_SPEC.fingerprint()}-tp1of2" / "runs").iterdir()
        flip(run, HEADER_BYTES)
        results = consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        by_rank = [[result.error for result in results[rank * 2 : rank * 2 + 2]] for rank in range(4)]
        assert by_rank[:2] == [[None, None]] * 2
        assert [second for _, second in by_rank[2:]] == [None, None]
        assert all(first for first, _ in by_rank[2:])
        assert any("corrupt" in str(first) for first, _ in by_rank[2:])  # the other one may find it deleted

    def test_own_blocks_come_before_another_degrees(
        self, ranked: Callable[[str, int, int], RankedWorker], kv_dir: Path
    ) -> None:
        other, own = ranked("other", 4, 2), ranked("own", 4, 1)
        other.published({1: name_of(1)})
        refs = own.published({1: name_of(1)})
        shutil.rmtree(kv_dir / f"v2-{WIDE_SPEC.fingerprint()}-tp0of2")
        reader = ranked("reader", 4, 1)
        assert [result.error for result in reader.fetch([FetchBlock(refs[0], 3)])] == [None]
        assert torch.equal(reader.whole()[3], own.whole()[1])

    def test_a_slice_is_one_run_and_few_reads(
        self, workers: Callable[..., Worker], kv_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer, consumer = workers("producer", 64), workers("consumer", 64)
        refs = producer.published({63 - number: name_of(number) for number in range(64)})
        (run,) = runs_of(kv_dir)
        assert run.stat().st_nlink == 65
        calls: list[str] = []
        monkeypatch.setattr(os, "preadv", counted(calls, "preadv", os.preadv))
        monkeypatch.setattr(os, "pread", counted(calls, "pread", os.pread))
        monkeypatch.setattr(os, "open", counted(calls, "open", os.open))
        consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        assert {result.error for result in consumer.results()} == {None}
        assert sorted(calls) == ["open", "pread", "preadv"]
        assert all(consumer.bytes_of(number) == producer.bytes_of(63 - number) for number in range(64))

    def test_a_flipped_bit_costs_one_block(self, pair: tuple[Worker, Worker], kv_dir: Path) -> None:
        producer, consumer = pair
        refs = producer.published({number: name_of(number) for number in range(4)})
        flip(path_of(kv_dir, name_of(2)), HEADER_BYTES + 2 * SPEC.block_bytes + 100)
        consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        errors = {result.index: result.error for result in consumer.results()}
        assert "checksum" in (errors[2] or "")
        assert [errors[index] for index in (0, 1, 3)] == [None] * 3
        assert consumer.connector.lookup([ref.block_hash for ref in refs]) == 2
        # It can be written and read again, and readers who come to it by way of the run of old do find it.
        assert producer.published({2: name_of(2)})
        consumer.fetch([FetchBlock(ref, ref.index) for ref in refs])
        assert {result.error for result in consumer.results()} == {None}
        assert all(consumer.bytes_of(number) == producer.bytes_of(number) for number in range(4))

    def test_reads_not_begun_by_the_deadline_fail(self, workers: Callable[..., Worker], kv_dir: Path) -> None:
        producer = workers("producer")
        (ref,) = producer.published({3: name_of(1)})
        config = ConnectorConfig(section={"kv_dir": str(kv_dir)}, transfer_timeout_s=0.0)
        late = Worker(SharedStorageConnector(config), 4)
        before = late.bytes_of(1)
        late.fetch([FetchBlock(ref, 1)])
        (result,) = late.results()
        late.connector.close()
        assert result.error is not None
        assert "not read within 0.0 s" in result.error
        assert late.bytes_of(1) == before

    def test_a_read_that_hangs(self, workers: Callable[..., Worker], kv_dir: Path) -> None:
        producer, consumer = workers("producer"), impatient(kv_dir)
        refs = producer.published({number: name_of(number) for number in range(4)})
        with hanging(path_of(kv_dir, name_of(0))) as go_on:
            consumer.fetch([FetchBlock(ref, ref.index) for ref in refs[:2]])
            consumer.fetch([FetchBlock(refs[3], 5)])
            results = [consumer.next_result() for _ in range(3)]
            assert [(result.block_id, result.is_final, result.error) for result in results] == [
                (5, True, None),
                (0, False, "kv_dir hangs: not done within 1.0 s"),
                (1, False, "kv_dir hangs: not done within 1.0 s"),
            ]
            consumer.fetch([FetchBlock(refs[2], 7)])
            assert consumer.next_result().error is None, "the other thread goes on"
            go_on()
            late = consumer.results()
        assert [(result.block_id, result.is_final) for result in late] == [(0, True), (1, True)]
        assert "cannot read" in (late[0].error or "")
        assert late[1].error is None
        assert consumer.bytes_of(1) == producer.bytes_of(1)
        consumer.connector.close()

    def test_all_threads_hang(
        self, workers: Callable[..., Worker], kv_dir: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        producer, consumer = workers("producer"), impatient(kv_dir)
        refs = producer.published({number: name_of(number) for number in range(4)})
        num_failed = count_failed("read")
        with hanging(path_of(kv_dir, name_of(0)), path_of(kv_dir, name_of(1))) as go_on:
            for ref in refs[:3]:
                consumer.fetch([FetchBlock(ref, ref.index)])
            results = {result.index: result for result in (consumer.next_result() for _ in range(3))}
            assert {index: result.is_final for index, result in results.items()} == {0: False, 1: False, 2: True}
            assert "kv_dir hangs" in (results[2].error or "")
            consumer.publish([LocalBlock(9, 9, name_of(9))])
            consumer.fetch([FetchBlock(refs[3], 5)])
            assert [result.error for result in consumer.poll()] == ["kv_dir hangs"] * 2, "at once"
            assert count_failed("read") == num_failed + 4
            assert caplog.text.count("kv_dir did not answer in time") == 1
            go_on()
            assert [result.is_final for result in consumer.results()] == [True] * 2
        consumer.fetch([FetchBlock(refs[3], 5)])
        assert [result.error for result in consumer.results()] == [None]
        assert consumer.bytes_of(5) == producer.bytes_of(3)
        consumer.connector.close()

    def test_a_write_that_hangs(self, kv_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = impatient(kv_dir)
        with hanging_writes(monkeypatch) as go_on:
            worker.publish([LocalBlock(0, 3, name_of(1))])
            overdue = worker.next_result()
            assert (overdue.is_final, overdue.ref) == (False, None)
            go_on()
            (done,) = worker.results()
        assert (done.error, done.num_bytes) == (None, SPEC.block_bytes)
        assert worker.connector.lookup([name_of(1)]) == 1
        worker.connector.close()

    @pytest.mark.parametrize("wipe_all", [True, False], ids=["kv_dir", "content"])
    def test_a_wiped_directory(self, pair: tuple[Worker, Worker], kv_dir: Path, wipe_all: bool) -> None:
        producer, consumer = pair
        (lost,) = producer.published({3: name_of(1)})
        for directory in [kv_dir] if wipe_all else list(kv_dir.iterdir()):
            shutil.rmtree(directory)
        assert consumer.connector.lookup([name_of(1)]) == 0
        consumer.fetch([FetchBlock(lost, 1)])
        (result,) = consumer.results()
        assert result.error is not None
        assert "not in the store" in result.error
        (ref,) = producer.published({4: name_of(2)})
        consumer.fetch([FetchBlock(ref, 1)])
        assert [result.error for result in consumer.results()] == [None]
        assert consumer.bytes_of(1) == producer.bytes_of(4)

    def test_a_directory_that_turns_unwritable(self, pair: tuple[Worker, Worker], kv_dir: Path) -> None:
        producer, consumer = pair
        (ref,) = producer.published({3: name_of(1)})
        shutil.rmtree(kv_dir)
        kv_dir.write_text("a file where the directory was")
        producer.publish([LocalBlock(0, 4, name_of(2)), LocalBlock(1, 5, name_of(3))])
        assert all("cannot" in (result.error or "") for result in producer.results())
        consumer.fetch([FetchBlock(ref, 1)])
        assert [bool(result.error) for result in consumer.results()] == [True]
        kv_dir.unlink()
        assert producer.published({4: name_of(2)})

    def test_stale_temporary_files_are_deleted_at_start(self, workers: Callable[..., Worker], kv_dir: Path) -> None:
        temp_dir = Path(files_of(kv_dir).layout.temps)
        temp_dir.mkdir(parents=True)
        stale, young = temp_dir / "stale", temp_dir / "young"
        for path in (stale, young):
            path.write_bytes(b"half a block")
        long_ago = time.time() - 2 * STALE_TEMP_S
        os.utime(stale, (long_ago, long_ago))
        worker = workers("worker")
        worker.published({3: name_of(1)})
        worker.connector.close()  # waits for the thread that cleans up
        assert [path.name for path in temp_dir.iterdir()] == ["young"]


class TestStart:
    def test_no_directory_given(self) -> None:
        with pytest.raises(StartupError, match=r"^kv_dir: "):
            SharedStorageConnector(ConnectorConfig())

    def test_missing_parent(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"^kv_dir: .*No such file"):
            SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(tmp_path / "missing" / "kv")}))

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "kv").write_text("")
        with pytest.raises(StartupError, match=r"^kv_dir: .*exists"):
            SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(tmp_path / "kv")}))

    @pytest.fixture
    def read_only_dir(self) -> Iterator[Path]:
        """Not under `tmp_path`, whose parents only their owner may enter."""
        directory = Path(tempfile.mkdtemp(prefix="baton-read-only-"))
        directory.chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)  # permissions don't bind root
        yield directory
        if is_root:
            os.seteuid(0)
        directory.rmdir()

    def test_a_full_disk_is_no_reason_not_to_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A running worker goes on with a full disk, too. A directory that cannot be made is a reason."""

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        connector = SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(tmp_path)}))
        assert list(tmp_path.glob(".probe*")) == []
        assert connector.is_store
        monkeypatch.setattr(Path, "mkdir", full)
        with pytest.raises(StartupError, match=r"^kv_dir: cannot write to .*No space left"):
            SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(tmp_path / "kv")}))

    def test_read_only(self, read_only_dir: Path) -> None:
        with pytest.raises(StartupError, match=r"^kv_dir: cannot write to .*Permission denied"):
            SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(read_only_dir)}))
