"""What a request that waits for remote KV knows about its blocks. Pure: it is told, and answers.

Each block from `first_block` on is missing, in flight, arrived or lost. The first ones may come from the store, the
others from a prefill worker:

    | cached here | held by the store | asked of a prefill worker |
    0        first_block          ask_from                  num_blocks

A block that another request fetches already is followed instead of fetched again (`shared_fetches.py`).

The wait is over when every block has arrived or is lost for good, the first token is known, and nothing is in flight
any more; or, after a failure or where no worker is asked, as soon as nothing is in flight. What has not arrived by
then is just tokens not yet computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kv_store.base import BlockRef


@dataclass(slots=True)
class RemotePrefill:
    first_block: int
    num_blocks: int  # of the whole prompt, its partial tail included; where no worker is asked, what the store held
    ask_from: int = 0  # num_blocks where no prefill worker is asked
    arrived: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    followed: set[int] = field(default_factory=set)  # another request has them fetched
    unleased: dict[int, str] = field(default_factory=dict)  # of those in flight: may be overwritten meanwhile, and why
    lost: set[int] = field(default_factory=set)  # could be announced again, by another prefill worker
    has_first_token: bool = False
    is_ended: bool = False  # nothing more will be announced
    is_let_down: bool = False  # a block that was followed does not come
    failure: str = ""  # the first reason why a block will be computed here

    def announce(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """Which of `refs` to fetch now; they count as in flight from here on."""
        wanted = []
        for ref in refs:
            is_asked = self.first_block <= ref.index < self.num_blocks
            if is_asked and ref.index not in self.arrived and ref.index not in self.in_flight:
                wanted.append(ref)
                self.in_flight.add(ref.index)
                self.lost.discard(ref.index)
        return wanted

    def lose(self, indexes: Iterable[int], failure: str) -> None:
        """These blocks could not be published, or their transfer failed."""
        for index in indexes:
            self.in_flight.discard(index)
            self.unleased.pop(index, None)
            self.followed.discard(index)
            if index not in self.arrived:
                self.lost.add(index)
                self.failure = self.failure or failure

    def arrive(self, index: int) -> None:
        self.in_flight.discard(index)
        self.followed.discard(index)
        self.lost.discard(index)
        self.arrived.add(index)

    def end_lease(self, reason: str) -> None:
        """The prefill worker's stream is gone: what has not arrived by now may not be what was announced."""
        self.unleased.update((index, reason) for index in self.in_flight if index >= self.ask_from)

    def end(self, failure: str) -> None:
        """The stream is gone for good."""
        self.is_ended = True
        if not self.is_complete:
            self.failure = self.failure or failure

    @property
    def asks_worker(self) -> bool:
        return self.ask_from < self.num_blocks

    @property
    def is_complete(self) -> bool:
        """All blocks and the first token are here."""
        return self.has_first_token and len(self.arrived) == self.num_blocks - self.first_block

    @property
    def is_settled(self) -> bool:
        """Nothing more is to be waited for, be it for good or for bad."""
        if self.in_flight or self.followed:
            return False
        accounted = len(self.arrived) + len(self.lost) == self.num_blocks - self.first_block
        return self.is_ended or not self.asks_worker or (self.has_first_token and accounted)

    @property
    def num_ready_blocks(self) -> int:
        """Length of the run of blocks, from the prompt's start, whose KV is here."""
        index = self.first_block
        while index in self.arrived:
            index += 1
        return index
