"""The state of each block of a request that waits for KV. Pure: events come in, and it answers questions.

Each block from `first_block` on is in one `BlockState`. The first ones may come from the store, the others from
another worker: from a prefill worker, which computes them; or, for a prefill, from its decode worker, which has them:

    | cached here | held by the store | asked of another worker |
    0        first_block          ask_from                num_blocks

The wait is over when every block has arrived or is lost, the first token is known, and nothing is on its way any more.
After a failure, or if no worker is asked, it is over as soon as nothing is on its way. Blocks that have not arrived by
then are simply computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.request import Request
from kv_store.base import BlockRef


class BlockState(Enum):
    """The state of one block that a request waits for."""

    MISSING = auto()  # no worker has published it
    FROM_STORE = auto()  # being fetched from the store, which verifies what it gives
    FROM_WORKER = auto()  # being fetched from another worker that holds a lease on it
    UNLEASED = auto()  # being fetched, but the lease has ended meanwhile: the bytes that arrive may be another block's
    FOLLOWED = auto()  # another request has it fetched (`shared_fetches.py`)
    ARRIVED = auto()
    LOST = auto()  # another worker could publish it again


_FETCHED_HERE = (BlockState.FROM_STORE, BlockState.FROM_WORKER, BlockState.UNLEASED)
_ON_ITS_WAY = (*_FETCHED_HERE, BlockState.FOLLOWED)


@dataclass(slots=True)
class KVWait:
    first_block: int
    num_blocks: int  # of the whole prompt, its partial tail included; without a prefill worker, what others have
    ask_from: int = 0  # num_blocks if no worker is asked
    has_first_token: bool = False  # or waits for none
    is_ended: bool = False  # nothing more will be published
    is_let_down: bool = False  # a block that was followed does not come
    failure: str = ""  # the first reason why a block will be computed here
    lease_failure: str = ""  # why the lease on the unleased blocks ended
    _states: list[BlockState] = field(init=False)
    _counts: Counter[BlockState] = field(init=False)

    def __post_init__(self) -> None:
        self._states = [BlockState.MISSING] * (self.num_blocks - self.first_block)
        self._counts = Counter(self._states)

    def state(self, index: int) -> BlockState:
        return self._states[index - self.first_block]

    def indexes(self, state: BlockState) -> list[int]:
        """The indexes of the blocks in that state, in order."""
        return [index for index, one in enumerate(self._states, self.first_block) if one is state]

    def count(self, *states: BlockState) -> int:
        return sum(self._counts[state] for state in states)

    # ---------------------------------------------------------------------------------------------- events

    def fetch_stored(self, indexes: Iterable[int]) -> None:
        """Notes that these blocks are being fetched from the store."""
        for index in indexes:
            self._set(index, BlockState.FROM_STORE)

    def published(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """Takes in blocks that another worker published. Returns those of `refs` to fetch now, which count as on their
        way."""
        wanted = []
        for ref in refs:
            if self._waits_for(ref.index):
                self._set(ref.index, BlockState.FROM_WORKER)
                wanted.append(ref)
        return wanted

    def unpublished(self, indexes: Iterable[int]) -> list[int]:
        """Another worker could not publish these blocks. Returns those that are lost: a block that another worker
        published or another request fetches may still arrive."""
        return [index for index in indexes if self._waits_for(index)]

    def follow(self, index: int) -> None:
        self._set(index, BlockState.FOLLOWED)

    def inherit(self, index: int, state: BlockState) -> None:
        """The request that was followed has ended. Its fetch of the block, in that state, goes on for this request."""
        self._set(index, state)

    def arrive(self, index: int) -> None:
        self._set(index, BlockState.ARRIVED)

    def lose(self, indexes: Iterable[int], failure: str) -> None:
        """These blocks could not be published, or their transfer failed."""
        for index in indexes:
            if self.state(index) is not BlockState.ARRIVED:
                self._set(index, BlockState.LOST)
                self.failure = self.failure or failure

    def end_lease(self, reason: str) -> None:
        """The prefill worker's stream is gone: bytes that arrive from now on may not be the published ones."""
        for index in self.indexes(BlockState.FROM_WORKER):
            self._set(index, BlockState.UNLEASED)
        self.lease_failure = reason

    def end(self, failure: str) -> None:
        """No prefill worker will publish anything any more."""
        self.is_ended = True
        if not self.is_complete:
            self.failure = self.failure or failure

    # --------------------------------------------------------------------------------------------- answers

    @property
    def asks_worker(self) -> bool:
        return self.ask_from < self.num_blocks

    @property
    def is_complete(self) -> bool:
        """All blocks and the first token are here."""
        return self.has_first_token and self.count(BlockState.ARRIVED) == len(self._states)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more can come, even if not all has arrived."""
        if self.count(*_ON_ITS_WAY):
            return False
        if self.is_ended or not self.asks_worker:
            return True
        return self.has_first_token and not self.count(BlockState.MISSING)

    def is_fetched(self, index: int) -> bool:
        """Whether this request has the block fetched, and waits for it."""
        return self.state(index) in _FETCHED_HERE

    @property
    def num_ready_blocks(self) -> int:
        """Length of the run of blocks, from the prompt's start, whose KV is here."""
        for index, state in enumerate(self._states, self.first_block):
            if state is not BlockState.ARRIVED:
                return index
        return self.num_blocks

    def _waits_for(self, index: int) -> bool:
        in_range = self.first_block <= index < self.num_blocks
        return in_range and self.state(index) in (BlockState.MISSING, BlockState.LOST)

    def _set(self, index: int, state: BlockState) -> None:
        self._counts[self.state(index)] -= 1
        self._counts[state] += 1
        self._states[index - self.first_block] = state


@dataclass(slots=True, eq=False)
class Parked:
    """A request that waits for KV."""

    request: Request
    wait: KVWait
