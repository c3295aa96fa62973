"""Fetches each block that several requests wait for only once. Pure: events come in, and it answers questions.

The first request that waits for a block leads: the block is fetched into its place. A later one that needs the same
content follows: it keeps the place that it has. When the leader's block has arrived, the follower takes that block and
gives its own up. So if the block does not come after all, the follower still has a place to compute it in.

    leader   | 0 | 1 | 2 | 3 |     block 2 arrives       leader   | 0 | 1 | 2 | 3 |
    follower | 0 | 1 | a | b | 4       ------>           follower | 0 | 1 | 2 | b | 4      (a is free again)

If a leader ends while a block is on its way from a store, a follower takes the fetch over, since a store's blocks are
verified. A prefill worker may reuse its blocks as soon as the leader's lease has ended, so the followers lose a block
from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.blocks.block_manager import BlockManager
from engine.remote_kv.kv_wait import BlockState, Parked
from engine.request import Request

LEADER_ENDED = "the request that fetched the same blocks has ended"


@dataclass(slots=True, eq=False)
class _Awaited:
    """One block. A name commits to all tokens before it, so its index is the same for every request."""

    name: bytes
    index: int
    owner_id: str  # of the request for which the connector fetches, which may have ended since
    leader: Parked
    followers: list[Parked] = field(default_factory=list)


class SharedFetches:
    def __init__(self, blocks: BlockManager, *, handoff_is_store: bool) -> None:
        self._blocks = blocks
        self._handoff_is_store = handoff_is_store
        self._by_name: dict[bytes, _Awaited] = {}
        self._by_owner: dict[tuple[str, int], _Awaited] = {}

    def __bool__(self) -> bool:
        """Whether any block is on its way."""
        return bool(self._by_name)

    def known_until(self, request: Request, start: int, stop: int) -> int:
        """End of the run of blocks from `start` that are here or on their way; `stop` at most."""
        if not self._blocks.cache.is_enabled:
            return start
        for index in range(start, stop):
            name = request.block_hashes[index]
            if name not in self._by_name and name not in self._blocks.cache:
                return index
        return max(start, stop)

    def join(self, parked: Parked) -> list[int]:
        """Takes in a request whose wait begins: it follows if another request fetches a block, and leads if not.

        Returns the indexes below `ask_from` that the request has to fetch itself.
        """
        request, wait = parked.request, parked.wait
        if not self._blocks.cache.is_enabled:
            return []
        missing = []
        for index in range(wait.first_block, wait.ask_from):
            if self._blocks.adopt(request, index):
                wait.arrive(index)
            elif awaited := self._by_name.get(request.block_hashes[index]):
                awaited.followers.append(parked)
                wait.follow(index)
            else:
                missing.append(index)
                self._lead(parked, index)
        num_full = request.num_prompt_tokens // self._blocks.block_size
        for index in range(wait.ask_from, min(wait.num_blocks, num_full)):
            if request.block_hashes[index] not in self._by_name:
                self._lead(parked, index)
        return missing

    def leader_of(self, owner_id: str, index: int) -> Request | None:
        """The request in whose place a block lands that `owner_id` began to fetch, if any waits for its name."""
        awaited = self._by_owner.get((owner_id, index))
        return awaited.leader.request if awaited is not None else None

    def arrived(self, owner_id: str, index: int) -> list[Parked]:
        """A fetch that `owner_id` began went well. Returns the requests that wait for it by name."""
        awaited = self._remove(owner_id, index)
        if awaited is None:
            return []
        self._blocks.name_arrived(awaited.leader.request, index)
        waiting = [awaited.leader, *awaited.followers]
        for parked in waiting:
            self._blocks.adopt(parked.request, index)
            parked.wait.arrive(index)
        return waiting

    def lost(self, owner_id: str, index: int, failure: str) -> list[Parked]:
        """A fetch that `owner_id` began failed. Returns the requests that waited for it by name."""
        awaited = self._remove(owner_id, index)
        if awaited is None:
            return []
        awaited.leader.wait.lose([index], failure)
        return [awaited.leader, *self._let_down(awaited, failure)]

    def leave(self, parked: Parked) -> list[Parked]:
        """The request waits no more. Call before it gives its blocks up. Returns the requests that it lets down."""
        request, wait = parked.request, parked.wait
        if not self._blocks.cache.is_enabled:
            return []
        let_down = []
        for index in range(wait.first_block, min(wait.num_blocks, len(request.block_hashes))):
            awaited = self._by_name.get(request.block_hashes[index])
            if awaited is None:
                continue
            if awaited.leader is not parked:
                if parked in awaited.followers:
                    awaited.followers.remove(parked)
                continue
            is_verified = self._handoff_is_store or wait.state(index) is BlockState.FROM_STORE
            if wait.is_fetched(index) and is_verified and awaited.followers:
                self._hand_on(awaited)
            else:
                self._remove(awaited.owner_id, index)
                let_down += self._let_down(awaited, LEADER_ENDED)
        return let_down

    def check_integrity(self, all_parked: Mapping[str, Parked]) -> list[str]:
        """What is wrong; empty if every request that leads or follows is parked, and knows what it follows."""
        found: list[str] = []
        for awaited in self._by_name.values():
            found.extend(
                f"request {parked.request.request_id} does not wait for block {awaited.index} any more"
                for parked in (awaited.leader, *awaited.followers)
                if all_parked.get(parked.request.request_id) is not parked
            )
            found.extend(
                f"request {parked.request.request_id} does not know that it follows block {awaited.index}"
                for parked in awaited.followers
                if parked.wait.state(awaited.index) is not BlockState.FOLLOWED
            )
        num_followed = sum(parked.wait.count(BlockState.FOLLOWED) for parked in all_parked.values())
        if num_followed != sum(len(awaited.followers) for awaited in self._by_name.values()):
            found.append("a request follows a block that nobody fetches")
        if len(self._by_name) != len(self._by_owner):
            found.append(f"{len(self._by_name)} awaited blocks, {len(self._by_owner)} of which have an owner")
        return found

    # ------------------------------------------------------------------------------------------ internals

    def _lead(self, parked: Parked, index: int) -> None:
        request = parked.request
        awaited = _Awaited(request.block_hashes[index], index, request.request_id, parked)
        self._by_name[awaited.name] = awaited
        self._by_owner[awaited.owner_id, index] = awaited

    def _remove(self, owner_id: str, index: int) -> _Awaited | None:
        awaited = self._by_owner.pop((owner_id, index), None)
        if awaited is not None:
            del self._by_name[awaited.name]
        return awaited

    def _hand_on(self, awaited: _Awaited) -> None:
        """Makes the first follower the leader, and gives it the block that the bytes go to."""
        former, heir, index = awaited.leader, awaited.followers.pop(0), awaited.index
        self._blocks.take_over(heir.request, index, former.request.block_ids[index])
        heir.wait.inherit(index, former.wait.state(index))
        awaited.leader = heir

    def _let_down(self, awaited: _Awaited, failure: str) -> list[Parked]:
        for parked in awaited.followers:
            parked.wait.lose([awaited.index], failure)
            parked.wait.is_let_down = True
        return awaited.followers
