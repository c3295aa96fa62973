from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from kv_store.shared_storage.block_files import USE_INTERVAL_S, BlockFiles
from kv_store.shared_storage.run_file import HEADER_BYTES, MAX_BLOCKS, is_run_size
from tests.kv_store.blocks import SPEC, name_of
from tests.kv_store.stored import files_of, flip, path_of, read, runs_of, write

REPOSITORY = Path(__file__).parents[2]
BLOCK = SPEC.block_bytes


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def files(kv_dir: Path) -> BlockFiles:
    return files_of(kv_dir)


def inode_of(kv_dir: Path, number: int) -> int:
    return path_of(kv_dir, name_of(number)).stat().st_ino


def refuse_links(monkeypatch: pytest.MonkeyPatch, number: int, *, after: int = 0) -> None:
    """The file system has no hard links, or no more than `after` of them."""
    link, calls = os.link, [0]

    def refuse(source: str, target: str) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(number, os.strerror(number))
        link(source, target)

    monkeypatch.setattr(os, "link", refuse)


class TestRuns:
    def test_blocks_written_together_are_one_file(self, files: BlockFiles, kv_dir: Path) -> None:
        assert write(files, range(5)) == [BLOCK] * 5
        (run,) = runs_of(kv_dir)
        assert run.name.startswith("000000-")
        assert run.stat().st_size == HEADER_BYTES + 5 * BLOCK
        assert {inode_of(kv_dir, number) for number in range(5)} == {run.stat().st_ino}
        assert list(Path(files.layout.temps).iterdir()) == []

    def test_only_what_is_missing_is_written(self, files: BlockFiles, kv_dir: Path) -> None:
        write(files, [1, 2])
        assert write(files, [0, 1, 2, 3]) == [BLOCK, 0, 0, BLOCK]
        assert inode_of(kv_dir, 0) == inode_of(kv_dir, 3) != inode_of(kv_dir, 1)
        assert write(files, [0, 1, 2, 3]) == [0] * 4
        assert len(runs_of(kv_dir)) == 2

    @pytest.mark.parametrize("wanted", [[0, 1, 2, 3, 4], [3], [1, 2], [4, 0, 2, 1], [2, 2], [5, 1, 6], [2, 3, 7, 8, 4]])
    def test_any_choice_of_blocks_is_read(self, files: BlockFiles, wanted: list[int]) -> None:
        write(files, range(5))
        write(files, [7, 8])
        errors = read(files, wanted)
        assert [bool(error) for error in errors] == [number in (5, 6) for number in wanted]

    def test_more_blocks_than_a_header_has_room_for(self, files: BlockFiles, kv_dir: Path) -> None:
        numbers = range(MAX_BLOCKS + 3)
        assert write(files, numbers) == [BLOCK] * len(numbers)
        assert [run.stat().st_size for run in runs_of(kv_dir)] == [
            HEADER_BYTES + MAX_BLOCKS * BLOCK,
            HEADER_BYTES + 3 * BLOCK,
        ]
        assert read(files, numbers) == [None] * len(numbers)

    def test_sizes_that_runs_have(self) -> None:
        good = [HEADER_BYTES + n * BLOCK for n in (1, 2, MAX_BLOCKS)]
        assert all(is_run_size(size, BLOCK) for size in good)
        bad = [0, 1, HEADER_BYTES, *(size - 1 for size in good), *(size + 1 for size in good)]
        assert not any(is_run_size(size, BLOCK) for size in [*bad, HEADER_BYTES + (MAX_BLOCKS + 1) * BLOCK])

    def test_a_use_is_noted_once_in_a_while(self, files: BlockFiles, kv_dir: Path) -> None:
        write(files, [1, 2])
        (run,) = runs_of(kv_dir)

        def age_after(use: Callable[[], object], age_s: float) -> float:
            os.utime(run, (time.time() - age_s,) * 2)
            use()
            return time.time() - run.stat().st_mtime

        for use in (lambda: read(files, [2]), lambda: write(files, [1]), lambda: files.touch([name_of(2), name_of(9)])):
            assert age_after(use, USE_INTERVAL_S * 10) < USE_INTERVAL_S
            assert age_after(use, USE_INTERVAL_S / 2) >= USE_INTERVAL_S / 2
        assert age_after(lambda: files.contains(name_of(1)), USE_INTERVAL_S * 10) >= USE_INTERVAL_S


