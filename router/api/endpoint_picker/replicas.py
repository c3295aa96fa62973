"""Which routers a proxy may send a request to, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

MAX_NAMED = 4  # for one request: the first, and who is tried if it fails


class Replicas:
    """All replicas of a router by their REST addresses, the own one among them, and how many requests the proxy has
    at each by this one's choice."""

    def __init__(self, own: str, others: Iterable[str] = ()) -> None:
        self._own = own
        self._all: tuple[str, ...] = ()
        self._num_open: Counter[str] = Counter()
        self._turn = 0
        self.set(others)

    @property
    def own(self) -> str:
        return self._own

    def set(self, addresses: Iterable[str]) -> None:
        """All there are now; the own one may be missing."""
        self._all = tuple(dict.fromkeys((self._own, *addresses)))

    def named(self, subset: Collection[str] | None, *, with_own: bool) -> list[str]:
        """Those that a request may go to, the best first: the one with the fewest requests, and of equal ones this
        router, whose choice of workers is newest. `subset`: addresses or bare hosts that the proxy allows; None: all.
        """
        found = [
            one
            for one in self._all
            if (with_own or one != self._own) and (subset is None or one in subset or _host(one) in subset)
        ]
        self._turn += 1
        others = [one for one in found if one != self._own]
        if others:  # equal ones have their turns
            first = self._turn % len(others)
            others = others[first:] + others[:first]
        own = [self._own] if len(others) < len(found) else []
        return sorted((*own, *others), key=self._num_open.__getitem__)[:MAX_NAMED]

    def opened(self, address: str) -> None:
        """The proxy has a request more at `address`."""
        self._num_open[address] += 1

    def closed(self, address: str) -> None:
        self._num_open[address] -= 1
        if not self._num_open[address]:
            del self._num_open[address]

    @property
    def num_open(self) -> int:
        return self._num_open.total()


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
