"""The workers of a router, kept in the orders in which decisions look for them. Pure.

A decision must not look at each of a thousand workers. So workers that differ in nothing but their load form a group:
whether a request may go there, and what its prompt costs there, is found once for all of them. Within a group, workers
stand in orders by the keys that policies name, and a worker whose load changes moves to its new place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from common.types import WorkerRole
from router.fleet.endpoint import Endpoint

Key = Callable[[Endpoint], tuple[float, float, float]]
"""What workers are ordered by, least first. The same function each time: orders are kept by it."""
Entry = tuple[float, float, float, int]
"""A worker's key, then its position. Of equal keys, the position decides."""

LAST = 2**32  # is added to the positions of suspended workers: they come after all others
MAX_REMEMBERED = 256

ValueT = TypeVar("ValueT")


class Order:
    """The workers of a group by one key."""

    __slots__ = ("_key", "entries", "entry_of")

    def __init__(self, key: Key, endpoints: Iterable[tuple[int, Endpoint]]) -> None:
        self._key = key
        self.entry_of: dict[int, Entry] = {position: (*key(one), position) for position, one in endpoints}
        self.entries = sorted(self.entry_of.values())

    def put(self, position: int, endpoint: Endpoint) -> None:
        before, after = self.entry_of.get(position), (*self._key(endpoint), position)
        if before == after:
            return
        if before is not None:
            del self.entries[bisect_left(self.entries, before)]
        insort(self.entries, after)
        self.entry_of[position] = after

    def drop(self, position: int) -> None:
        del self.entries[bisect_left(self.entries, self.entry_of.pop(position))]


class Group:
    """Workers that differ in nothing but their load, by position."""

    __slots__ = ("_orders", "_positions", "_totals", "endpoints", "example")

    def __init__(self, example: Endpoint) -> None:
        self.example = example  # stands for all: its load says nothing
        self.endpoints: dict[int, Endpoint] = {}
        self._orders: dict[Key, Order] = {}
        self._totals: dict[Callable[[Endpoint], int], int] = {}
        self._positions: list[int] | None = None

    def __len__(self) -> int:
        return len(self.endpoints)

    def put(self, position: int, endpoint: Endpoint) -> None:
        if (before := self.endpoints.get(position)) is None:
            self._positions = None
        for of in self._totals:
            self._totals[of] += of(endpoint) - (of(before) if before is not None else 0)
        self.endpoints[position] = endpoint
        for order in self._orders.values():
            order.put(position, endpoint)

    def drop(self, position: int) -> None:
        before, self._positions = self.endpoints.pop(position), None
        for of in self._totals:
            self._totals[of] -= of(before)
        for order in self._orders.values():
            order.drop(position)

    def positions(self) -> list[int]:
        """Ascending. Not to be changed."""
        if self._positions is None:
            self._positions = sorted(self.endpoints)
        return self._positions

    def order(self, key: Key) -> Order:
        if (order := self._orders.get(key)) is None:
            order = self._orders[key] = Order(key, self.endpoints.items())
        return order

    def orders(self) -> Iterable[Order]:
        """Those that were asked for."""
        return self._orders.values()

    def total(self, of: Callable[[Endpoint], int]) -> int:
        """The sum of what `of` says of each worker."""
        if (total := self._totals.get(of)) is None:
            total = self._totals[of] = sum(map(of, self.endpoints.values()))
        return total


@dataclass(slots=True, eq=False)
class Member:
    """A worker of a fleet."""

    endpoint: Endpoint
    position: int  # in configured order; of a suspended worker after all others
    group: Group
    traits: tuple[Hashable, ...]


