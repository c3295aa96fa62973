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
from router.fleet.fleet import Entry, Fleet, Group, Key, Member
from router.fleet.prefix_index import Level, Matches
from router.policy.base import Candidate, Candidates, RoutingRequest
from router.policy.costs import SECONDS, TOKENS, Costs, first_token_s
from router.policy.least_load import load_order, load_score, order_by_wait

FEW = 16  # workers of one level that are all looked at

_Found = tuple[float, float, float, bool, int, int, float, float]
"""What a candidate costs, its load order, whether its turn is over, its position, its cached tokens; and what it costs
before the request's own work, and by this."""


class PromptLevels:
    """Which workers of a fleet have leading blocks of a prompt: found once for all roles, if anybody asks."""

    __slots__ = ("_fleet", "_request", "few", "have_all", "in_no_large", "is_known", "is_one", "large")

    def __init__(self, request: RoutingRequest, fleet: Fleet) -> None:
        self._request = request
        self._fleet = fleet
        self.few: list[tuple[int, Member]] = []  # those of small levels, each with its number of blocks
        self.large: list[Level] = []
        self.in_no_large: Callable[[str], bool] | None = None  # whether a worker is in none of them; None: all are
        self.have_all = False  # all workers of the fleet have some of it
        self.is_one = False  # and but one level is large: all that are not in `few` are in that one
        self.is_known = False

    def known(self) -> PromptLevels:
        if not self.is_known:
            self.is_known = True
            if not self._request.in_place:
                self._find()
        return self

    def _find(self) -> None:
        member_at, few = self._fleet.member, self.few
        matches, num_workers = Matches.of(self._request.cached_blocks), 0
        for level in matches.levels:
            num_workers += (num := len(level.workers))
            if num > FEW:
                self.large.append(level)
                continue
            for address in level.workers:
                if (member := member_at(address)) is not None:
                    few.append((level.num_blocks, member))
        self.have_all = num_workers == len(self._fleet) and self._fleet.has_all(matches.workers)
        self.is_one = self.have_all and len(self.large) == 1
        if self.large:
            self.in_no_large = partial(_is_in_none, [level.workers for level in self.large])


def _is_in_none(sets: Sequence[Collection[str]], address: str) -> bool:
    for one in sets:  # noqa: SIM110 - quicker than a generator
        if address in one:
            return False
    return True


class FleetCandidates(Candidates):
    """Workers of some groups of a fleet."""

    __slots__ = (
        "_costs",
        "_few",
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
        # Of `levels.few` those that are candidates, and the positions of these and of `without`.
        self._few: tuple[list[tuple[int, Member]], Collection[int]] | None = None
        self._turn = turn % self._num if self._num else 0
        self._first = self._positions[self._index(0) if without else self._turn] if self._num else 0

    def with_work(self, work: Callable[[Endpoint, int, int], float]) -> FleetCandidates:
        """The same workers, if the prompt costs them this."""
        other = FleetCandidates.__new__(FleetCandidates)
        other._request, other._fleet, other._costs, other._levels = (
            self._request,
            self._fleet,
            self._costs,
            self._levels,
        )
        other._groups, other._roles, other._without, other._only = self._groups, self._roles, self._without, self._only
        other._positions, other._left_out, other._num = self._positions, self._left_out, self._num
        other._turn, other._first, other._few = self._turn, self._first, self._few
        other._work, other._works = work, {}
        return other

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
            Candidate(
                at(position).endpoint, cached, num_prompt - cached if cached < num_prompt else 1, wait, work, in_seconds
            )
            for _, _, _, _, position, cached, wait, work in found
        ]

    def soonest_computed(self, num: int) -> Iterator[tuple[float, Callable[[], Candidate]]]:
        num_found = 0
        for most in (1, num):  # hardly anybody asks for the second
            for one in self._best(_by_first_token, most, with_work=True)[num_found:]:
                num_found += 1
                yield one[0], partial(self._candidate, one[4], one[5], one[7])

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

    def _find_few(self) -> tuple[list[tuple[int, Member]], Collection[int]]:
        few, passed, groups = [], set(self._without), self._groups
        for one in self._levels.known().few:
            member = one[1]
            if member.group in groups and member.position not in passed:
                few.append(one)
                passed.add(member.position)
        self._few = few, passed
        return self._few

    def _best(self, key: Key, num: int, *, with_work: bool) -> list[_Found]:
        """The first `num` by cost and load order, then by turn. `key`: what a worker costs before the request's own
        work, and its load order."""
        if self._only is not None:
            one = self._candidate(self._only)
            return [(0.0, 0.0, 0.0, False, self._only, one.num_cached_tokens, one.wait, one.work)]
        groups = self._groups
        if not with_work:
            walk = _Walk(num, self._first, self._without)
            for group in groups:
                walk.along(group, key, _no_work, 0)
            return walk.found
        levels, (few, passed) = self._levels.known(), self._few or self._find_few()
        walk = _Walk(num, self._first, passed)
        for level in levels.large:
            is_in = None if levels.is_one else level.workers.__contains__
            for group in groups:
                walk.along(group, key, self._work_of, level.num_blocks * group.example.block_size, is_in)
        if not levels.have_all or len(walk.found) < num:
            for group in groups:
                walk.along(group, key, self._work_of, 0, levels.in_no_large)
        for num_blocks, member in few:  # the last: of most of them, the wait alone is too long
            group = member.group
            entry = group.order(key).entry_of[member.position]
            if walk.may_take(entry[0]):
                num_cached = num_blocks * group.example.block_size
                walk.look_at(entry, self._work_of(group, num_cached), num_cached)
        return walk.found


