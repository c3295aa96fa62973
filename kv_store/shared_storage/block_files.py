"""Blocks in a directory that any number of workers share, on any number of hosts, without a coordinator.

A run file holds consecutive blocks of a prompt, and each block's name is a hard link to it. So a lookup is one stat per
block, and a fetch opens the first block's name and finds the blocks after it in the same file.

    write  writing/X  ->  rename to runs/X.run  ->  link blocks/ab/abcd.kv, blocks/cd/cdef.kv, …

Each step leaves a state that readers can use: a writer killed in mid-write leaves a temporary file, one killed while it
links leaves fewer names. The file under runs/ is what the size limit counts and deletes. If the file system has no
hard links, each block is a run of its own, under the block's name only.

Files are not synced to disk: this is a cache, and what a power cut leaves behind fails its checksum.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from common.errors import StartupError, TransferError
from common.types import KVCacheSpec
from kv_store.shared_storage.file_clock import FileClock
from kv_store.shared_storage.layout import FULL, StoreLayout, entries, layout_name, unlink, writer_id
from kv_store.shared_storage.run_file import (
    HEADER_BYTES,
    MAX_BLOCKS,
    CorruptRunError,
    RunName,
    RunTable,
    is_run_size,
    read_blocks,
    write_new_file,
)

log = logging.getLogger(__name__)

STALE_TEMP_S = 3600.0  # a temporary file this old has lost its writer, whatever host that ran on
USE_INTERVAL_S = 60.0  # a use is noted (in the run's mtime, which eviction goes by) at most this often
_MAX_ATTEMPTS = 3  # of one write, while somebody deletes directories
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class FullDiskError(TransferError):
    """There is no room for a block."""


@dataclass(slots=True, frozen=True)
class BlockData:
    block_hash: bytes
    index: int  # in its request's block table
    data: memoryview  # block_bytes


@dataclass(slots=True)
class _NamedRun:
    """A run some of whose names are deleted."""

    path: str | None  # under runs/; None if the run does not say, as those of earlier releases, or cannot be read
    block_hashes: tuple[bytes, ...]
    num_links: int  # that are left, the one under runs/ included


def prepare_directory(kv_dir: str) -> Path:
    """Makes `kv_dir` if its parent exists, and tries to write there. Raises `StartupError`; not if its disk is
    full, which workers that run already live with too: they read what is there, and evict."""
    if not kv_dir:
        raise StartupError("kv_dir: shared_storage needs a directory that all workers share")
    path = Path(kv_dir)
    probe = path / f".probe-{writer_id()}"
    try:
        path.mkdir(exist_ok=True)
        try:
            probe.write_bytes(b"baton")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in FULL or not path.is_dir():
            raise StartupError(f"kv_dir: cannot write to {kv_dir!r}: {error.strerror or error}") from error
        log.warning("the store's disk is full", extra={"directory": kv_dir, "reason": error.strerror})
    return path


class BlockFiles:
    """Reads and writes blocks of one layout. Every method does I/O; any thread may call any of them."""

    def __init__(self, kv_dir: Path, spec: KVCacheSpec, clock: FileClock) -> None:
        self.layout = StoreLayout.of(kv_dir, spec)
        self.has_links = True  # until the file system says otherwise
        self._clock = clock
        self._digest = hashlib.blake2b(layout_name(spec).encode(), digest_size=16).digest()
        self._block_bytes = spec.block_bytes
        self._counter = itertools.count()
        self._writer = writer_id()

    def contains(self, block_hash: bytes) -> bool:
        """One stat: there is a file of a size that runs have. Its content is checked by `read`."""
        return self._mtime(block_hash) is not None

    def read(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[TransferError | None]:
        """Reads blocks, given as hash and destination, and verifies them. For each: None, or why it could not be read;
        its destination is undefined then.

        A file with wrong content is deleted, so that the block can be written again.
        """
        outcomes: list[TransferError | None] = []
        while len(outcomes) < len(wanted):
            outcomes += self._read_run(wanted[len(outcomes) :])
        return outcomes

    def are_used(self, block_hashes: Iterable[bytes]) -> bool:
        """Whether all these blocks are there. Notes that those which are there are in use."""
        return all(map(self._is_used, block_hashes))

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Notes that those which are there are in use."""
        for block_hash in block_hashes:
            self._is_used(block_hash)

    def forget(self, block_hashes: Iterable[bytes]) -> set[bytes]:
        """Deletes the names of these blocks, and runs that no other block needs. Returns the blocks that were there.
        Raises `OSError`."""
        found: set[bytes] = set()
        runs: dict[int, _NamedRun] = {}  # by inode
        for block_hash in block_hashes:
            path = self.layout.block(block_hash)
            try:
                stat = os.stat(path)
                inode = stat.st_ino
                if stat.st_nlink > 1 and inode not in runs:
                    # The name may lead to another run by now.
                    inode, run = self._run_of(path, stat)
                    runs.setdefault(inode, run)
            except FileNotFoundError:
                continue
            found.add(block_hash)
            if unlink(path) and inode in runs:
                runs[inode].num_links -= 1
        # Counted only after the deletions: if several workers delete names of one run, each sees the names that are
        # left after its own deletions, and the last worker sees none.
        unknown = set()
        for inode, run in runs.items():
            if run.path is None:
                unknown.add(inode)
            else:
                self._delete_unnamed(run.path, inode, run)
        for entry in entries(self.layout.runs) if unknown else ():
            if entry.inode() in unknown:
                self._delete_unnamed(entry.path, entry.inode(), runs[entry.inode()])
        return found

    def write(self, blocks: Sequence[BlockData]) -> list[int | TransferError]:
        """Stores blocks, in the order of a prompt. For each: the bytes written, 0 if it was there already, or why
        it could not be written (`FullDiskError` if that is the reason)."""
        outcomes: list[int | TransferError] = [0] * len(blocks)
        missing = [position for position, block in enumerate(blocks) if not self._is_used(block.block_hash)]
        for start in range(0, len(missing), MAX_BLOCKS):
            part = missing[start : start + MAX_BLOCKS]
            for position, outcome in zip(part, self._write_run([blocks[i] for i in part]), strict=True):
                outcomes[position] = outcome
        return outcomes

    def delete_stale_temps(self, older_than_s: float = STALE_TEMP_S) -> int:
        """Deletes what killed writers left behind; returns how many files. Raises `OSError`."""
        num_deleted = 0
        for entry in entries(self.layout.temps):
            try:
                if self._clock.now() - entry.stat().st_mtime > older_than_s:
                    num_deleted += unlink(entry.path)
            except FileNotFoundError:  # another worker cleans up at the same time
                continue
        return num_deleted

    # -------------------------------------------------------------------------------------------- writing

    def _write_run(self, blocks: Sequence[BlockData]) -> list[int | TransferError]:
        checksums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
        outcomes: list[int | TransferError] = []
        if self.has_links:
            run, failure = "", None
            for _ in range(_MAX_ATTEMPTS):
                name = RunName.new(blocks[0].index)
                run = self.layout.run(name)
                try:
                    self._place(run, [self._table(blocks, checksums, name), *(block.data for block in blocks)])
                except OSError as error:
                    return [self._failure(error)] * len(blocks)
                outcomes, failure = self._name_blocks(run, blocks)
                if not any(outcomes):
                    unlink(run)  # no name leads to it: others wrote all of it meanwhile, or it failed
                if not isinstance(failure, FileNotFoundError):
                    break  # otherwise the run itself was gone: somebody wiped the directory, or evicted it at once
            if failure is not None and failure.errno in _NO_LINKS:
                self.has_links = False
                log.warning(
                    "no hard links here: each KV block becomes a file of its own",
                    extra={"directory": self.layout.root, "reason": failure.strerror},
                )
            elif failure is not None:
                outcomes += [self._failure(failure)] * (len(blocks) - len(outcomes))
        for block, checksum in list(zip(blocks, checksums, strict=True))[len(outcomes) :]:
            outcomes.append(self._write_alone(block, checksum))
        return outcomes

    def _write_alone(self, block: BlockData, checksum: int) -> int | TransferError:
        path = self.layout.block(block.block_hash)
        try:
            self._place(path, [self._table([block], [checksum]), block.data])
        except OSError as error:
            return self._failure(error)
        return self._block_bytes

    def _table(self, blocks: Sequence[BlockData], checksums: Sequence[int], name: RunName | None = None) -> bytes:
        hashes = tuple(block.block_hash for block in blocks)
        return RunTable(self._block_bytes, self._digest, hashes, tuple(checksums), name).encode()

    def _place(self, path: str, parts: Sequence[memoryview | bytes]) -> None:
        """Makes the file `path`, whole or not at all. Raises `OSError`."""
        for _ in range(_MAX_ATTEMPTS):
            temp = f"{self.layout.temps}/{self._writer}-{next(self._counter)}"
            try:
                write_new_file(temp, parts)
                os.replace(temp, path)
            except FileNotFoundError:
                # A new store, a new fan-out folder, or a directory that somebody wiped.
                unlink(temp)
                _make_folder(self.layout.temps)
                _make_folder(os.path.dirname(path))
            except OSError:
                unlink(temp)
                raise
            else:
                return
        raise FileNotFoundError(errno.ENOENT, "its directory keeps vanishing")

    def _name_blocks(self, run: str, blocks: Sequence[BlockData]) -> tuple[list[int | TransferError], OSError | None]:
        """Links the blocks' names to `run`. Returns the bytes that are new for each block until one can't be linked,
        and why that one can't."""
        num_bytes: list[int | TransferError] = []
        for block in blocks:
            try:
                num_bytes.append(self._block_bytes if self._link(run, block.block_hash) else 0)
            except OSError as error:
                return num_bytes, error
        return num_bytes, None

    def _link(self, run: str, block_hash: bytes) -> bool:
        """False if the name leads to another whole run already. Raises `OSError`."""
        name = self.layout.block(block_hash)
        for _ in range(_MAX_ATTEMPTS):
            try:
                os.link(run, name)
            except FileExistsError:
                if self.contains(block_hash):
                    return False
                unlink(name)  # truncated
            except FileNotFoundError:
                _make_folder(os.path.dirname(name))
            else:
                return True
        raise FileNotFoundError(errno.ENOENT, "its directory keeps vanishing")

    def _failure(self, error: OSError) -> TransferError:
        """The same words for the same reason, without the file's name, so that a reason is logged once."""
        kind = FullDiskError if error.errno in FULL else TransferError
        return kind(f"cannot write to {self.layout.root}: {error.strerror or error}")

    # -------------------------------------------------------------------------------------------- reading

    def _read_run(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[TransferError | None]:
        """Reads the first block, and those that follow it in its run. Outcomes of at least one block."""
        path = self.layout.block(wanted[0][0])
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return [TransferError(f"block {wanted[0][0].hex()} is not in the store")]
        except OSError as error:
            return [_unreadable(path, error)]
        try:
            stat = os.fstat(fd)
            try:
                return self._read_blocks(fd, stat, wanted)
            except CorruptRunError as error:
                return [self._delete_corrupt(path, str(error), stat.st_ino, whole_run=True)]
        except OSError as error:
            return [_unreadable(path, error)]
        finally:
            os.close(fd)

    def _read_blocks(
        self, fd: int, stat: os.stat_result, wanted: Sequence[tuple[bytes, memoryview]]
    ) -> list[TransferError | None]:
        """Does what `_read_run` does. Raises `OSError` and `CorruptRunError`."""
        table = RunTable.decode(os.pread(fd, HEADER_BYTES, 0), stat.st_size)
        if table.block_bytes != self._block_bytes or table.layout_digest != self._digest:
            raise CorruptRunError("it belongs to another layout")
        names = [block_hash for block_hash, _ in wanted]
        if names[0] not in table.block_hashes:
            path = self.layout.block(names[0])
            return [self._delete_corrupt(path, "it holds other blocks", stat.st_ino, whole_run=False)]
        first = table.block_hashes.index(names[0])
        num_blocks = _num_equal(names, table.block_hashes[first:])
        try:
            are_good = read_blocks(fd, table, first, [buffer for _, buffer in wanted[:num_blocks]])
        except OSError:
            if num_blocks == 1:
                raise
            # One bad sector must not cost more than its block: the others are read by names of their own.
            are_good = read_blocks(fd, table, first, [wanted[0][1]])
        self._note_use(fd, stat.st_mtime)
        return [
            None if is_good else self._reread(block, stat.st_ino, is_named=position == 0)
            for position, (is_good, block) in enumerate(zip(are_good, wanted, strict=False))
        ]

    def _reread(self, block: tuple[bytes, memoryview], inode: int, *, is_named: bool) -> TransferError | None:
        """Handles a block whose bytes are wrong in the run `inode`. If the block was found as a neighbour (not
        `is_named`), its own name may lead to another run, which is read."""
        path = self.layout.block(block[0])
        if not is_named:
            try:
                if os.stat(path).st_ino != inode:
                    return self._read_run([block])[0]
            except FileNotFoundError:
                return TransferError(f"block {block[0].hex()} is corrupt, and was deleted before")
        return self._delete_corrupt(path, "its checksum differs", inode, whole_run=False)

    def _delete_corrupt(self, path: str, reason: str, inode: int, *, whole_run: bool) -> TransferError:
        """Deletes a block's name, and with `whole_run` the run, which is found by its inode."""
        try:
            unlink(path)
            if whole_run:
                for entry in entries(self.layout.runs):
                    if entry.inode() == inode:
                        unlink(entry.path)
        except OSError as error:
            return TransferError(f"{path} is corrupt ({reason}) and cannot be deleted: {error.strerror or error}")
        return TransferError(f"{path} is corrupt ({reason}) and was deleted")

    # ---------------------------------------------------------------------------------------------- names

    def _run_of(self, path: str, stat: os.stat_result) -> tuple[int, _NamedRun]:
        """The inode of the run that a block's name leads to, and what is known of it. `stat` is what the name led to a
        moment ago, which counts if the run cannot be opened. Raises `FileNotFoundError`."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                stat = os.fstat(fd)
                table = RunTable.decode(os.pread(fd, HEADER_BYTES, 0), stat.st_size)
            finally:
                os.close(fd)  # at once: NFS gives a file that is deleted while it is open another name
        except FileNotFoundError:
            raise
        except (CorruptRunError, OSError):
            return stat.st_ino, _NamedRun(None, (), stat.st_nlink)
        run = None if table.name is None else self.layout.run(table.name)
        return stat.st_ino, _NamedRun(run, table.block_hashes, stat.st_nlink)

    def _delete_unnamed(self, path: str, inode: int, run: _NamedRun) -> None:
        """Deletes the file `path` if it is `inode` and no block's name leads to it. Raises `OSError`, but not if it is
        gone."""
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            return
        if stat.st_ino != inode:
            return
        # On NFS a name that a reader of this host has open when it is deleted goes on as .nfs…, and is counted.
        if stat.st_nlink == 1 or (run.num_links == 1 and run.block_hashes and not self._is_named(inode, run)):
            unlink(path)

    def _is_named(self, inode: int, run: _NamedRun) -> bool:
        """Whether the name of a block leads to the run: its writer may have added one since its links were counted."""
        for block_hash in run.block_hashes:
            try:
                if os.stat(self.layout.block(block_hash)).st_ino == inode:
                    return True
            except FileNotFoundError:
                continue
        return False

    def _mtime(self, block_hash: bytes) -> float | None:
        """The mtime of the run that a name leads to; None if it leads to no whole one."""
        try:
            stat = os.stat(self.layout.block(block_hash))
        except OSError:  # whatever the reason: it can't be read, and a lookup is a hint
            return None
        return stat.st_mtime if is_run_size(stat.st_size, self._block_bytes) else None

    def _is_used(self, block_hash: bytes) -> bool:
        """Answers what `contains` answers, and notes that somebody wanted the block again."""
        mtime = self._mtime(block_hash)
        if mtime is not None:
            self._note_use(self.layout.block(block_hash), mtime)
        return mtime is not None

    def _note_use(self, run: int | str, mtime: float) -> None:
        """Sets the mtime of a run (a path or an open file), by which eviction chooses."""
        if self._clock.now() - mtime < USE_INTERVAL_S:
            return
        try:
            os.utime(run)
        except OSError as error:  # another user's file, or gone: it is only evicted earlier
            log.debug("cannot note that stored KV was used", extra={"reason": str(error)})


def _num_equal(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Length of the common start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(first), len(second)))


def _make_folder(path: str) -> None:
    """Raises `OSError`, but not if somebody wipes its parent meanwhile: the next attempt finds out."""
    try:
        os.makedirs(path, exist_ok=True)
    except FileNotFoundError:
        return


def _unreadable(path: str, error: OSError) -> TransferError:
    return TransferError(f"cannot read {path}: {error.strerror or error}")
