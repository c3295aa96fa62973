from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kv_store.shared_storage.block_files import STALE_TEMP_S, BlockFiles
from kv_store.shared_storage.cleaner import PassEndedError, PassReport, StoreCleaner, Usage
from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.file_lease import STALE_S, FileLease
from kv_store.shared_storage.layout import StoreLayout
from kv_store.shared_storage.run_file import HEADER_BYTES
from tests.kv_store.blocks import SPEC, name_of
from tests.kv_store.stored import files_of, flip, path_of, read, runs_of, write

BLOCK = SPEC.block_bytes
LAYOUT = SPEC.fingerprint()


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir()
    return path


@pytest.fixture
def clock(kv_dir: Path) -> FileClock:
    return FileClock(kv_dir, "test")


@pytest.fixture
def files(kv_dir: Path) -> BlockFiles:
    return files_of(kv_dir)


@pytest.fixture
def cleaner(kv_dir: Path, clock: FileClock) -> StoreCleaner:
    return StoreCleaner(kv_dir, clock)


def clean(cleaner: StoreCleaner, target: int, *, with_names: bool = False) -> PassReport:
    report = cleaner.make_pass(lambda _: target, with_names=with_names)
    assert report is not None
    return report


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def run_of(kv_dir: Path, number: int) -> Path:
    path = path_of(kv_dir, name_of(number))
    return next(run for run in runs_of(kv_dir) if run.samefile(path))


def found(files: BlockFiles, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if files.contains(name_of(number))]


def size_of(num_blocks: int) -> int:
    return HEADER_BYTES + num_blocks * BLOCK


