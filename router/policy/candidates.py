"""The candidates of one role for one request, of which few are looked at. Pure.

Without a cached prefix, a prompt costs the same on all workers of a group, so they come in the order of their waits.
Those that have as much of a prompt as others, but not the rest of their group, form a level: a small one is looked at
worker by worker, and of a large one as many as are asked for, in the order of their waits. A walk along an order ends
where nothing can come that is better than what was found.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import overload

from common.types import WorkerRole
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Entry, Fleet, Group, Key, Member, Order
from router.fleet.prefix_index import Level, levels_of
from router.policy.base import Candidate, Candidates, RoutingRequest
from router.policy.costs import SECONDS, TOKENS, Costs, first_token_s
from router.policy.least_load import load_order, load_score, order_by_wait

FEW = 16  # workers of one level that are all looked at
MOSTLY = 3  # candidates suffice to find who has a first token soonest

_Found = tuple[float, float, float, bool, int, int, float, float]
"""What a candidate costs, its load order, whether its turn is over, its position, its cached tokens; and what it costs
before the request's own work, and by this."""


class PromptLevels:
    """Which workers of a fleet have leading blocks of a prompt: found once for all roles, if anybody asks."""

    __slots__ = ("_fleet", "_request", "few", "have_all", "is_known", "large")

    def __init__(self, request: RoutingRequest, fleet: Fleet) -> None:
        self._request = request
        self._fleet = fleet
        self.few: list[tuple[int, Member]] = []  # those of small levels, each with its number of blocks
        self.large: list[Level] = []
        self.have_all = False  # as many workers as the fleet has have some of the prompt, so none has nothing of it
        self.is_known = False

    def known(self) -> PromptLevels:
        if not self.is_known:
            self.is_known = True
            if not self._request.in_place:
                self._find()
        return self

    def _find(self) -> None:
        member_at, few = self._fleet.member, self.few
        num_workers = 0
        for level in levels_of(self._request.cached_blocks):
            num_workers += (num := len(level.workers))
            if num > FEW:
                self.large.append(level)
                continue
            for address in level.workers:
                if (member := member_at(address)) is not None:
                    few.append((level.num_blocks, member))
        self.have_all = num_workers >= len(self._fleet)


