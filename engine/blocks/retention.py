"""Names that tenants asked to have evicted after others for a time. Pure: time comes in as an argument.

A retained block is evicted only if no other block is left: retention orders eviction, and no more. So retention delays
no request and preempts none. Each tenant may retain a bounded number of names, and so may all tenants together. Beyond
a tenant's bound its oldest retained names give way; beyond the common bound, those of the tenant that has the most. The
end of a prompt gives way before its beginning, which is useful without the end.

Names are only known here while a block of this worker has them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, KeysView, Sequence


class Retention:
    def __init__(self, max_blocks: int, max_tenant_blocks: int) -> None:
        """`max_blocks` of all tenants, `max_tenant_blocks` of each."""
        self._max_blocks = max_blocks
        self._max_tenant_blocks = min(max_tenant_blocks, max_blocks)
        self._tenants: dict[str, OrderedDict[bytes, float]] = {}  # names: until when; the next to give way first
        self._holders: dict[bytes, set[str]] = {}  # of each name: tenants
        self.ends: list[
            tuple[float, str, bytes]
        ] = []  # heap, those that were put off or are over too; not empty while a name is retained
        self.now = 0.0  # to be set before each step

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, name: bytes) -> bool:
        return name in self._holders

    def names(self) -> KeysView[bytes]:
        return self._holders.keys()

    def retain(self, tenant: str, names: Sequence[bytes], seconds: float) -> tuple[Collection[bytes], int]:
        """Retains the names of a prompt's blocks, first one first, from `now` on; nothing is retained for a shorter
        time than before. Returns (names whose retention began or ended, how many names lost
        their place); both may be of these or others."""
        taken, until = names[: self._max_tenant_blocks], self.now + seconds
        held = self._tenants.setdefault(tenant, OrderedDict())
        changed: dict[bytes, None] = {}
        for name in reversed(taken):
            if name not in self._holders:
                changed[name] = None
            self._holders.setdefault(name, set()).add(tenant)
            if name not in held or until > held[name]:
                held[name] = until
                heapq.heappush(self.ends, (until, tenant, name))
            held.move_to_end(name)
        num_lost = len(names) - len(taken)
        while len(held) > self._max_tenant_blocks or len(self._holders) > self._max_blocks:
            largest = tenant
            if len(held) <= self._max_tenant_blocks:
                largest = max(self._tenants, key=lambda one: len(self._tenants[one]))
            name = next(iter(self._tenants[largest]))
            self._drop(largest, name)
            num_lost += 1
            if name not in self._holders:
                changed[name] = None
        if not held:
            self._tenants.pop(tenant, None)
        self._forget_old_ends()
        return changed, num_lost

    def release(self, tenant: str, names: Sequence[bytes]) -> list[bytes]:
        """Ends the tenant's retention of these names. Returns those that no other tenant retains."""
        ended = [name for name in names if name in self._tenants.get(tenant, ())]
        for name in ended:
            self._drop(tenant, name)
        return [name for name in ended if name not in self._holders]

    def expire(self, now: float) -> list[bytes]:
        """Returns the names whose time is over."""
        self.now = now
        over = []
        while self.ends and self.ends[0][0] <= now:
            until, tenant, name = heapq.heappop(self.ends)
            if tenant in self._tenants and self._tenants[tenant].get(name) == until:
                self._drop(tenant, name)
                if name not in self._holders:
                    over.append(name)
        return over

    def forget(self, name: bytes) -> bool:
        """Forgets a name that no block of this worker has any more. Returns whether it was retained."""
        tenants = list(self._holders.get(name, ()))
        for tenant in tenants:
            self._drop(tenant, name)
        return bool(tenants)

    def clear(self) -> None:
        self._tenants.clear()
        self._holders.clear()
        self.ends.clear()

    # ------------------------------------------------------------------------------------------- internals

    def _drop(self, tenant: str, name: bytes) -> None:
        held = self._tenants[tenant]
        del held[name]
        if not held:
            del self._tenants[tenant]
        holders = self._holders[name]
        holders.remove(tenant)
        if not holders:
            del self._holders[name]

    def _forget_old_ends(self) -> None:
        if len(self.ends) > 2 * sum(map(len, self._tenants.values())) + 64:
            self.ends = [
                (until, tenant, name) for tenant, held in self._tenants.items() for name, until in held.items()
            ]
            heapq.heapify(self.ends)

    def check_integrity(self, names: Collection[bytes]) -> list[str]:
        """What is wrong, given all names that blocks of this worker have."""
        problems = [f"{name.hex()} is retained, but is not here" for name in self._holders if name not in names]
        pairs = {(tenant, name) for tenant, held in self._tenants.items() for name in held}
        if pairs != {(tenant, name) for name, holders in self._holders.items() for tenant in holders}:
            problems.append("tenants and retained names differ")
        if not {(until, t, n) for t, held in self._tenants.items() for n, until in held.items()} <= set(self.ends):
            problems.append("something is retained without an end")
        if len(self._holders) > self._max_blocks:
            problems.append(f"{len(self._holders)} blocks are retained, and {self._max_blocks} may be")
        return problems