class TestCorruption:
    @pytest.mark.parametrize("number", range(5))
    @pytest.mark.parametrize("byte", [0, BLOCK - 1])
    def test_a_corrupt_block_takes_no_other_with_it(
        self, files: BlockFiles, kv_dir: Path, number: int, byte: int
    ) -> None:
        write(files, range(5))
        flip(runs_of(kv_dir)[0], HEADER_BYTES + number * BLOCK + byte)
        errors = read(files, range(5))
        assert [bool(error) for error in errors] == [other == number for other in range(5)]
        assert "its checksum differs" in (errors[number] or "")
        assert [files.contains(name_of(other)) for other in range(5)] == [other != number for other in range(5)]
        assert [bool(error) for error in read(files, range(5))] == [other == number for other in range(5)]
        assert write(files, range(5)) == [BLOCK if other == number else 0 for other in range(5)]
        assert read(files, range(5)) == [None] * 5

    @pytest.mark.parametrize("offset", [0, 8, 16, 20, 24, 32, 48, 64, 1000, HEADER_BYTES - 1])
    def test_a_corrupt_header_or_table_costs_the_run(self, files: BlockFiles, kv_dir: Path, offset: int) -> None:
        write(files, range(3))
        write(files, [3])
        flip(runs_of(kv_dir)[0], offset)
        errors = read(files, range(4))
        assert all("corrupt" in (error or "") for error in errors[:3])
        assert errors[3] is None
        assert not any(files.contains(name_of(number)) for number in range(3))
        assert len(runs_of(kv_dir)) == 1
        assert write(files, range(4)) == [BLOCK, BLOCK, BLOCK, 0]
        assert read(files, range(4)) == [None] * 4

    @pytest.mark.parametrize(
        "size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + BLOCK, HEADER_BYTES + 3 * BLOCK]
    )
    def test_a_file_of_the_wrong_size(self, files: BlockFiles, kv_dir: Path, size: int) -> None:
        write(files, [1, 2])
        os.truncate(runs_of(kv_dir)[0], size)
        errors = read(files, [1, 2])
        assert all(f"{size} bytes" in (error or "") for error in errors)
        assert runs_of(kv_dir) == []
        assert write(files, [1, 2]) == [BLOCK] * 2
        assert read(files, [1, 2]) == [None] * 2

    @pytest.mark.parametrize("size", [0, HEADER_BYTES, HEADER_BYTES + 1])
    def test_a_truncated_file_is_no_hit_and_is_written_over(self, files: BlockFiles, kv_dir: Path, size: int) -> None:
        write(files, [1, 2])
        os.truncate(runs_of(kv_dir)[0], size)
        assert not files.contains(name_of(1))
        assert write(files, [1, 2]) == [BLOCK] * 2
        assert read(files, [1, 2]) == [None] * 2

    def test_a_whole_run_of_other_blocks_under_this_name(self, files: BlockFiles, kv_dir: Path) -> None:
        write(files, [1])
        write(files, [2])
        path = path_of(kv_dir, name_of(1))
        path.unlink()
        shutil.copy(path_of(kv_dir, name_of(2)), path)
        (error,) = read(files, [1])
        assert "other blocks" in (error or "")
        assert read(files, [2]) == [None]
        assert write(files, [1]) == [BLOCK]

    def test_a_run_of_another_layout(self, files: BlockFiles, kv_dir: Path) -> None:
        write(files, [1])
        data = bytearray(runs_of(kv_dir)[0].read_bytes())
        data[32:48] = b"another layout!!"
        struct.pack_into("<Q", data, 8, xxhash.xxh3_64_intdigest(bytes(data[16:HEADER_BYTES])))
        runs_of(kv_dir)[0].write_bytes(data)
        (error,) = read(files, [1])
        assert "another layout" in (error or "")

    def test_a_bad_sector_costs_one_block(self, files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        write(files, range(4))
        bad, preadv = HEADER_BYTES + 2 * BLOCK, os.preadv

        def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset <= bad < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", failing)
        errors = read(files, range(4))
        assert [bool(error) for error in errors] == [False, False, True, False]
        assert "Input/output error" in (errors[2] or "")

    def test_short_reads_are_carried_on(self, files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        write(files, range(4))
        preadv = os.preadv
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)
        )
        assert read(files, range(4)) == [None] * 4