class FleetCandidates(Candidates):
    """Workers of some groups of a fleet."""

    __slots__ = (
        "_costs",
        "_first",
        "_fleet",
        "_groups",
        "_left_out",
        "_levels",
        "_num",
        "_only",
        "_positions",
        "_request",
        "_roles",
        "_turn",
        "_without",
        "_work",
        "_works",
    )

    def __init__(
        self,
        request: RoutingRequest,
        fleet: Fleet,
        groups: Sequence[Group],
        costs: Costs,
        roles: frozenset[WorkerRole],
        work: Callable[[Endpoint, int, int], float],
        turn: int,
        levels: PromptLevels,
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
        self._left_out = sorted([bisect_left(self._positions, one) for one in without]) if without else ()
        self._num = len(self._positions) - len(self._left_out)
        self._levels = levels
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
        in_seconds, at, num_prompt = self._costs.in_seconds, self._fleet.at, self._request.num_prompt_tokens
        found = self._best(_by_wait_in_seconds if in_seconds else _by_wait_in_tokens, num, with_work=True)
        return [
            Candidate(at(position).endpoint, cached, max(num_prompt - cached, 1), wait, work, in_seconds)
            for _, _, _, _, position, cached, wait, work in found
        ]

    def soonest_computed(self, num: int) -> Iterator[tuple[Candidate, float]]:
        num_found = 0
        for most in (min(MOSTLY, num), num):  # hardly anybody asks for all
            if num_found in (0, MOSTLY):
                for one in self._best(_by_first_token, most, with_work=True)[num_found:]:
                    num_found += 1
                    yield self._candidate(one[4], one[5], one[7]), one[0]

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

    def _candidate(self, position: int, num_cached: int | None = None, work: float | None = None) -> Candidate:
        member, request, costs = self._fleet.at(position), self._request, self._costs
        endpoint = member.endpoint
        if num_cached is None:
            blocks = 0 if request.in_place else request.cached_blocks.get(endpoint.address, 0)
            num_cached = blocks * endpoint.block_size
        missing = max(request.num_prompt_tokens - num_cached, 1)
        if work is None:
            work = self._work_of(member.group, num_cached)
        return Candidate(endpoint, num_cached, missing, costs.wait(endpoint), work, costs.in_seconds)

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
            one = self._candidate(self._only)
            return [(0.0, 0.0, 0.0, False, self._only, one.num_cached_tokens, one.wait, one.work)]
        walk = _Walk(num, self._first, set(self._without))
        groups, few = self._groups, list[tuple[int, Member]]()
        large: Sequence[Level] = ()
        if with_work:
            levels = self._levels.known()
            large = levels.large
            for num_blocks, member in levels.few:
                if member.group in groups and member.position not in walk.passed:
                    few.append((num_blocks, member))
            walk.passed.update([member.position for _, member in few])
        for level in large:
            for group in groups:
                num_cached = level.num_blocks * group.example.block_size
                work = partial(self._work_of, group, num_cached)
                walk.along(group, group.order(key), work, num_cached, level.workers)
        others = [level.workers for level in large]
        is_done = with_work and self._levels.have_all and len(walk.found) == num
        for group in () if is_done else groups:
            of_all: Callable[[], float] = partial(self._work_of, group, 0) if with_work else float
            walk.along(group, group.order(key), of_all, 0, None, others)
        for num_blocks, member in few:  # the last: of most of them, the wait alone is too long
            entry = member.group.order(key).entry_of[member.position]
            if walk.may_take(entry[0]):
                num_cached = num_blocks * member.group.example.block_size
                walk.look_at(entry, self._work_of(member.group, num_cached), num_cached)
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
        one = cost + work, first, second, position < self._first, position, num_cached, cost, work
        found = self.found
        if len(found) == self._num:
            if one > found[-1]:
                return
            found.pop()
        insort(found, one)

    def may_take(self, cost: float) -> bool:
        """Whether one that costs so much may be among the best."""
        return len(self.found) < self._num or cost <= self.found[-1][0]

    def _may_have_any(
        self, group: Group, order: Order, only: Collection[str] | None, others: Sequence[Collection[str]]
    ) -> bool:
        """False if `along` would find nothing. Found before the work is, which takes long in seconds: each worker with
        a model of time of its own is a group."""
        if len(self.found) == self._num and order.entries[0][0] > self.found[-1][0]:
            return False
        return len(order.entries) > FEW or any(
            entry[3] not in self.passed and _is_of(group.endpoints[entry[3]].address, only, others)
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
        entries, passed, found, num, endpoints = order.entries, self.passed, self.found, self._num, group.endpoints
        work = work_of()
        start, end = 0, len(entries)
        while start < end:
            entry = entries[start]
            cost, first, second, position = entry
            if len(found) == num:
                limit = found[-1]
                if cost + work > limit[0]:
                    return
                if cost + work == limit[0] and (first, second) > limit[1:3]:  # and so are all others of this cost
                    start = bisect_right(entries, (cost, inf), start)
                    continue
            stop = start + 1
            if stop == end or entries[stop][0] != cost or entries[stop][:3] != entry[:3]:
                if position not in passed and _is_of(endpoints[position].address, only, others):
                    self.look_at(entry, work, num_cached)
                start = stop
                continue
            # Those that are equal: the first of them is the one whose turn it is.
            stop = bisect_right(entries, (cost, first, second, inf), stop)
            turn = bisect_left(entries, (cost, first, second, self._first), start, stop)
            left = num
            for at in chain(range(turn, stop), range(start, turn)):
                entry = entries[at]
                if entry[3] in passed or not _is_of(endpoints[entry[3]].address, only, others):
                    continue
                self.look_at(entry, work, num_cached)
                left -= 1
                if not left:
                    break
            start = stop


def _is_of(address: str, only: Collection[str] | None, others: Sequence[Collection[str]]) -> bool:
    """Whether it is one of `only`, or in none of `others`."""
    if only is not None:
        return address in only
    for one in others:  # noqa: SIM110 - quicker than a generator
        if address in one:
            return False
    return True


def _by_wait_in_tokens(endpoint: Endpoint) -> tuple[float, float, float]:
    return (TOKENS.wait(endpoint), *load_order(endpoint))


def _by_wait_in_seconds(endpoint: Endpoint) -> tuple[float, float, float]:
    wait = SECONDS.wait(endpoint)
    return (wait, *order_by_wait(endpoint, wait))


def _by_first_token(endpoint: Endpoint) -> tuple[float, float, float]:
    """Of a newcomer that lacks nothing."""
    return (first_token_s(endpoint, 1, 0, inf), *load_order(endpoint))


def _by_load_in_tokens(endpoint: Endpoint) -> tuple[float, float, float]:
    return (0, *load_order(endpoint))


def _by_load_in_seconds(endpoint: Endpoint) -> tuple[float, float, float]:
    return (0, *order_by_wait(endpoint, SECONDS.wait(endpoint)))
