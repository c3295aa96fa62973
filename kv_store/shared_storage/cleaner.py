"""Brings a store's directory down to a size: what was used least recently goes first, whole runs at a time.

One cleaner at a time, elected by a lease file; nothing breaks if two overlap. Readers that have a run open read it
to its end. A block's name may go between somebody's lookup and fetch: that block fails, and is computed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kv_store.shared_storage.block_files import STALE_TEMP_S, USE_INTERVAL_S
from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.file_lease import FileLease
from kv_store.shared_storage.layout import FULL, StoreLayout, entries, layouts, old_folders, position_in, unlink
from kv_store.shared_storage.run_file import HEADER_BYTES, CorruptRunError, RunTable

log = logging.getLogger(__name__)

_LEASE_NAME = ".cleaner"


@dataclass(slots=True, frozen=True)
class Stored:
    """A unit of eviction: a run with all its names, or names that lead to no file under runs/."""

    paths: tuple[str, ...]
    num_bytes: int
    used: float  # mtime: of its last use, give or take USE_INTERVAL_S
    position: int = 0  # of its first block in the request that it came from
    layout: StoreLayout | None = None  # set for a run: where its blocks' names are


@dataclass(slots=True, frozen=True)
class Usage:
    """What a directory holds."""

    num_bytes: int
    num_runs: int


@dataclass(slots=True, frozen=True)
class PassReport:
    left: Usage
    evicted: Usage
    num_stale_temps: int  # files that killed writers left, deleted


class PassEndedError(Exception):
    """`stop` was called, or another process took this cleaner's lease over and cleans now."""