class _Walk:
    """Finds the best candidates in several orders."""

    __slots__ = ("_first", "_num", "_passed", "found")

    def __init__(self, num: int, first: int, passed: Collection[int]) -> None:
        """`first`: the position whose turn it is. `passed`: those that are not looked at."""
        self.found: list[_Found] = []  # best first
        self._passed = passed
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

    def along(
        self,
        group: Group,
        key: Key,
        work_of: Callable[[Group, int], float],
        num_cached: int,
        is_wanted: Callable[[str], bool] | None = None,
    ) -> None:
        """Looks at workers of `group` in the order of `key`: at those whose addresses are wanted, None: at all."""
        entries, endpoints = group.order(key).entries, group.endpoints
        passed, found, num = self._passed, self.found, self._num
        if len(found) == num and entries[0][0] > found[-1][0]:
            return
        # To find the work takes long in seconds, and each worker with a model of time of its own is a group.
        if len(entries) <= FEW:
            rest = [entry[3] for entry in entries if entry[3] not in passed]
            if not rest or (is_wanted is not None and not any(is_wanted(endpoints[one].address) for one in rest)):
                return
        work, turn = work_of(group, num_cached), self._first
        at, end = 0, len(entries)
        while at < end:
            entry = entries[at]
            cost, first, second, position = entry
            if len(found) == num and cost + work >= (limit := found[-1])[0]:
                if cost + work > limit[0]:
                    return
                if (first, second) > limit[1:3]:  # and so are all others of this cost
                    at = bisect_right(entries, (cost, inf), at)
                    continue
            if (beyond := at + num) < end and entries[beyond][0] == cost and entries[beyond][:3] == entry[:3]:
                # More are equal than can be found: the first of them is the one whose turn it is.
                start, at = at, bisect_right(entries, (cost, first, second, inf), beyond)
                middle, left = bisect_left(entries, (cost, first, second, turn), start, at), num
                for one in chain(range(middle, at), range(start, middle)):
                    position = entries[one][3]
                    if position not in passed and (is_wanted is None or is_wanted(endpoints[position].address)):
                        self.look_at(entries[one], work, num_cached)
                        left -= 1
                        if not left:
                            break
                continue
            at += 1
            if position not in passed and (is_wanted is None or is_wanted(endpoints[position].address)):
                if len(found) < num:  # `look_at`, without the call
                    insort(found, (cost + work, first, second, position < turn, position, num_cached, cost, work))
                    continue
                self.look_at(entry, work, num_cached)


def _no_work(group: Group, num_cached: int) -> float:  # noqa: ARG001
    return 0.0


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
