from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, LocalBlock
from kv_store.shared_storage.connector import SharedStorageConnector
from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.space import SHARE, StoreSpace
from tests.faults.disk import Disk, FreezingDisk, fill, fill_inodes
from tests.kv_store.blocks import PATIENCE_S, name_of
from tests.kv_store.conformance import Worker
from tests.kv_store.stored import flip, runs_of

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir()
    return path


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"baton_kv_store_{name}", labels) or 0.0


def limited(kv_dir: Path, limit_bytes: int) -> Worker:
    config = ConnectorConfig(section={"kv_dir": str(kv_dir), "kv_dir_size_gb": limit_bytes / 2**30})
    return Worker(SharedStorageConnector(config), 16, seed=1)


def bytes_in(kv_dir: Path) -> int:
    """Of the runs, each counted once however many names it has."""
    sizes: dict[int, int] = {}
    for path in kv_dir.rglob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file():
            sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


class TestShares:
    @pytest.fixture
    def space(self, kv_dir: Path) -> StoreSpace:
        """Without its thread, so that no pass is made."""
        return StoreSpace(kv_dir, FileClock(kv_dir, "test"), 100_000, lambda: None)

    def test_a_process_writes_its_share_and_then_waits_for_a_pass(self, space: StoreSpace) -> None:
        share = int(SHARE * 100_000)
        space.begin(share - 1)
        assert space.has_room()
        space.begin(1)
        assert not space.has_room()
        space.end(share - 1, share - 1)
        space.end(1, 1)
        assert not space.has_room()
        assert space._make_pass()
        assert space.has_room()

    def test_what_is_written_during_a_pass_counts(self, space: StoreSpace) -> None:
        make_pass = space._cleaner.make_pass

        def slow(target: Callable[[int], int], *, with_names: bool) -> object:
            space.begin(5000)
            space.end(5000, 5000)
            return make_pass(target, with_names=with_names)

        space._cleaner.make_pass = slow  # type: ignore[assignment,method-assign]
        assert space._make_pass()
        assert not space.has_room()

    def test_a_write_larger_than_the_share_goes_alone(self, space: StoreSpace) -> None:
        assert space.has_room()
        space.begin(50_000)
        assert not space.has_room()
        space.end(50_000, 0)  # it failed, and left nothing
        assert space.has_room()

    def test_no_write_waits_for_ever(self, space: StoreSpace, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process cleans, or died while it did."""
        monkeypatch.setattr("kv_store.shared_storage.space.MAX_WAIT_S", 0.5)
        space.begin(5000)
        assert not space.has_room()
        threading.Event().wait(0.6)
        assert space.has_room()


def test_a_worker_stays_below_its_limit(kv_dir: Path) -> None:
    worker = limited(kv_dir, 100_000)
    evicted = metric("evicted_bytes_total"), metric("evicted_runs_total")
    largest = 0
    for number in range(60):
        worker.publish([LocalBlock(index, index, name_of(16 * number + index)) for index in range(16)])
        assert {result.error for result in worker.results()} == {None}
        largest = max(largest, bytes_in(kv_dir))
    last = [name_of(16 * 59 + index) for index in range(16)]
    assert worker.connector.lookup(last) == 16
    worker.fetch([FetchBlock(BlockRef(index=index, block_hash=name), index) for index, name in enumerate(last)])
    assert {result.error for result in worker.results()} == {None}
    worker.connector.close()
    assert 60_000 < largest <= 110_000  # one run is 16 % of the limit here
    assert metric("evicted_bytes_total") - evicted[0] > 500_000
    assert metric("evicted_runs_total") - evicted[1] > 30
    assert 0 < metric("bytes") <= 110_000
    assert 0 < metric("runs") <= 7


def test_reads_pass_by_writes_that_wait(kv_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_store.shared_storage.space.MAX_WAIT_S", 1e9)
    monkeypatch.setattr("kv_store.shared_storage.file_lease.STALE_S", 1e9)
    lease = kv_dir / ".cleaner"
    lease.write_bytes(b"another process makes a pass")
    worker = limited(kv_dir, 100_000)
    refs = worker.published({number: name_of(number) for number in range(8)})
    waiting = worker.publish([LocalBlock(0, 8, name_of(8))])
    before = worker.bytes_of(1)
    worker.fill(1, 0)
    fetching = worker.fetch([FetchBlock(refs[1], 1)])
    give_up = time.monotonic() + PATIENCE_S
    while worker.is_due(fetching):
        assert worker.woken.wait(max(0, give_up - time.monotonic()))
        assert [result.error for result in worker.poll()] == [None]
    assert worker.bytes_of(1) == before
    assert worker.is_due(waiting)
    lease.unlink()
    assert [result.error for result in worker.results()] == [None]
    worker.connector.close()


def test_a_store_that_is_too_large_at_start(kv_dir: Path) -> None:
    worker = limited(kv_dir, 10**9)
    for number in range(10):
        worker.published({0: name_of(2 * number), 1: name_of(2 * number + 1)})
    worker.connector.close()
    assert len(runs_of(kv_dir)) == 10
    smaller = limited(kv_dir, 20_000)
    done = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if bytes_in(kv_dir) <= 18_000:
            break
        done.wait(0.01)
    assert bytes_in(kv_dir) <= 18_000
    smaller.connector.close()


@pytest.mark.parametrize("has_limit", [True, False])
def test_a_full_disk(
    kv_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_limit: bool
) -> None:
    """With a limit it evicts, although the limit is not reached; without one it fails, is counted and logged once."""
    worker = (
        limited(kv_dir, 10**9)
        if has_limit
        else Worker(SharedStorageConnector(ConnectorConfig(section={"kv_dir": str(kv_dir)})), 16, seed=1)
    )
    for number in range(20):
        worker.published({0: name_of(number)})
    writev, room = os.writev, bytes_in(kv_dir)

    def full(fd: int, parts: list[memoryview]) -> int:
        if bytes_in(kv_dir) + sum(map(len, parts)) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(fd, parts)

    monkeypatch.setattr(os, "writev", full)
    failed = metric("failed_blocks_total", action="write")
    caplog.set_level(logging.WARNING, logger="kv_store")
    for _ in range(3):
        worker.publish([LocalBlock(0, 1, name_of(100)), LocalBlock(1, 2, name_of(101))])
        errors = [result.error for result in worker.results()]
        assert has_limit or all("No space left" in (error or "") for error in errors)
    if has_limit:
        for _ in range(int(PATIENCE_S / 0.01)):
            worker.publish([LocalBlock(0, 1, name_of(100)), LocalBlock(1, 2, name_of(101))])
            if [result.error for result in worker.results()] == [None, None]:
                break
            threading.Event().wait(0.01)
        assert worker.connector.lookup([name_of(100), name_of(101)]) == 2
        assert len(runs_of(kv_dir)) < 20
    else:
        assert metric("failed_blocks_total", action="write") - failed == 6
        lines = [record for record in caplog.records if record.message == "KV blocks could not be stored"]
        assert len(lines) == 1
        assert len(runs_of(kv_dir)) == 20
    # What is there can be read all the while.
    kept = [number for number in range(20) if worker.connector.lookup([name_of(number)])]
    worker.fetch([FetchBlock(BlockRef(index=n, block_hash=name_of(number)), n) for n, number in enumerate(kept[-8:])])
    assert {result.error for result in worker.results()} == {None}
    worker.connector.close()


@pytest.fixture(params=["tmpfs", "tmpfs without inodes", "ext4"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A small file system, and what fills it with files of somebody else."""
    disk: Disk | FreezingDisk
    if request.param == "ext4":
        try:
            disk = FreezingDisk(tmp_path / "disk", 8)
        except OSError as error:
            pytest.skip(str(error))
    else:
        disk = Disk(tmp_path / "disk", 8, ",nr_inodes=500")
        if disk.why_not:
            pytest.skip(disk.why_not)
    try:
        yield tmp_path / "disk", fill_inodes if "inodes" in request.param else fill
    finally:
        disk.close()


def test_a_disk_that_is_truly_full(full_disk: tuple[Path, Callable[[Path], None]]) -> None:
    """Others filled it, to the last byte or file: the cleaner makes room all the same."""
    folder, fill_up = full_disk
    worker = limited(folder, 10**9)
    for number in range(20):
        worker.published({index: name_of(16 * number + index) for index in range(16)})
    fill_up(folder)
    with pytest.raises(OSError, match="No space left"):
        (folder / "one byte").write_bytes(b"1")
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        worker.publish([LocalBlock(0, 1, name_of(1000)), LocalBlock(1, 2, name_of(1001))])
        if [result.error for result in worker.results()] == [None, None]:
            break
        threading.Event().wait(0.01)
    assert worker.connector.lookup([name_of(1000), name_of(1001)]) == 2
    assert 0 < len(runs_of(folder)) < 21
    worker.connector.close()
    # And a worker that starts while it is full.
    fill_up(folder)
    limited(folder, 10**9).connector.close()


WRITER = """
import sys
import torch
from kv_store.shared_storage import space as store_space
from kv_store.base import BlockRef, ConnectorConfig, FetchBlock, LocalBlock
from kv_store.shared_storage.connector import SharedStorageConnector
from tests.faults.disk import Disk, FreezingDisk, fill, fill_inodes
from tests.kv_store.conformance import Worker, name_of
from tests.kv_store.stored import data_of

kv_dir, number, limit, rounds, any_error = sys.argv[1], *map(int, sys.argv[2:])
store_space.MAX_WAIT_S = 600.0  # however busy the machine is
config = ConnectorConfig(section={"kv_dir": kv_dir, "kv_dir_size_gb": limit / 2**30})
worker = Worker(SharedStorageConnector(config), 16)
num_read = num_lost = 0
for turn in range(rounds):
    # Blocks of its own, and blocks that all three write at about the same time.
    start = 10_000 * number + 8 * turn if turn % 2 else 8 * turn
    for index in range(8):
        block = worker.cache[index].view(-1).view(torch.uint8)
        block.copy_(torch.frombuffer(bytearray(data_of(start + index)), dtype=torch.uint8))
    worker.publish([LocalBlock(index, index, name_of(start + index)) for index in range(8)])
    errors = {result.error for result in worker.results()}
    assert any_error or errors == {None}, errors
    back = max(0, start - 16 * (turn % 5))
    worker.fetch([FetchBlock(BlockRef(index=i, block_hash=name_of(back + i)), 8 + i) for i in range(8)])
    for result in worker.results():
        if result.error is None:
            assert worker.bytes_of(result.block_id) == data_of(back + result.index), "wrong bytes"
            num_read += 1
        else:
            assert any_error or "not in the store" in result.error, result.error
            num_lost += 1
worker.connector.close()
print(num_read, num_lost)
"""


@contextmanager
def three_writers(kv_dir: Path, limit: int, rounds: int, *, any_error: bool) -> Iterator[list[subprocess.Popen[str]]]:
    """Running inside; each compares what it reads with what it has to be."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, *map(str, (kv_dir, number, limit, rounds, int(any_error)))],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2, 3)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def blocks_read(process: subprocess.Popen[str]) -> int:
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    return int(stdout.split()[0])


@pytest.mark.slow
def test_three_processes_below_one_limit_read_right_bytes(kv_dir: Path) -> None:
    limit, rounds, largest = 3_000_000, 400, 0
    with three_writers(kv_dir, limit, rounds, any_error=False) as processes:
        while any(process.poll() is None for process in processes):
            largest = max(largest, bytes_in(kv_dir))
            threading.Event().wait(0.05)
        assert sum(map(blocks_read, processes)) > 3 * rounds * 4
    assert limit / 2 < bytes_in(kv_dir) <= limit
    assert largest <= 1.1 * limit  # files come and go while they are counted; all together they are 1.6 times the limit


@pytest.mark.slow
def test_wrong_bytes_are_never_read_whatever_happens_to_the_files(kv_dir: Path) -> None:
    """Bits flip, files are cut short, and folders vanish under three workers that write, read and evict."""
    rng, num_faults = random.Random(5), 0
    with three_writers(kv_dir, 1_000_000, 300, any_error=True) as processes:
        while any(process.poll() is None for process in processes):
            files = list(kv_dir.rglob("*.run"))
            if files:
                num_faults += harm(rng.choice(files), rng)
            threading.Event().wait(0.02)
        assert sum(map(blocks_read, processes)) > 0
    assert num_faults > 0
    worker = limited(kv_dir, 1_000_000)
    refs = worker.published({number: name_of(10**6 + number) for number in range(16)})
    worker.fetch([FetchBlock(ref, ref.index) for ref in refs])
    assert {result.error for result in worker.results()} == {None}
    worker.connector.close()


def harm(path: Path, rng: random.Random) -> bool:
    """False if the file had gone."""
    what = rng.random()
    try:
        if what < 0.6:
            flip(path, rng.randrange(path.stat().st_size))
        elif what < 0.8:
            os.truncate(path, rng.randrange(path.stat().st_size))
        else:
            shutil.rmtree(rng.choice([path.parent, path.parents[1], path.parents[1] / "blocks"]), ignore_errors=True)
    except (FileNotFoundError, ValueError, IndexError):  # evicted, or cut to nothing before
        return False
    return True
