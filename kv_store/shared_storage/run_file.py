"""Run files: several KV blocks in one file, so that a prefix is read in few, large, sequential reads.

    0       header (48 bytes): magic, checksum of all that follows up to 4096, version, number of blocks,
            bytes of one block, digest of the layout
    48      table, 24 bytes for each block: its hash (16) and the XXH3-64 of its bytes (8); zeros up to 4080
    4080    the run's own name (16 bytes), by which a block's name leads to the run; zeros if it has none
    4096    the blocks, one after the other, without gaps

Without gaps any row of blocks is one read. If a block is a multiple of 4096 bytes, as those of real models are,
each begins at one, so that O_DIRECT would work.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

_MAGIC = b"BATON-KV"
VERSION = 2
_HEADER = struct.Struct("<8sQIIQ16s")
_ENTRY = struct.Struct("<16sQ")
_NAME = struct.Struct("<I12s")
_CHECKED_FROM = 16  # the header's checksum covers what comes after it

HEADER_BYTES = 4096
RUN_BYTES = 8 << 20  # written and read in one turn: large enough for the disk, small enough to be published early
MAX_BLOCKS = (HEADER_BYTES - _HEADER.size - _NAME.size) // _ENTRY.size
_NAME_OFFSET = HEADER_BYTES - _NAME.size


class CorruptRunError(Exception):
    """A file is no run of this layout, or not a whole one. The message is a reason, to be put in brackets."""


@dataclass(slots=True, frozen=True)
class RunName:
    """What a run file is called under runs/."""

    position: int  # of its first block in the request that it came from
    unique: bytes  # 12 bytes that no other run has

    @classmethod
    def new(cls, position: int) -> RunName:
        return cls(position, os.urandom(12))


@dataclass(slots=True, frozen=True)
class RunTable:
    """What a run file's first 4096 bytes say."""

    block_bytes: int
    layout_digest: bytes  # 16 bytes
    block_hashes: tuple[bytes, ...]  # in the order of the file
    checksums: tuple[int, ...]  # XXH3-64
    name: RunName | None = None  # None: a block that is a file of its own, or a run of an earlier release

    @property
    def file_bytes(self) -> int:
        return self.offset_of(len(self.block_hashes))

    def offset_of(self, position: int) -> int:
        return HEADER_BYTES + position * self.block_bytes

    def encode(self) -> bytes:
        """4096 bytes. Holds at most MAX_BLOCKS blocks."""
        data = bytearray(HEADER_BYTES)
        _HEADER.pack_into(data, 0, _MAGIC, 0, VERSION, len(self.block_hashes), self.block_bytes, self.layout_digest)
        for position, entry in enumerate(zip(self.block_hashes, self.checksums, strict=True)):
            _ENTRY.pack_into(data, _HEADER.size + position * _ENTRY.size, *entry)
        if self.name is not None:
            _NAME.pack_into(data, _NAME_OFFSET, self.name.position, self.name.unique)
        checksum = xxhash.xxh3_64_intdigest(memoryview(data)[_CHECKED_FROM:])
        _HEADER.pack_into(
            data, 0, _MAGIC, checksum, VERSION, len(self.block_hashes), self.block_bytes, self.layout_digest
        )
        return bytes(data)

    @classmethod
    def decode(cls, data: bytes, file_bytes: int) -> RunTable:
        """Raises `CorruptRunError` if `data`, the head of a file of `file_bytes`, is not that of a whole run."""
        if len(data) < HEADER_BYTES:
            raise CorruptRunError(f"{file_bytes} bytes, less than a header")
        magic, checksum, version, num_blocks, block_bytes, layout_digest = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != VERSION:
            raise CorruptRunError("no run of this version")
        if checksum != xxhash.xxh3_64_intdigest(memoryview(data)[_CHECKED_FROM:]):
            raise CorruptRunError("the checksum of its header differs")
        if not 0 < num_blocks <= MAX_BLOCKS:
            raise CorruptRunError(f"{num_blocks} blocks")
        entries = list(_ENTRY.iter_unpack(data[_HEADER.size : _HEADER.size + num_blocks * _ENTRY.size]))
        name = RunName(*_NAME.unpack_from(data, _NAME_OFFSET)) if any(data[_NAME_OFFSET:]) else None
        hashes, checksums = tuple(entry[0] for entry in entries), tuple(entry[1] for entry in entries)
        table = cls(block_bytes, layout_digest, hashes, checksums, name)
        if table.file_bytes != file_bytes:
            raise CorruptRunError(f"{file_bytes} bytes instead of {table.file_bytes}")
        return table


def is_run_size(file_bytes: int, block_bytes: int) -> bool:
    """Whether some run of such blocks has this size: what a single stat can tell."""
    num_blocks, rest = divmod(file_bytes - HEADER_BYTES, block_bytes)
    return rest == 0 and 0 < num_blocks <= MAX_BLOCKS


def write_new_file(path: str, parts: Sequence[memoryview | bytes]) -> None:
    """Writes `parts` to a file that must not exist. May leave some of it behind if it raises `OSError`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        left = [memoryview(part) for part in parts]
        while left:
            _advance(left, os.writev(fd, left))
    finally:
        os.close(fd)  # may raise as well: network file systems report a full disk here


def read_blocks(fd: int, table: RunTable, first: int, buffers: Sequence[memoryview]) -> list[bool]:
    """Reads the blocks from position `first` on, in one call if the kernel gives all at once.

    Returns which of them match their checksums. Raises `OSError`, and `CorruptRunError` if the file ends early.
    """
    offset = table.offset_of(first)
    left = list(buffers)
    while left:
        num_read = os.preadv(fd, left, offset)
        if num_read == 0:
            raise CorruptRunError("it shrank while it was read")
        offset += num_read
        _advance(left, num_read)
    checksums = table.checksums[first : first + len(buffers)]
    return [xxhash.xxh3_64_intdigest(buffer) == checksum for buffer, checksum in zip(buffers, checksums, strict=True)]


def _advance(parts: list[memoryview], num_bytes: int) -> None:
    """Takes `num_bytes` off the front of `parts`."""
    num_whole = 0
    while num_whole < len(parts) and num_bytes >= len(parts[num_whole]):
        num_bytes -= len(parts[num_whole])
        num_whole += 1
    del parts[:num_whole]
    if num_bytes:
        parts[0] = parts[0][num_bytes:]
