"""Groups in LMCache that workers of any tensor-parallel degree wrote.

Each rank writes groups of its own, under names of its own. A rank looks for a block in its own groups first, then in
those of other degrees that the model's heads allow and that have left a mark (`kv_store.lmcache.marks`). In another
degree, the heads that this rank needs lie with one rank or with several. This rank copies the blocks of those ranks
whole, since checksums cover whole blocks, and takes its heads out of the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from common.types import KVCacheSpec
from kv_store.lmcache.client import LMCacheClient
from kv_store.lmcache.groups import Bytes, Group, GroupLayout, find_group
from kv_store.lmcache.marks import Marks
from kv_store.shards import CommonPart, degrees, sources_of, take_part


@dataclass(slots=True, frozen=True)
class _Source:
    """One rank, and what we need of its blocks."""

    part: CommonPart
    spec: KVCacheSpec
    layout: GroupLayout


class LoadedGroup:
    """A group that the server keeps in place while it is read: the slots of all ranks that we need."""

    def __init__(self, spec: KVCacheSpec, group: Group, slots: Sequence[tuple[_Source, Bytes]]) -> None:
        self._spec = spec
        self._num_blocks = group.num_blocks
        self._shards = [(source, slot, source.layout.entries(slot, group.num_blocks)) for source, slot in slots]

    def read(self, block_hash: bytes, into: memoryview) -> str | None:
        """Copies one block as our rank has it. Returns why if that fails; `into` is undefined then."""
        for source, slot, entries in self._shards:
            entry = (entries or {}).get(block_hash)
            if entry is None:
                return "corrupt in LMCache: not what its name says"
            is_whole = source.spec.num_kv_heads == self._spec.num_kv_heads
            shard = into if is_whole else np.empty(source.spec.block_bytes, np.uint8).data
            if not source.layout.read(slot, self._num_blocks, entry, shard):
                return "corrupt in LMCache: checksum differs"
            if not is_whole:
                take_part(source.part, self._spec, source.spec, shard, into)
        return None


class Degree:
    """What workers of one degree have stored, as blocks of our rank."""

    def __init__(self, client: LMCacheClient, spec: KVCacheSpec, tp_size: int) -> None:
        self.tp_size = tp_size
        self._client = client
        self._spec = spec
        self._sources = [_Source(part, shard, GroupLayout(shard)) for part, shard in sources_of(spec, tp_size)]

    def contains(self, group: Group, deadline: float) -> bool:
        """Whether each of the ranks has the group. Raises `TransferError`, as do all methods here that ask the
        server."""
        return all(self._client.contains(source.layout.chunk(group), deadline) for source in self._sources)

    @contextmanager
    def loaded(self, group: Group, deadline: float) -> Iterator[LoadedGroup | None]:
        """None if one of the ranks does not have the group. It stays for as long as the context is open."""
        with ExitStack() as stack:
            slots: list[tuple[_Source, Bytes]] = []
            for source in self._sources:
                slot = stack.enter_context(self._client.loaded(source.layout.chunk(group), deadline))
                if slot is None:
                    yield None
                    return
                slots.append((source, slot))
            yield LoadedGroup(self._spec, group, slots)


class Degrees:
    """All degrees that the model's heads allow. Any thread may call any method."""

    def __init__(self, client: LMCacheClient, spec: KVCacheSpec) -> None:
        self._marks = Marks(client, spec)
        self._own = Degree(client, spec, spec.tp_size)
        self._by_size = {
            tp_size: self._own if tp_size == spec.tp_size else Degree(client, spec, tp_size)
            for tp_size in degrees(spec)
        }

    def leave_mark(self, deadline: float) -> None:
        """Call before a group of our own is stored."""
        if len(self._by_size) > 1:
            self._marks.leave(self._own.tp_size, deadline)

    def of_size(self, tp_size: int) -> Degree | None:
        return self._by_size.get(tp_size)

    def to_ask(self, first: Degree | None, deadline: float) -> Iterator[Degree]:
        """Degrees that may have a block, in the order in which to ask them: `first`, then our own, then those that have
        left a mark. The server is asked for a mark only when it is that degree's turn."""
        if first is not None:
            yield first
        if first is not self._own:
            yield self._own
        for degree in self._by_size.values():
            if degree is not first and degree is not self._own and self._marks.has(degree.tp_size, deadline):
                yield degree


class Finder:
    """Finds the groups of one request's blocks, from any of them on.

    Neighbouring blocks mostly come from one writer. If a block's group is another degree's, the next one's mostly is
    too, so looking in our own groups first would miss each time.
    """

    def __init__(self, degrees: Degrees, hashes: Mapping[int, bytes], sizes: Sequence[int], deadline: float) -> None:
        self._degrees = degrees
        self._hashes = hashes
        self._sizes = sizes
        self._deadline = deadline
        self._last: Degree | None = None
        self._missed: set[tuple[int, Group]] = set()

    def find(self, index: int) -> tuple[Degree, Group, range] | None:
        """The degree that has block `index`, the group, and the indexes of the group's blocks. Raises
        `TransferError`."""
        for degree in self._degrees.to_ask(self._last, self._deadline):

            def contains(group: Group, degree: Degree = degree) -> bool:
                if (degree.tp_size, group) in self._missed:
                    return False
                if degree.contains(group, self._deadline):
                    return True
                self._missed.add((degree.tp_size, group))
                return False

            found = find_group(index, self._hashes, self._sizes, contains)
            if found is not None:
                self._last = degree
                return degree, *found
        return None
