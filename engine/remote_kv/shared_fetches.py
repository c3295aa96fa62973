"""Blocks on their way that several requests wait for: each is fetched once. Pure: it is told, and answers.

The first request that waits for a block leads: it has the block fetched into its own place. A later one that needs the
same content follows: it keeps the place that it has, and when the leader's block is here, takes that and gives its own
up. So nothing has to be found, and nothing was overwritten, where the block does not come after all.

    leader   | 0 | 1 | 2 | 3 |     block 2 arrives       leader   | 0 | 1 | 2 | 3 |
    follower | 0 | 1 | a | b | 4       ------>           follower | 0 | 1 | 2 | b | 4      (a is free again)

A leader that ends while a block is in flight leaves it to a follower, if what arrives is sure to be right: a store's
blocks are verified, but a prefill worker may reuse its own as soon as its lease has ended. In all other cases the
followers lose the block, and what that means is theirs to decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.blocks.block_manager import BlockManager
from engine.request import Request

LEADER_ENDED = "the request that fetched the same blocks has ended"


@dataclass(slots=True, eq=False)
class _Awaited:
    """One block. A name commits to all tokens before it, so its index is the same for everyone."""

    name: bytes
    index: int
    owner_id: str  # of the request for which the connector fetches, which may have ended since
    leader: Request
    followers: list[Request] = field(default_factory=list)


class SharedFetches:
    def __init__(self, blocks: BlockManager, *, handoff_is_store: bool) -> None:
        self._blocks = blocks
        self._handoff_is_store = handoff_is_store
        self._by_name: dict[bytes, _Awaited] = {}
        self._by_owner: dict[tuple[str, int], _Awaited] = {}
        self._touched: dict[str, None] = {}  # ids of requests whose wait may be over

    def take_touched(self) -> list[str]:
        """Ids of requests that others' fetches have brought further, since the last call."""
        touched, self._touched = list(self._touched), {}
        return touched

    def known_until(self, request: Request, start: int, stop: int) -> int:
        """Where the run of blocks from `start` ends that are here or on their way; `stop` at most."""
        if not self._blocks.enable_prefix_caching:
            return start
        for index in range(start, stop):
            name = request.block_hashes[index]
            if name not in self._by_name and self._blocks.find(name) is None:
                return index
        return max(start, stop)

    def join(self, request: Request) -> list[int]:
        """Takes in a request whose wait begins: follows where it can, leads elsewhere.

        Returns the indexes below `ask_from` that the request has to fetch itself.
        """
        remote = request.remote
        if remote is None or not self._blocks.enable_prefix_caching:
            return []
        missing = []
        for index in range(remote.first_block, remote.ask_from):
            name = request.block_hashes[index]
            if self._blocks.adopt(request, index):
                remote.arrive(index)
            elif awaited := self._by_name.get(name):
                awaited.followers.append(request)
                remote.followed.add(index)
            else:
                missing.append(index)
                self._lead(request, index)
        for index in range(
            remote.ask_from, min(remote.num_blocks, request.num_prompt_tokens // self._blocks.block_size)
        ):
            if request.block_hashes[index] not in self._by_name:
                self._lead(request, index)
        return missing

    def leader_of(self, owner_id: str, index: int) -> Request | None:
        """In whose place a block lands that `owner_id` began to fetch; None where nobody waits for it by name."""
        awaited = self._by_owner.get((owner_id, index))
        return awaited.leader if awaited is not None else None

    def arrived(self, owner_id: str, index: int) -> bool:
        """A fetch that `owner_id` began went well; False where nobody here waits for it by name."""
        awaited = self._remove(owner_id, index)
        if awaited is None:
            return False
        leader = awaited.leader
        self._blocks.name_arrived(leader, index)
        for request in (leader, *awaited.followers):
            if request.remote is not None:
                self._blocks.adopt(request, index)
                request.remote.arrive(index)
                self._touched[request.request_id] = None
        return True

    def lost(self, owner_id: str, index: int, failure: str) -> bool:
        """It failed; False where nobody here waits for it by name."""
        awaited = self._remove(owner_id, index)
        if awaited is None:
            return False
        if awaited.leader.remote is not None:
            awaited.leader.remote.lose([index], failure)
            self._touched[awaited.leader.request_id] = None
        self._let_down(awaited, failure)
        return True

    def end(self, request: Request) -> None:
        """The request waits no more. Call before it gives its blocks up."""
        remote = request.remote
        if remote is None or not self._blocks.enable_prefix_caching:
            return
        for index in range(remote.first_block, min(remote.num_blocks, len(request.block_hashes))):
            awaited = self._by_name.get(request.block_hashes[index])
            if awaited is None:
                continue
            if awaited.leader is not request:
                if request in awaited.followers:
                    awaited.followers.remove(request)
                continue
            is_verified = self._handoff_is_store or index < remote.ask_from
            if index in remote.in_flight and is_verified and awaited.followers:
                self._hand_on(awaited)
            else:
                self._remove(awaited.owner_id, index)
                self._let_down(awaited, LEADER_ENDED)

    def problems(self, requests: dict[str, Request]) -> list[str]:
        """What is wrong; empty where everyone who is waited for is alive and waits himself."""
        found = []
        for awaited in self._by_name.values():
            for request in (awaited.leader, *awaited.followers):
                if requests.get(request.request_id) is not request or request.remote is None:
                    found.append(f"request {request.request_id} does not wait for block {awaited.index} any more")
            found.extend(
                f"request {request.request_id} does not know that it follows block {awaited.index}"
                for request in awaited.followers
                if request.remote is not None and awaited.index not in request.remote.followed
            )
        num_followed = sum(len(request.remote.followed) for request in requests.values() if request.remote is not None)
        if num_followed != sum(len(awaited.followers) for awaited in self._by_name.values()):
            found.append("a request follows a block that nobody fetches")
        if len(self._by_name) != len(self._by_owner):
            found.append(f"{len(self._by_name)} awaited blocks, {len(self._by_owner)} of which have an owner")
        return found

    # ------------------------------------------------------------------------------------------ internals

    def _lead(self, request: Request, index: int) -> None:
        awaited = _Awaited(request.block_hashes[index], index, request.request_id, request)
        self._by_name[awaited.name] = awaited
        self._by_owner[awaited.owner_id, index] = awaited

    def _remove(self, owner_id: str, index: int) -> _Awaited | None:
        awaited = self._by_owner.pop((owner_id, index), None)
        if awaited is not None:
            del self._by_name[awaited.name]
        return awaited

    def _hand_on(self, awaited: _Awaited) -> None:
        """The first follower leads from here on, with the block that the bytes go to."""
        heir, index = awaited.followers.pop(0), awaited.index
        self._blocks.take_over(heir, index, awaited.leader.block_ids[index])
        awaited.leader = heir
        if heir.remote is not None:
            heir.remote.followed.discard(index)
            heir.remote.in_flight.add(index)

    def _let_down(self, awaited: _Awaited, failure: str) -> None:
        for request in awaited.followers:
            if request.remote is not None:
                request.remote.lose([awaited.index], failure)
                request.remote.is_let_down = True
                self._touched[request.request_id] = None