class StoreCleaner:
    """Works on the files of all layouts in `kv_dir`, those of version 1 included. All passes are made by one thread."""

    def __init__(self, kv_dir: Path, clock: FileClock) -> None:
        self._kv_dir = kv_dir
        self._clock = clock
        self._is_stopped = False
        self._lease = FileLease(kv_dir / _LEASE_NAME, clock)

    def make_pass(self, target: Callable[[int], int], *, with_names: bool) -> PassReport | None:
        """Deletes until `target(bytes in use)` bytes are left. Returns None if another cleaner is at work.

        `with_names` looks through all blocks' names for those whose run is not under runs/: blocks of a host without
        hard links, and what somebody deleted by hand. Raises `OSError` and `PassEndedError`.
        """
        self._clock.set()
        if not self._acquire():
            return None
        try:
            found, num_temp_bytes, num_stale = self._scan(with_names)
            in_use = num_temp_bytes + sum(item.num_bytes for item in found)
            return self._evict(found, in_use, target(in_use), num_stale)
        finally:
            self._lease.release()

    def stop(self) -> None:
        """Ends the pass under way. From any thread."""
        self._is_stopped = True

    def _acquire(self) -> bool:
        try:
            return self._lease.acquire()
        except OSError as error:
            if error.errno not in FULL:
                raise
        # No file can be made, not even an empty one. Several cleaners may do this: each deletes one run.
        if (run := min(self._runs(), key=lambda run: run.used, default=None)) is not None:
            self._delete(run)
        return self._lease.acquire()

    # -------------------------------------------------------------------------------------------- finding

    def _runs(self) -> Iterator[Stored]:
        for layout in layouts(self._kv_dir):
            for entry in entries(layout.runs):
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield Stored((entry.path,), stat.st_size, stat.st_mtime, position_in(entry.name), layout)

    def _scan(self, with_names: bool) -> tuple[list[Stored], int, int]:
        """(what can be evicted, bytes of files being written, how many stale temporary files were deleted)."""
        found: list[Stored] = []
        temp_bytes = num_stale = 0
        temp_folders: list[str] = []
        for layout in layouts(self._kv_dir):
            temp_folders.append(layout.temps)
            names = list(self._names(layout)) if with_names else []  # before the runs, which are there before them
            inodes: set[int] = set()
            for entry, stat in self._files(layout.runs):
                inodes.add(stat.st_ino)
                found.append(Stored((entry.path,), stat.st_size, stat.st_mtime, position_in(entry.name), layout))
            found += _without_run(names, inodes)
        for folder in old_folders(self._kv_dir):
            if os.path.basename(folder) == "tmp":
                temp_folders.append(folder)
            else:
                found += [Stored((entry.path,), stat.st_size, stat.st_mtime) for entry, stat in self._files(folder)]
        for entry, stat in self._files(str(self._kv_dir)):
            if entry.name.startswith((".clock-", ".probe-")) and self._clock.now() - stat.st_mtime > STALE_TEMP_S:
                num_stale += unlink(entry.path)
        for folder in temp_folders:
            for entry, stat in self._files(folder):
                if self._clock.now() - stat.st_mtime > STALE_TEMP_S:
                    num_stale += unlink(entry.path)
                else:
                    temp_bytes += stat.st_size
        return found, temp_bytes, num_stale

    def _names(self, layout: StoreLayout) -> Iterator[tuple[int, str]]:
        for folder in entries(layout.blocks):
            for entry in entries(folder.path):
                self._renew()
                yield entry.inode(), entry.path

    def _files(self, folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for entry in entries(folder):
            self._renew()
            try:
                yield entry, entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue

    # ------------------------------------------------------------------------------------------- evicting

    def _evict(self, found: list[Stored], in_use: int, target: int, num_stale: int) -> PassReport:
        num_bytes = num_evicted = 0
        # Of what was used at about the same time, the ends of prompts go first: nothing follows them.
        found.sort(key=lambda item: (item.used // USE_INTERVAL_S, -item.position, item.used))
        failure: OSError | None = None
        for item in found:
            if in_use - num_bytes <= target:
                break
            self._renew()
            try:
                self._delete(item)
            except OSError as error:  # another user's file; the others can still go
                failure = error
            else:
                num_bytes += item.num_bytes
                num_evicted += 1
        if failure is not None:
            log.warning("cannot evict stored KV", extra={"directory": str(self._kv_dir), "reason": str(failure)})
        left = Usage(in_use - num_bytes, len(found) - num_evicted)
        return PassReport(left, Usage(num_bytes, num_evicted), num_stale)

    def _delete(self, item: Stored) -> None:
        if item.layout is None:
            for path in item.paths:
                unlink(path)
            return
        (run,) = item.paths
        try:
            fd = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            stat = os.fstat(fd)
            try:
                names = RunTable.decode(os.pread(fd, HEADER_BYTES, 0), stat.st_size).block_hashes
            except CorruptRunError:
                names = ()  # readers delete its names as they come across them, and so does a pass with names
            paths = [item.layout.block(name) for name in names]
            _unlink_names(paths, stat.st_ino)
            unlink(run)
            if os.fstat(fd).st_nlink:  # its writer was still linking; without the run it can't any more
                _unlink_names(paths, stat.st_ino)
        finally:
            os.close(fd)

    def _renew(self) -> None:
        if self._is_stopped or not self._lease.renew():
            raise PassEndedError


def _unlink_names(paths: list[str], inode: int) -> None:
    """Deletes the names that lead to the file `inode`. Other names belong to runs that hold the same block."""
    for path in paths:
        try:
            if os.stat(path).st_ino == inode:
                unlink(path)
        except FileNotFoundError:
            continue


def _without_run(names: list[tuple[int, str]], runs: set[int]) -> Iterator[Stored]:
    by_inode: dict[int, list[str]] = {}
    for inode, path in names:
        if inode not in runs:
            by_inode.setdefault(inode, []).append(path)
    for paths in by_inode.values():
        try:
            stat = os.stat(paths[0])
        except FileNotFoundError:
            continue
        yield Stored(tuple(paths), stat.st_size, stat.st_mtime)
