"""The candidates of one role for one request, of which few are looked at. Pure.

Without a cached prefix, a prompt costs the same on all workers of a group, so they come in the order of their waits.
Those that have as much of a prompt as others, but not the rest of their group, form a level: a small one is looked at
worker by worker, and of a large one as many as are asked for, in the order of their waits. A walk along an order ends
where nothing can come that is better than what was found.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import overload

from common.types import WorkerRole
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Entry, Fleet, Group, Key, Order
from router.fleet.prefix_index import Level, levels_of
from router.policy.base import Candidate, Candidates, RoutingRequest
from router.policy.costs import SECONDS, TOKENS, Costs, first_token_s, wait_of
from router.policy.least_load import load_order, load_score, order_by_wait

FEW = 16  # workers of one level that are all looked at

_Found = tuple[float, float, float, bool, int, int]
"""What a candidate costs, its load order, whether its turn is over, its position, and its cached tokens."""


class FleetCandidates(Candidates):
    """Workers of some groups of a fleet."""

    def __init__(
        self,
        request: RoutingRequest,
        fleet: Fleet,
        groups: Sequence[Group],
        costs: Costs,
        roles: frozenset[WorkerRole],
        work: Callable[[Endpoint, int, int], float],
        turn: int,
        *,
        without: Collection[int] = (),
        only: int | None = None,
    ) -> None:
        """`roles` that candidates may have. `work`: what it costs a worker to get `num_missing` tokens of the prompt
        after `num_cached`. `turn`: how many decisions were made before. `without`: positions of workers of `groups`
        that do not count; `only`: that of the one that does."""
        self._request = request
        self._fleet = fleet
        self._groups = groups
        self._costs = costs
        self._roles = roles
        self._work = work
        self._without = without
        self._only = only
        self._works: dict[tuple[int, int], float] = {}
        self._positions = fleet.positions(groups) if only is None else [only]
        self._left_out = sorted([bisect_left(self._positions, one) for one in without])
        self._num = len(self._positions) - len(self._left_out)
        self._turn = turn % self._num if self._num else 0
        self._first = self._positions[self._index(0)] if self._num else 0

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._num))]
        if not -self._num <= index < self._num:
            raise IndexError(index)
        return self._candidate(self._positions[self._index(index % self._num)])

    def of(self, address: str) -> Candidate | None:
        member = self._fleet.member(address)
        return self._candidate(member.position) if member and self._has(member.group, member.position) else None

    @property
    def addresses(self) -> Sequence[str]:
        return self._fleet.addresses(self._roles)

    @property
    def mean_load(self) -> float:
        if self._only is not None:
            return load_score(self._fleet.at(self._only).endpoint)
        total = sum([group.total(load_score) for group in self._groups])
        return (total - sum([load_score(self._fleet.at(one).endpoint) for one in self._without])) / self._num

    def soonest(self, num: int) -> Sequence[Candidate]:
        key = _by_wait_in_seconds if self._costs.in_seconds else _by_wait_in_tokens
        return [self._candidate(one[4], one[5]) for one in self._best(key, num, with_work=True)]

    def soonest_computed(self, num: int) -> Sequence[tuple[Candidate, float]]:
        return [(self._candidate(one[4], one[5]), one[0]) for one in self._best(_by_first_token, num, with_work=True)]

    def least_loaded(self, num: int) -> Sequence[Candidate]:
        key = _by_load_in_seconds if self._costs.in_seconds else _by_load_in_tokens
        return [self._candidate(one[4]) for one in self._best(key, num, with_work=False)]

    def _index(self, index: int) -> int:
        """Among `_positions`, of the candidate that is `index` after the one whose turn it is."""
        index = (self._turn + index) % self._num
        for left_out in self._left_out:
            index += left_out <= index
        return index

    def _has(self, group: Group, position: int) -> bool:
        if self._only is not None:
            return position == self._only
        return group in self._groups and position not in self._without

    def _candidate(self, position: int, num_cached: int | None = None) -> Candidate:
        member, request, costs = self._fleet.at(position), self._request, self._costs
        endpoint = member.endpoint
        if num_cached is None:
            blocks = 0 if request.in_place else request.cached_blocks.get(endpoint.address, 0)
            num_cached = blocks * endpoint.block_size
        missing, work = max(request.num_prompt_tokens - num_cached, 1), self._work_of(member.group, num_cached)
        return Candidate(endpoint, num_cached, missing, wait_of(endpoint, costs), work, costs.in_seconds)

    def _work_of(self, group: Group, num_cached: int) -> float:
        """The same for all workers of `group`."""
        name = id(group), num_cached
        if (work := self._works.get(name)) is None:
            missing = max(self._request.num_prompt_tokens - num_cached, 1)
            work = self._works[name] = self._work(group.example, missing, num_cached)
        return work

    def _best(self, key: Key, num: int, *, with_work: bool) -> list[_Found]:
        """The first `num` by cost and load order, then by turn. `key`: what a worker costs before the request's own
        work, and its load order."""
        if self._only is not None:
            num_cached = self._candidate(self._only).num_cached_tokens
            return [(0.0, 0.0, 0.0, False, self._only, num_cached)]
        levels = levels_of(self._request.cached_blocks) if with_work and not self._request.in_place else ()
        walk = _Walk(num, self._first, {*self._without})
        large: list[Level] = []
        for level in levels:
            if len(level.workers) > FEW:
                large.append(level)
                continue
            for address in level.workers:
                member = self._fleet.member(address)
                if member and self._has(member.group, member.position):
                    num_cached = level.num_blocks * member.endpoint.block_size
                    entry = member.group.order(key).entry_of[member.position]
                    walk.look_at(entry, self._work_of(member.group, num_cached), num_cached)
                    walk.passed.add(member.position)
        for level in large:
            for group in self._groups:
                num_cached = level.num_blocks * group.example.block_size
                work = partial(self._work_of, group, num_cached)
                walk.along(group, group.order(key), work, num_cached, level.workers)
        for group in self._groups:
            of_all: Callable[[], float] = partial(self._work_of, group, 0) if with_work else float
            walk.along(group, group.order(key), of_all, 0, None, [level.workers for level in large])
        return walk.found


class _Walk:
    """Finds the best candidates in several orders."""

    __slots__ = ("_first", "_num", "found", "passed")

    def __init__(self, num: int, first: int, passed: set[int]) -> None:
        """`first`: the position whose turn it is. `passed`: those that are not looked at."""
        self.found: list[_Found] = []  # best first
        self.passed = passed
        self._num = num
        self._first = first

    def look_at(self, entry: Entry, work: float, num_cached: int) -> None:
        cost, first, second, position = entry
        one = cost + work, first, second, position < self._first, position, num_cached
        found = self.found
        if len(found) < self._num:
            insort(found, one)
        elif one < found[-1]:
            found.pop()
            insort(found, one)

    def _may_have_any(
        self, group: Group, order: Order, only: Collection[str] | None, others: Sequence[Collection[str]]
    ) -> bool:
        """False if `along` would find nothing. Found before the work is, which takes long in seconds: each worker with
        a model of time of its own is a group."""
        if len(self.found) == self._num and order.entries[0][0] > self.found[-1][0]:
            return False
        return len(order.entries) > FEW or any(
            entry[3] not in self.passed
            and (only is None or group.endpoints[entry[3]].address in only)
            and not any(group.endpoints[entry[3]].address in one for one in others)
            for entry in order.entries
        )

    def along(
        self,
        group: Group,
        order: Order,
        work_of: Callable[[], float],
        num_cached: int,
        only: Collection[str] | None,
        others: Sequence[Collection[str]] = (),
    ) -> None:
        """Looks at workers of `only`, or at those that are in none of `others`, in their order."""
        if not self._may_have_any(group, order, only, others):
            return
        entries, passed, found, num = order.entries, self.passed, self.found, self._num
        work = work_of()
        start, end = 0, len(entries)
        while start < end:
            cost, first, second, _ = entries[start]
            if len(found) == num:
                limit = found[-1]
                if cost + work > limit[0]:
                    return
                if (cost + work, first, second) > limit[:3]:  # and so are all others of this cost
                    start = bisect_right(entries, (cost, inf), start)
                    continue
            # Those that are equal: the first of them is the one whose turn it is.
            stop = start + 1
            if stop < end and entries[stop][:3] == (cost, first, second):
                stop = bisect_right(entries, (cost, first, second, inf), stop)
                turn = bisect_left(entries, (cost, first, second, self._first), start, stop)
                equal: Iterable[int] = chain(range(turn, stop), range(start, turn))
            else:
                equal = (start,)
            left = num
            for at in equal:
                entry = entries[at]
                if entry[3] in passed:
                    continue
                if only is not None or others:
                    address = group.endpoints[entry[3]].address
                    if (only is not None and address not in only) or any(address in one for one in others):
                        continue
                self.look_at(entry, work, num_cached)
                left -= 1
                if not left:
                    break
            start = stop


def _by_wait_in_tokens(endpoint: Endpoint) -> tuple[float, float, float]:
    return (wait_of(endpoint, TOKENS), *load_order(endpoint))


def _by_wait_in_seconds(endpoint: Endpoint) -> tuple[float, float, float]:
    wait = wait_of(endpoint, SECONDS)
    return (wait, *order_by_wait(endpoint, wait))


def _by_first_token(endpoint: Endpoint) -> tuple[float, float, float]:
    """Of a newcomer that lacks nothing."""
    return (first_token_s(endpoint, 1, 0, inf), *load_order(endpoint))


def _by_load_in_tokens(endpoint: Endpoint) -> tuple[float, float, float]:
    return (0, *load_order(endpoint))


def _by_load_in_seconds(endpoint: Endpoint) -> tuple[float, float, float]:
    return (0, *order_by_wait(endpoint, wait_of(endpoint, SECONDS)))
