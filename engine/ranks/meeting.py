"""What the ranks of a host meet by: file descriptors that rank 0 makes, and each rank gets its own of.

everybody       memory in which all ranks exchange values
stage           the same for the ranks of one stage, if there are several of both
cache           KV of all layers, and of the heads that the rank has: one cache for the ranks of all stages that
                have these heads, each of which writes its own layers; and one for all data ranks
before, after   sockets to the stage before and to the next one
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from engine.ranks.group import OneRank, RankGroup
from engine.ranks.layout import Layout
from engine.ranks.link import SocketLink
from engine.ranks.pipeline import Pipeline
from engine.ranks.shared_cache import make_cache_file
from engine.ranks.shared_memory import SharedMemoryGroup, make_segment

EVERYBODY, STAGE, CACHE, BEFORE, AFTER = "everybody", "stage", "cache", "before", "after"


class Meeting:
    """Of all ranks of a worker. `close` it when every rank has its descriptors."""

    def __init__(self, layout: Layout) -> None:
        """Raises `StartupError` if ranks cannot meet here, `OSError` if there is no memory to share."""
        self._files: list[dict[str, int]] = [{} for _ in range(layout.size)]  # by rank
        self._made: list[int] = []
        try:
            self._add(EVERYBODY, range(layout.size), make_segment(layout.size))
            for first in range(0, layout.size, layout.ranks_per_stage):
                if 1 < layout.ranks_per_stage < layout.size:
                    self._add(STAGE, layout.stage_mates(first), make_segment(layout.ranks_per_stage))
            for place in range(layout.num_caches):
                self._add(CACHE, range(place, layout.size, layout.num_caches), make_cache_file())
            for rank in range(layout.size):
                if (after := layout.after(rank)) is not None:
                    for name, one, end in zip((AFTER, BEFORE), (rank, after), socket.socketpair(), strict=True):
                        self._add(name, [one], end.detach())
        except BaseException:
            self.close()
            raise

    def files(self, rank: int) -> dict[str, int]:
        """By name. They stay those of this `Meeting`."""
        return self._files[rank]

    def close(self) -> None:
        for file in self._made:
            os.close(file)
        self._made.clear()

    def _add(self, name: str, ranks: range | list[int], file: int) -> None:
        self._made.append(file)
        for rank in ranks:
            self._files[rank][name] = file


class Place:
    """One rank's place among all: the ranks of its stage, and the stages before and behind it."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        files: Mapping[str, int],
        problem: Callable[[int], str],
        *,
        has_core: bool,
    ) -> None:
        """`files` as a `Meeting` gives them; they may be closed then. `problem` is asked ten times a second for why a
        rank that is waited for will never come. `has_core`: each rank has a core."""
        mates = layout.stage_mates(rank)
        self._groups = [SharedMemoryGroup(files[EVERYBODY], rank, layout.size, problem, has_core=has_core)]
        self.group: RankGroup = self._groups[0]  # of the stage
        if layout.num_stages > 1:
            self.group = OneRank()
        if STAGE in files:
            self.group = SharedMemoryGroup(
                files[STAGE],
                layout.place_in_stage(rank),
                len(mates),
                lambda place: problem(mates[place]),
                has_core=has_core,
            )
            self._groups.append(self.group)
        self.pipeline = Pipeline(
            layout.stage(rank),
            self._groups[0],
            before=_link(files, BEFORE, layout.before(rank), problem),
            after=_link(files, AFTER, layout.after(rank), problem),
        )

    def fail(self) -> None:
        """Tells the others that this rank will not go on: they wait for it in vain from now on."""
        for group in self._groups:
            group.fail()

    def close(self) -> None:
        self.pipeline.close()


def _link(files: Mapping[str, int], name: str, other: int | None, problem: Callable[[int], str]) -> SocketLink | None:
    """To rank `other`, by the socket of that name; None if there is no such rank."""
    if other is None:
        return None
    return SocketLink(socket.socket(fileno=os.dup(files[name])), lambda: problem(other))