class TestEviction:
    def test_what_was_used_least_recently_goes_first_with_all_its_names(
        self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner
    ) -> None:
        for start in (0, 3, 6):
            write(files, range(start, start + 3))
        for start, seconds in ((0, 1000), (3, 3000), (6, 2000)):
            age(run_of(kv_dir, start), seconds)
        read(files, [4])  # a use of one block is a use of its run
        report = clean(cleaner, 2 * size_of(3))
        assert (report.left, report.evicted) == (Usage(2 * size_of(3), 2), Usage(size_of(3), 1))
        assert found(files, range(9)) == [0, 1, 2, 3, 4, 5]
        clean(cleaner, size_of(3))
        assert found(files, range(9)) == [3, 4, 5]
        assert read(files, [3, 4, 5]) == [None] * 3
        clean(cleaner, 0)
        assert [path for path in kv_dir.rglob("*") if path.is_file()] == []

    def test_below_the_target_nothing_goes(self, files: BlockFiles, cleaner: StoreCleaner) -> None:
        write(files, range(3))
        report = clean(cleaner, size_of(3))
        assert (report.left, report.evicted) == (Usage(size_of(3), 1), Usage(0, 0))

    def test_of_one_prompt_the_end_goes_first(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        for start in (0, 4, 8):
            write(files, range(start, start + 4))
        now = time.time() // 60 * 60 + 1
        for run, second in zip(runs_of(kv_dir), (0, 1, 2), strict=True):
            os.utime(run, (now + second,) * 2)
        clean(cleaner, 2 * size_of(4))
        assert found(files, range(12)) == list(range(8))

    def test_a_name_that_leads_to_another_run_stays(
        self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner
    ) -> None:
        write(files, [0, 1, 2])
        age(run_of(kv_dir, 0), 1000)
        path_of(kv_dir, name_of(1)).unlink()
        write(files, [1])
        clean(cleaner, size_of(1))
        assert found(files, range(3)) == [1]
        assert read(files, [1]) == [None]

    def test_a_reader_reads_on(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        write(files, [0])
        with path_of(kv_dir, name_of(0)).open("rb") as file:
            clean(cleaner, 0)
            assert len(file.read()) == size_of(1)

    def test_a_run_evicted_while_it_gets_its_names_leaves_none(
        self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cleaner has looked for the names, and before it deletes the run a name comes to be."""
        write(files, [0, 1])
        (run,) = runs_of(kv_dir)
        name = path_of(kv_dir, name_of(1))
        name.unlink()
        unlink = os.unlink

        def late(path: str) -> None:
            if path == str(run):
                os.link(run, name)
            unlink(path)

        monkeypatch.setattr(os, "unlink", late)
        clean(cleaner, 0)
        assert found(files, [0, 1]) == []

    def test_a_writer_whose_run_is_evicted_at_once_writes_it_again(
        self, files: BlockFiles, cleaner: StoreCleaner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link, passes = os.link, iter([False, True])

        def evicted(source: str, target: str) -> None:
            if next(passes, False):
                clean(cleaner, 0)
            link(source, target)

        monkeypatch.setattr(os, "link", evicted)
        assert write(files, [0, 1, 2]) == [BLOCK] * 3
        assert read(files, [0, 1, 2]) == [None] * 3

    def test_a_run_with_a_corrupt_header(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        write(files, [0, 1])
        flip(runs_of(kv_dir)[0], 100)
        clean(cleaner, 0)
        assert runs_of(kv_dir) == []
        report = clean(cleaner, 0, with_names=True)
        assert report.evicted == Usage(size_of(2), 1)
        assert found(files, [0, 1]) == []

    def test_blocks_of_a_host_without_hard_links(
        self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(files, [0, 1])

        def refuse(source: str, target: str) -> None:
            raise OSError(errno.EPERM, "no")

        monkeypatch.setattr(os, "link", refuse)
        write(files, [2, 3])
        age(path_of(kv_dir, name_of(2)), 1000)
        report = clean(cleaner, size_of(2) + size_of(1), with_names=True)
        assert (report.left.num_runs, report.evicted.num_runs) == (2, 1)
        assert found(files, range(4)) == [0, 1, 3]

    def test_all_layouts_count_and_old_files_go(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        write(files, [0])
        other = files_of(kv_dir, replace(SPEC, model_id="other"))
        write(other, [0])
        old = kv_dir / LAYOUT / "ab" / f"{'ab' * 16}.kv"
        old.parent.mkdir(parents=True)
        old.write_bytes(bytes(1000))
        age(old, 86400)
        foreign = [kv_dir / path for path in ("notes.txt", "docs/a.kv", f"v2-{LAYOUT}/readme", "ab/x")]
        for path in foreign:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(1000))
        report = clean(cleaner, 2 * size_of(1))
        assert report.evicted == Usage(1000, 1)
        assert not old.exists()
        clean(cleaner, 0, with_names=True)
        assert found(files, [0]) == found(other, [0]) == []
        assert all(path.exists() for path in foreign)

    def test_what_killed_writers_left_goes(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        write(files, [0])
        old_temps = kv_dir / LAYOUT / "tmp"
        old_temps.mkdir(parents=True)
        for folder in (old_temps, Path(files.layout.temps)):
            for name, seconds in (("young", 10.0), ("stale", 2 * STALE_TEMP_S)):
                (folder / name).write_bytes(bytes(500))
                age(folder / name, seconds)
        probe = kv_dir / ".clock-killed"
        probe.touch()
        age(probe, 2 * STALE_TEMP_S)
        report = clean(cleaner, 10**9)
        assert report.num_stale_temps == 3
        assert not probe.exists()
        assert report.left.num_bytes == size_of(1) + 2 * 500
        assert (old_temps / "young").exists()
        assert not (old_temps / "stale").exists()

    def test_a_directory_that_goes_meanwhile(
        self, files: BlockFiles, cleaner: StoreCleaner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(4):
            write(files, [number])
        real = StoreLayout.block
        monkeypatch.setattr(StoreLayout, "block", lambda self, name: _wiped(self, real(self, name)))
        assert clean(cleaner, 0).left.num_bytes == 0
        assert found(files, range(4)) == []


def _wiped(layout: StoreLayout, path: str) -> str:
    for folder in (layout.runs, layout.blocks):
        shutil.rmtree(folder, ignore_errors=True)
    return path


class TestLease:
    def leases(self, kv_dir: Path, clock: FileClock) -> tuple[FileLease, FileLease]:
        return FileLease(kv_dir / "lease", clock), FileLease(kv_dir / "lease", clock)

    def test_one_at_a_time(self, kv_dir: Path, clock: FileClock) -> None:
        first, second = self.leases(kv_dir, clock)
        assert first.acquire()
        assert not second.acquire()
        second.release()  # not its own: nothing happens
        assert not second.acquire()
        first.release()
        assert second.acquire()
        assert not first.acquire()

    def test_a_dead_holders_lease_is_taken_and_the_holder_finds_out(self, kv_dir: Path, clock: FileClock) -> None:
        first, second = self.leases(kv_dir, clock)
        assert first.acquire()
        age(kv_dir / "lease", STALE_S + 5)
        assert second.acquire()
        first._renewed = second._renewed = 0.0
        assert not first.renew()
        assert second.renew()
        first.release()
        assert (kv_dir / "lease").exists()

    def test_renewing_keeps_it(self, kv_dir: Path, clock: FileClock) -> None:
        first, second = self.leases(kv_dir, clock)
        assert first.acquire()
        age(kv_dir / "lease", STALE_S + 5)
        first._renewed = 0.0
        assert first.renew()
        assert not second.acquire()

    def test_hosts_clocks_do_not_matter(self, kv_dir: Path, clock: FileClock, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = self.leases(kv_dir, clock)
        assert first.acquire()
        now = time.time() + 7200
        monkeypatch.setattr(time, "time", lambda: now)
        clock.set()
        assert not second.acquire()
        assert abs(clock.now() - (kv_dir / "lease").stat().st_mtime) < 600

    def test_a_pass_that_another_makes(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        write(files, [0])
        lease = kv_dir / ".cleaner"
        lease.write_bytes(b"another")
        assert cleaner.make_pass(lambda _: 0, with_names=True) is None
        assert found(files, [0]) == [0]
        age(lease, STALE_S + 5)
        assert clean(cleaner, 0).evicted.num_runs == 1
        assert not lease.exists()

    def test_a_pass_ends_when_its_lease_is_taken(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        for number in range(3):
            write(files, [number])

        def taken(in_use: int) -> int:
            (kv_dir / ".cleaner").unlink()
            (kv_dir / ".cleaner").write_bytes(b"another")
            cleaner._lease._renewed = 0.0
            return 0

        with pytest.raises(PassEndedError):
            cleaner.make_pass(taken, with_names=False)
        assert found(files, range(3)) == [0, 1, 2]
        assert (kv_dir / ".cleaner").read_bytes() == b"another"

    def test_a_killed_cleaner(self, files: BlockFiles, kv_dir: Path, cleaner: StoreCleaner) -> None:
        """Killed in mid-pass: the next one takes over, and finds what is left."""
        for number in range(4):
            write(files, [number])
        script = f"""
import os, signal
from pathlib import Path
from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.cleaner import StoreCleaner
unlink, calls = os.unlink, []
def killed(path):
    unlink(path)
    calls.append(path)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
path = Path({str(kv_dir)!r})
cleaner = StoreCleaner(path, FileClock(path, "dead"))
cleaner._clock.set = lambda: None
os.unlink = killed
cleaner.make_pass(lambda _: 0, with_names=False)
"""
        subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], timeout=300, check=False)
        left = found(files, range(4))
        assert 0 < len(left) < 4
        assert read(files, left) == [None] * len(left)
        assert cleaner.make_pass(lambda _: 0, with_names=False) is None
        age(kv_dir / ".cleaner", STALE_S + 5)
        assert clean(cleaner, 0).left == Usage(0, 0)
        assert found(files, range(4)) == []
