"""How blocks are stored in LMCache: in groups, each of which is one LMCache chunk.

LMCache keeps whole chunks of 256 tokens, found by the tokens of the prompt up to them. Baton names each block by a
hash that commits to all tokens up to it. So a chunk is a *group*: neighbouring blocks of one request, at most 256
tokens, found by the hash of its last block, which commits to the blocks before it:

    blocks    0 1 2 3 4 5 6 7 8 9 10 … 15 | 16 … 19 | 20 21 | 22      a prompt of 23 blocks, blocks of 16 tokens
    groups    [        16, hash of 15    ] [4, of 19] [2, 21] [1]     hashes of the last blocks are the names

A group's size is a power of two and its first index a multiple of the size. So a reader that knows only hashes finds
the groups of any writer, whatever chunks that one computed in, and a prompt's tail takes no more room than its blocks.
A last block that the prompt fills only in part is a group by itself: no other prompt has its hash, so the blocks before
it must not need it to be found.

A group starts with a header that says whose bytes follow, since a group that its writer left half-written may become
readable. The server can't tell; the header and the blocks' checksums can.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from common.block_hash import HASH_BYTES
from common.types import KVCacheSpec
from kv_store.base import LocalBlock

GROUP_TOKENS = 256  # of the largest groups: LMCache's own chunk
_MAGIC = b"BATON-LM"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s")  # magic, version, blocks, bytes of a block, digest of the layout
_ENTRY = struct.Struct(f"<{HASH_BYTES}sQ")  # block hash, XXH3-64 of the block's bytes
_ALIGNMENT = 64

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, frozen=True)
class Chunk:
    """A chunk of LMCache, as the client names it."""

    model_name: str  # says the kind: all chunks of a model have the same number of bytes
    num_bytes: int
    name: bytes  # HASH_BYTES


@dataclass(slots=True, frozen=True)
class Group:
    """The name of a group, the same for each rank of each tensor-parallel degree."""

    num_blocks: int
    last_hash: bytes

    def hint(self, tp_size: int) -> str:
        """What a `BlockRef` carries, so that any block of the group is found without its neighbours' hashes, in
        the place that workers of that degree use."""
        return f"{self.num_blocks}:{self.last_hash.hex()}:{tp_size}"

    @staticmethod
    def from_hint(hint: str) -> tuple[Group, int] | None:
        """The group and the degree; None if it is no hint of ours."""
        try:
            num_blocks, last_hash, tp_size = hint.split(":")
            group, degree = Group(int(num_blocks), bytes.fromhex(last_hash)), int(tp_size)
        except ValueError:
            return None
        return (group, degree) if len(group.last_hash) == HASH_BYTES and group.num_blocks > 0 else None


def group_sizes(block_size: int) -> list[int]:
    """Blocks of a group, smallest first: 1, 2, 4 … for as long as they hold at most GROUP_TOKENS tokens."""
    sizes = [1]
    while sizes[-1] * 2 * block_size <= GROUP_TOKENS:
        sizes.append(sizes[-1] * 2)
    return sizes


def split_into_groups(blocks: Sequence[LocalBlock], sizes: Sequence[int]) -> list[list[LocalBlock]]:
    """`blocks` in the largest groups that their indexes allow, sorted by index; a partial block stays alone."""
    ordered = sorted((block for block in blocks if not block.is_partial), key=lambda block: block.index)
    groups: list[list[LocalBlock]] = []
    start = 0
    while start < len(ordered):
        first = ordered[start].index
        size = next(size for size in reversed(sizes) if _is_run(ordered[start : start + size], first, size))
        groups.append(ordered[start : start + size])
        start += size
    return groups + [[block] for block in blocks if block.is_partial]


def _is_run(blocks: Sequence[LocalBlock], first: int, size: int) -> bool:
    """Indexes `first` to `first + size - 1`, aligned to `size`. True for one block."""
    return first % size == 0 and [block.index for block in blocks] == list(range(first, first + size))


def find_group(
    index: int, hashes: Mapping[int, bytes], sizes: Sequence[int], contains: Callable[[Group], bool]
) -> tuple[Group, range] | None:
    """The largest group with block `index` that the store `contains`, and the indexes of its blocks.

    `hashes` are those of the request's blocks, by index, as far as they are known: a group whose last block is not
    among them can't be found.
    """
    for size in reversed(sizes):
        first = index - index % size
        last_hash = hashes.get(first + size - 1)
        if last_hash is not None and contains(group := Group(size, last_hash)):
            return group, range(first, first + size)
    return None


class GroupLayout:
    """Header and places of a group's blocks, for one KV layout. Pure bytes: knows no server."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.tp_size = spec.tp_size
        self.name = spec.fingerprint() + spec.shard_name
        self._digest = hashlib.blake2b(self.name.encode(), digest_size=16).digest()
        self.block_bytes = spec.block_bytes
        self.sizes = group_sizes(spec.block_size)

    def chunk(self, group: Group) -> Chunk:
        """The group of this layout."""
        return Chunk(self.model_name(group.num_blocks), self.group_bytes(group.num_blocks), group.last_hash)

    def group_bytes(self, num_blocks: int) -> int:
        return _header_bytes(num_blocks) + num_blocks * self.block_bytes

    def model_name(self, num_blocks: int) -> str:
        """The name under which LMCache keeps groups of this size and layout apart from all others."""
        return f"baton-{self.name}-x{num_blocks}"

    def write(self, slot: Bytes, hashes: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Writes a whole group. Its header comes last, so that an unfinished group has none of its own."""
        slot[: _HEADER.size] = 0
        entries = bytearray()
        for position, (block_hash, data) in enumerate(zip(hashes, blocks, strict=True)):
            np.copyto(self._block(slot, len(hashes), position), np.frombuffer(data, np.uint8))
            entries += _ENTRY.pack(block_hash, xxhash.xxh3_64_intdigest(data))
        head = _HEADER.pack(_MAGIC, _VERSION, len(hashes), self.block_bytes, self._digest) + entries
        slot[: len(head)] = np.frombuffer(head, np.uint8)

    def entries(self, slot: Bytes, num_blocks: int) -> dict[bytes, tuple[int, int]] | None:
        """{block hash: (position, checksum)} in order; None if the group is not what its name says."""
        head = slot[: _header_bytes(num_blocks)].tobytes()
        if _HEADER.unpack_from(head) != (_MAGIC, _VERSION, num_blocks, self.block_bytes, self._digest):
            return None
        entries = _ENTRY.iter_unpack(head[_HEADER.size : _HEADER.size + num_blocks * _ENTRY.size])
        return {block_hash: (position, checksum) for position, (block_hash, checksum) in enumerate(entries)}

    def read(self, slot: Bytes, num_blocks: int, entry: tuple[int, int], into: memoryview) -> bool:
        """Copies a block, by its (position, checksum). False if the copy is wrong; `into` is undefined then."""
        position, checksum = entry
        np.copyto(np.frombuffer(into, np.uint8), self._block(slot, num_blocks, position))
        return xxhash.xxh3_64_intdigest(into) == checksum

    def holds(self, slot: Bytes, hashes: Sequence[bytes]) -> bool:
        """Whether the group holds exactly these blocks, in this order, with the bytes that its writer meant."""
        entries = self.entries(slot, len(hashes))
        return (
            entries is not None
            and list(entries) == list(hashes)
            and all(
                xxhash.xxh3_64_intdigest(self._block(slot, len(hashes), position).data) == checksum
                for position, checksum in entries.values()
            )
        )

    def _block(self, slot: Bytes, num_blocks: int, position: int) -> Bytes:
        start = _header_bytes(num_blocks) + position * self.block_bytes
        return slot[start : start + self.block_bytes]


def _header_bytes(num_blocks: int) -> int:
    size = _HEADER.size + num_blocks * _ENTRY.size
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
