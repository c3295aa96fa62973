"""Which of several autoscalers acts: the one whose name stands in a Lease that it renews.

Clocks of different machines are never compared. A candidate notes when it last saw the Lease change, by its own clock,
and takes over when it has not changed for the Lease's duration. A leader that could not renew for `RENEW_WITHIN_S`
stops acting, before any other may begin.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from common import metrics
from router.autoscaler.kubernetes import Lease
from router.fleet.discovery.kubernetes import KubernetesError

log = logging.getLogger(__name__)

LEASE_S = 15
RENEW_WITHIN_S = 10.0
EVERY_S = 5.0


class LeaseStore(Protocol):
    async def read_lease(self, name: str) -> Lease | None: ...

    async def write_lease(self, name: str, lease: Lease) -> bool: ...


class Elector:
    """`leads` is true while this process may act. Drive it with `run`, or step by step with `attempt`."""

    def __init__(
        self,
        store: LeaseStore,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._name = name
        self._identity = identity
        self._clock = clock
        self._seen: Lease | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None

    @property
    def leads(self) -> bool:
        return self._renewed_at is not None and self._clock() - self._renewed_at < RENEW_WITHIN_S

    async def run(self) -> None:
        """Leads, or waits to lead, until cancelled; then gives the Lease back, so that the next leader need not
        wait."""
        led = False
        try:
            while True:
                try:
                    async with asyncio.timeout(RENEW_WITHIN_S):
                        await self.attempt()
                except (KubernetesError, TimeoutError) as error:
                    log.warning("the leader's lease was not renewed", extra={"reason": str(error) or "no answer"})
                if self.leads != led:
                    led = self.leads
                    metrics.autoscaler_leads.set(led)
                    log.info("this autoscaler %s", "leads" if led else "follows", extra={"identity": self._identity})
                await asyncio.sleep(EVERY_S)
        finally:
            metrics.autoscaler_leads.set(0)
            await self.resign()

    async def attempt(self) -> None:
        """Renews the Lease, or takes it if its holder let it lapse. Raises `KubernetesError`."""
        asked_at = self._clock()
        lease = await self._store.read_lease(self._name)
        if lease != self._seen or self._seen is None:
            self._seen, self._seen_at = lease, asked_at
        if lease is not None and lease.holder not in ("", self._identity):
            self._renewed_at = None
            if asked_at - self._seen_at <= lease.duration_s:
                return
        mine = Lease(
            holder=self._identity,
            renewed=_now(),
            duration_s=LEASE_S,
            transitions=0 if lease is None else lease.transitions + (lease.holder != self._identity),
            version=None if lease is None else lease.version,
        )
        if await self._store.write_lease(self._name, mine):
            self._renewed_at = asked_at  # counted from before the request: others count from after it
        else:
            self._renewed_at = None

    async def resign(self) -> None:
        if not self.leads:
            return
        self._renewed_at = None
        try:
            async with asyncio.timeout(2):
                lease = await self._store.read_lease(self._name)
                if lease is not None and lease.holder == self._identity:
                    empty = Lease("", _now(), 1, lease.transitions, lease.version)
                    await self._store.write_lease(self._name, empty)
        except (KubernetesError, TimeoutError) as error:
            log.warning("the leader's lease was not given back", extra={"reason": str(error) or "no answer"})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