class Fleet:
    """In configured order, which decides between equals. A worker is named by its address."""

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self._members: dict[str, Member] = {}
        self._ordered: list[Member] = []
        self._groups: dict[tuple[Hashable, ...], Group] = {}
        self._remembered: dict[Hashable, object] = {}
        self._addresses: dict[frozenset[WorkerRole], Sequence[str]] = {}
        for endpoint in endpoints:
            self._ordered.append(self._join(endpoint, len(self._ordered)))

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def groups(self) -> Iterable[Group]:
        return self._groups.values()

    def endpoints(self) -> list[Endpoint]:
        """In configured order."""
        return [one.endpoint for one in self._ordered]

    def member(self, address: str) -> Member | None:
        return self._members.get(address)

    def has_all(self, addresses: frozenset[str]) -> bool:
        """Whether all of them are workers of the fleet."""
        return self.remembered(("has all", addresses), lambda: addresses <= self._members.keys())

    def addresses(self, roles: frozenset[WorkerRole]) -> Sequence[str]:
        """Of all workers that have one of these roles, in configured order. The same object each time."""
        if (found := self._addresses.get(roles)) is None:
            found = tuple([one.endpoint.address for one in self._ordered if one.endpoint.role in roles])
            self._addresses[roles] = found
        return found

    def incarnations(self, wanted: Iterable[tuple[str, str]]) -> list[Member]:
        """Those that are there, by `Endpoint.incarnation`."""
        return [
            member
            for address, epoch in wanted
            if (member := self._members.get(address)) is not None and member.endpoint.epoch == epoch
        ]

    def at(self, position: int) -> Member:
        return self._ordered[position % LAST]

    def positions(self, groups: Sequence[Group]) -> list[int]:
        """Of all workers of these groups, ascending. Not to be changed."""
        if len(groups) == 1:
            return groups[0].positions()
        name = "positions", *map(id, groups)
        if (found := self._remembered.get(name)) is not None:
            return cast("list[int]", found)
        return self.remembered(name, lambda: sorted(one for group in groups for one in group.endpoints))

    def remembered(self, name: Hashable, find: Callable[[], ValueT]) -> ValueT:
        """What `find` returns, never None: found anew only after a worker went from one group to another."""
        if (kept := self._remembered.get(name)) is not None:
            return cast("ValueT", kept)
        if len(self._remembered) >= MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[name] = found = find()
        return found

    def update(self, endpoint: Endpoint) -> None:
        """Takes in what is known of the worker at this address by now. Raises `KeyError` for an address that is not the
        fleet's."""
        member = self._members[endpoint.address]
        if endpoint is member.endpoint:
            return
        if _traits(endpoint) == member.traits:
            member.endpoint = endpoint
            member.group.put(member.position, endpoint)
            return
        member.group.drop(member.position)
        if not member.group:
            del self._groups[member.traits]
        if endpoint.role is not member.endpoint.role:
            self._addresses.clear()
        self._ordered[member.position % LAST] = self._join(endpoint, member.position % LAST)

    def update_load(self, endpoint: Endpoint) -> None:
        """`update`, in less time, of a worker of which nothing but the load is news."""
        member = self._members[endpoint.address]
        member.endpoint = endpoint
        member.group.put(member.position, endpoint)

    def _join(self, endpoint: Endpoint, number: int) -> Member:
        self._remembered.clear()
        traits = _traits(endpoint)
        if (group := self._groups.get(traits)) is None:
            group = self._groups[traits] = Group(endpoint)
        member = Member(endpoint, number + LAST if endpoint.suspended else number, group, traits)
        group.put(member.position, endpoint)
        self._members[endpoint.address] = member
        return member


def _traits(endpoint: Endpoint) -> tuple[Hashable, ...]:
    """What workers of a group have in common. Models of time are compared by identity: they are large."""
    return (
        endpoint.role,
        endpoint.has_both,
        endpoint.state,
        endpoint.excluded,
        bool(endpoint.suspended),
        endpoint.fingerprint,
        endpoint.parameters,
        endpoint.block_size,
        endpoint.max_model_len,
        endpoint.splits,
        id(endpoint.batch_time),
    )