class TestForgetting:
    def test_a_run_goes_with_its_last_name(self, files: BlockFiles, kv_dir: Path) -> None:
        write(files, [1, 2, 3])
        write(files, [4])
        assert files.forget([name_of(1), name_of(3), name_of(9)]) == {name_of(1), name_of(3)}
        assert len(runs_of(kv_dir)) == 2
        assert read(files, [2, 4]) == [None] * 2
        assert files.forget([name_of(2)]) == {name_of(2)}
        assert [run.stat().st_ino for run in runs_of(kv_dir)] == [inode_of(kv_dir, 4)]
        assert write(files, [1, 2, 3]) == [BLOCK] * 3

    def test_no_other_run_is_looked_at(self, files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A store may hold a hundred thousand runs, and a hint is for one prompt."""
        write(files, range(MAX_BLOCKS + 1))  # one run has its header full
        write(files, [1000])

        def scandir(path: str) -> None:
            raise AssertionError(f"looks through {path}")

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scandir)
            assert len(files.forget(name_of(number) for number in range(MAX_BLOCKS + 1))) == MAX_BLOCKS + 1
        assert [run.stat().st_ino for run in runs_of(kv_dir)] == [inode_of(kv_dir, 1000)]

    def test_a_run_that_does_not_say_its_name_is_looked_for(self, files: BlockFiles, kv_dir: Path) -> None:
        """Runs of earlier releases have zeros there."""
        write(files, [1, 2])
        (run,) = runs_of(kv_dir)
        data = bytearray(run.read_bytes())
        data[HEADER_BYTES - 16 : HEADER_BYTES] = bytes(16)
        struct.pack_into("<Q", data, 8, xxhash.xxh3_64_intdigest(bytes(data[16:HEADER_BYTES])))
        run.write_bytes(data)
        assert read(files, [1, 2]) == [None] * 2
        write(files, [3])
        files.forget([name_of(1)])
        assert read(files, [2, 3]) == [None] * 2
        files.forget([name_of(2)])
        assert [left.stat().st_ino for left in runs_of(kv_dir)] == [inode_of(kv_dir, 3)]

    @pytest.mark.parametrize("with_name", [True, False])
    def test_two_that_forget_one_run_at_the_same_moment_leave_no_file(
        self, files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch, with_name: bool
    ) -> None:
        """Each has seen the other's name when it deletes its own."""
        write(files, [1, 2])
        if not with_name:
            flip(runs_of(kv_dir)[0], 0)
        unlink, others = os.unlink, iter([2])

        def meanwhile(path: str) -> None:
            for number in others:
                files.forget([name_of(number)])
            unlink(path)

        monkeypatch.setattr(os, "unlink", meanwhile)
        assert files.forget([name_of(1)]) == {name_of(1)}
        assert runs_of(kv_dir) == []

    def test_a_name_that_a_reader_has_open_on_nfs(
        self, files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It goes on under another name until it is closed, which is no block's."""
        write(files, [1, 2, 3])
        unlink, opened = os.unlink, str(path_of(kv_dir, name_of(2)))

        def rename_open(path: str) -> None:
            if path == opened:
                os.rename(path, f"{path}.nfs0001")
            else:
                unlink(path)

        monkeypatch.setattr(os, "unlink", rename_open)
        files.forget([name_of(1), name_of(2)])
        assert len(runs_of(kv_dir)) == 1
        files.forget([name_of(3)])  # the renamed one counts: nobody can tell it from another block's
        assert len(runs_of(kv_dir)) == 1
        write(files, [4, 5])
        opened = str(path_of(kv_dir, name_of(5)))
        files.forget([name_of(4), name_of(5)])
        assert len(runs_of(kv_dir)) == 1

    def test_a_run_whose_writer_still_names_blocks_stays(
        self, files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else no limit would count its bytes, and nobody would evict it."""
        write(files, [1, 2])
        (run,) = runs_of(kv_dir)
        last = path_of(kv_dir, name_of(2))
        last.unlink()
        unlink = os.unlink

        def meanwhile(path: str) -> None:
            unlink(path)
            if not last.exists():
                os.link(run, last)

        monkeypatch.setattr(os, "unlink", meanwhile)
        files.forget([name_of(1)])
        assert runs_of(kv_dir) == [run]
        assert read(files, [2]) == [None]

    def test_a_name_that_leads_elsewhere_meanwhile(
        self, files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(files, [1])
        (old,) = runs_of(kv_dir)
        stat, path, others = os.stat, str(path_of(kv_dir, name_of(1))), iter([1])

        def replace_after(asked: str, *args: object, **kwargs: object) -> os.stat_result:
            result = stat(asked, *args, **kwargs)  # type: ignore[arg-type]
            for number in others if asked == path else ():
                os.unlink(path)
                write(files, [number])
                os.unlink(old)
            return result

        monkeypatch.setattr(os, "stat", replace_after)
        assert files.forget([name_of(1)]) == {name_of(1)}
        assert list(others) == []
        assert runs_of(kv_dir) == []

    def test_a_file_system_without_hard_links(
        self, files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse_links(monkeypatch, errno.EPERM)
        write(files, [1, 2])
        assert files.forget([name_of(1)]) == {name_of(1)}
        assert [files.contains(name_of(number)) for number in (1, 2)] == [False, True]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get)
@pytest.mark.parametrize("num_made", [0, 2])
def test_a_file_system_without_hard_links(
    files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int, num_made: int
) -> None:
    write(files, [0])
    refuse_links(monkeypatch, number, after=num_made)
    assert write(files, range(5)) == [0] + [BLOCK] * 4
    assert not files.has_links
    assert len(runs_of(kv_dir)) == (2 if num_made else 1)
    assert write(files, [5, 6]) == [BLOCK] * 2
    assert len({inode_of(kv_dir, number) for number in range(1 + num_made, 7)}) == 6 - num_made
    assert read(files, range(7)) == [None] * 7
    assert list(Path(files.layout.temps).iterdir()) == []
    # Others, with links or without, read the same files.
    assert read(files_of(kv_dir), range(7)) == [None] * 7


def test_a_failing_link_fails_its_block_and_those_after_it(
    files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files, [0])
    refuse_links(monkeypatch, errno.ENOSPC, after=2)
    first, second, *others = write(files, [1, 2, 3, 4])
    assert (first, second) == (BLOCK, BLOCK)
    assert all("No space left" in str(other) for other in others)
    assert read(files, [0, 1, 2]) == [None] * 3
    assert not files.contains(name_of(3))
    assert write(files, [5])[0] != BLOCK
    assert len(runs_of(kv_dir)) == 2  # that of block 5 has no name, so it is gone
    monkeypatch.undo()
    assert write(files, range(6)) == [0, 0, 0, BLOCK, BLOCK, BLOCK]


def run_writer(kv_dir: Path, body: str) -> subprocess.Popen[str]:
    """Runs `body` in a process of its own, with what is named below."""
    script = f"""
import os, resource, signal, sys
from pathlib import Path
from tests.kv_store.blocks import SPEC, name_of
from tests.kv_store.stored import files_of, read, write
files = files_of(Path({str(kv_dir)!r}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{body}
"""
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcome_of(process: subprocess.Popen[str]) -> list[str]:
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return stdout.splitlines()


def test_a_full_disk_fails_the_blocks_and_leaves_nothing(files: BlockFiles, kv_dir: Path) -> None:
    """A file size limit ends the write half-way, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + BLOCK, hard))
    try:
        outcomes = write(files, [1, 2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(str(outcome).startswith("cannot write ") for outcome in outcomes)
    assert all(str(outcome).endswith("File too large") for outcome in outcomes)
    assert not files.contains(name_of(1))
    assert runs_of(kv_dir) == list(Path(files.layout.temps).iterdir()) == []
    assert write(files, [1, 2]) == [BLOCK] * 2


@pytest.mark.slow
def test_a_writer_killed_in_mid_write_leaves_nothing_readable(files: BlockFiles, kv_dir: Path) -> None:
    """The kernel kills the writer inside its write, with half of the run in the file."""
    process = run_writer(
        kv_dir,
        """
write(files, [1])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
write(files, [2, 3])
""",
    )
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGXFSZ
    (left,) = Path(files.layout.temps).iterdir()
    assert left.stat().st_size == 5000
    assert read(files, [1]) == [None]
    assert not files.contains(name_of(2))
    assert all("not in the store" in (error or "") for error in read(files, [2, 3]))
    assert files.delete_stale_temps() == 0
    assert files.delete_stale_temps(older_than_s=-1.0) == 1
    assert write(files, [2, 3]) == [BLOCK] * 2


@pytest.mark.parametrize("call", ["os.replace", pytest.param("os.link", marks=pytest.mark.slow)])
def test_a_writer_killed_between_two_steps_leaves_fewer_names(files: BlockFiles, kv_dir: Path, call: str) -> None:
    process = run_writer(
        kv_dir,
        f"""
write(files, [1])
calls, real = [], {call}
def killed(*args):
    real(*args)
    calls.append(args)
    if len(calls) == {2 if call == "os.link" else 1}:
        os.kill(os.getpid(), signal.SIGKILL)
{call} = killed
write(files, [2, 3, 4, 5])
""",
    )
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    named = [1, 2, 3] if call == "os.link" else [1]
    assert [number for number in range(6) if files.contains(name_of(number))] == named
    assert read(files, named) == [None] * len(named)
    assert write(files, [2, 3, 4, 5]) == [0 if number in named else BLOCK for number in (2, 3, 4, 5)]
    assert read(files, range(1, 6)) == [None] * 5


@pytest.mark.slow
def test_writers_killed_at_any_time(files: BlockFiles, kv_dir: Path) -> None:
    """Whatever the moment, what can be found can be read, and what can't be found can be written."""
    for number in range(8):
        process = run_writer(
            kv_dir,
            f"""
for start in range({number} * 10_000, 10**9, 8):
    print(start, flush=True)
    write(files, range(start, start + 8))
""",
        )
        assert process.stdout is not None
        for _ in range(2 + 3 * number):
            process.stdout.readline()
        process.kill()
        process.communicate(timeout=300)
        start = number * 10_000
        found: list[int] = []
        block = start
        while files.contains(name_of(block)):
            found.append(block)
            block += 1
        assert read(files, found) == [None] * len(found)
        beyond = range(max(start, block - 8), block + 8)
        assert all(isinstance(outcome, int) for outcome in write(files, beyond))
        assert read(files, beyond) == [None] * len(beyond)


@pytest.mark.slow
def test_many_processes_write_the_same_blocks_at_once(files: BlockFiles, kv_dir: Path) -> None:
    body = """
for start in range(0, 64, 8):
    numbers = range(start, start + 8)
    assert all(type(outcome) is int for outcome in write(files, numbers))
    assert read(files, numbers) == [None] * 8
"""
    processes = [run_writer(kv_dir, body) for _ in range(5)]
    for process in processes:
        assert outcome_of(process) == []
    assert read(files, range(64)) == [None] * 64
    # Every run has the names that lead to it; of two that hold the same, the later one may have lost all, and is gone.
    assert sum(run.stat().st_nlink - 1 for run in runs_of(kv_dir)) == 64
    assert all(run.stat().st_nlink > 1 for run in runs_of(kv_dir))
    assert list(Path(files.layout.temps).iterdir()) == []


def test_a_directory_wiped_in_mid_write(files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link
    wipes = iter([True, False, True])

    def wiped(source: str, target: str) -> None:
        if next(wipes, False):
            shutil.rmtree(kv_dir)
        link(source, target)

    monkeypatch.setattr(os, "link", wiped)
    assert write(files, [1, 2, 3]) == [BLOCK] * 3
    assert read(files, [1, 2, 3]) == [None] * 3


def test_a_directory_that_is_wiped_all_the_time(
    files: BlockFiles, kv_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def wiped(source: str, target: str) -> None:
        shutil.rmtree(kv_dir)
        link(source, target)

    monkeypatch.setattr(os, "link", wiped)
    assert all("keeps vanishing" in str(outcome) for outcome in write(files, [1, 2]))
