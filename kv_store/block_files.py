"""Block files: one KV block each, named by what it holds, in a directory that any number of workers share.

    <kv_dir>/<layout>/ab/abcdef….kv     header (64 bytes) and the block's bytes
    <kv_dir>/<layout>/tmp/…             files being written; a rename makes them block files, whole or not at all

`<layout>` is the fingerprint, plus the tensor-parallel shard where there is one: other models and layouts never meet.
A file is not synced to disk: it is a cache, and what a power cut leaves behind fails its checksum.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import struct
import time
from pathlib import Path

import xxhash

from common.errors import StartupError, TransferError
from common.types import KVCacheSpec

_MAGIC = b"BATON-KV"
_VERSION = 1
# magic, version, reserved, block bytes, XXH3-64 of the block's bytes, digest of the layout, block hash
_HEADER = struct.Struct("<8sIIQQ16s16s")
HEADER_BYTES = _HEADER.size

STALE_TEMP_S = 3600.0  # a temporary file this old has lost its writer, whatever host that ran on
_MAX_ATTEMPTS = 3  # of one write, while somebody deletes directories


def prepare_directory(kv_dir: str) -> Path:
    """Makes `kv_dir` where its parent exists, and tries to write there. Raises `StartupError`."""
    if not kv_dir:
        raise StartupError("kv_dir: shared_storage needs a directory that all workers share")
    path = Path(kv_dir)
    probe = path / f".probe-{_writer_id()}"
    try:
        path.mkdir(exist_ok=True)
        probe.write_bytes(b"baton")
        probe.unlink()
    except OSError as error:
        raise StartupError(f"kv_dir: cannot write to {kv_dir!r}: {error.strerror or error}") from error
    return path


class BlockFiles:
    """Reads and writes blocks of one layout. Every method does I/O; any thread may call any of them."""

    def __init__(self, kv_dir: Path, spec: KVCacheSpec) -> None:
        layout = spec.fingerprint()
        if spec.tp_size > 1:
            layout += f"-tp{spec.tp_rank}of{spec.tp_size}"
        self.root = kv_dir / layout
        self.temp_dir = self.root / "tmp"
        self._layout_digest = hashlib.blake2b(layout.encode(), digest_size=16).digest()
        self._block_bytes = spec.block_bytes
        self._counter = itertools.count()
        self._writer = _writer_id()

    def path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.root / name[:2] / f"{name}.kv"

    def contains(self, block_hash: bytes) -> bool:
        """One stat: the file is there and has the right size. Its content is checked by `read`."""
        try:
            return os.stat(self.path(block_hash)).st_size == HEADER_BYTES + self._block_bytes
        except OSError:
            return False

    def write(self, block_hash: bytes, data: memoryview) -> int:
        """Stores a block; returns the bytes written, 0 where it was there already. Raises `TransferError`."""
        if self.contains(block_hash):
            return 0
        checksum = xxhash.xxh3_64_intdigest(data)
        header = _HEADER.pack(_MAGIC, _VERSION, 0, self._block_bytes, checksum, self._layout_digest, block_hash)
        path = self.path(block_hash)
        for _ in range(_MAX_ATTEMPTS):
            temp = self.temp_dir / f"{path.stem}-{self._writer}-{next(self._counter)}"
            try:
                _write_new_file(temp, [memoryview(header), data])
                os.replace(temp, path)
            except FileNotFoundError:
                # A new store, a new fan-out folder, or a directory that somebody wiped.
                temp.unlink(missing_ok=True)
                self._make_directories(path.parent)
            except OSError as error:
                raise TransferError(f"cannot write {path}: {error.strerror or error}") from error
            else:
                return HEADER_BYTES + len(data)
        raise TransferError(f"cannot write {path}: its directory keeps vanishing")

    def read(self, block_hash: bytes, into: memoryview) -> None:
        """Reads a block into `into` and verifies it. Raises `TransferError`; `into` is undefined then.

        A file that does not hold what its name says is deleted, so that it can be written again.
        """
        path = self.path(block_hash)
        header = bytearray(HEADER_BYTES)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fault = self._read_and_verify(fd, block_hash, header, into)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise TransferError(f"block {block_hash.hex()} is not in the store") from None
        except OSError as error:
            raise TransferError(f"cannot read {path}: {error.strerror or error}") from error
        if fault is not None:
            self._delete(path)
            raise TransferError(f"{path} is corrupt ({fault}) and was deleted")

    def delete_stale_temps(self, older_than_s: float = STALE_TEMP_S) -> int:
        """Deletes what killed writers left behind; returns how many files."""
        num_deleted = 0
        try:
            with os.scandir(self.temp_dir) as entries:
                for entry in entries:
                    # Another worker may be cleaning up at the same time.
                    try:
                        if time.time() - entry.stat().st_mtime > older_than_s:
                            os.unlink(entry.path)
                            num_deleted += 1
                    except FileNotFoundError:
                        continue
        except FileNotFoundError:
            pass
        return num_deleted

    def _read_and_verify(self, fd: int, block_hash: bytes, header: bytearray, into: memoryview) -> str | None:
        """What is wrong with the file, or None. Raises `OSError`."""
        size = os.fstat(fd).st_size
        if size != HEADER_BYTES + self._block_bytes:
            return f"{size} bytes instead of {HEADER_BYTES + self._block_bytes}"
        num_read = os.preadv(fd, [header, into], 0)
        while HEADER_BYTES <= num_read < size:
            more = os.preadv(fd, [into[num_read - HEADER_BYTES :]], num_read)
            if more == 0:
                return "it shrank while it was read"
            num_read += more
        magic, version, _, block_bytes, checksum, layout_digest, name = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            return "no block file of this version"
        if block_bytes != self._block_bytes or layout_digest != self._layout_digest or name != block_hash:
            return "the header names another block"
        if checksum != xxhash.xxh3_64_intdigest(into):
            return "its checksum differs"
        return None

    def _make_directories(self, fan_out: Path) -> None:
        try:
            self.temp_dir.mkdir(parents=True, exist_ok=True)
            fan_out.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:
            return  # wiped between the two steps of mkdir; the next attempt finds out
        except OSError as error:
            raise TransferError(f"cannot create {fan_out}: {error.strerror or error}") from error

    def _delete(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise TransferError(f"{path} is corrupt and cannot be deleted: {error.strerror or error}") from error


def _write_new_file(path: Path, parts: list[memoryview]) -> None:
    """Writes `parts` to a file that must not exist. Leaves none behind where it raises `OSError`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            while parts:
                num_written = os.writev(fd, parts)
                while parts and num_written >= len(parts[0]):
                    num_written -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][num_written:]
        finally:
            os.close(fd)  # may raise as well: network file systems report a full disk here
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _writer_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
