"""Limits of what is in flight: all requests, those of one key, and bytes of their bodies.

What is too much is refused at once, with a delay after which to try again: nothing queues here.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass

from common import metrics
from common.errors import OverloadedError
from router.limits.ledger import Ledger, LocalLedger

MIB = 2**20
MIN_DELAY_S = 1.0
MAX_DELAY_S = 30.0
TOLD_BYTES = 2**16
MESSAGE_BYTES = 4 * MIB  # gRPC's own default, and enough for a context of 250,000 tokens of most languages


@dataclass(slots=True, frozen=True, kw_only=True)
class GateLimits:
    max_requests: int = 1024  # in flight; each choice of an answer counts as one
    max_requests_per_key: int | None = None  # half of max_requests if None
    max_buffered_bytes: int = 256 * MIB  # bodies of requests in flight, and answers kept until they are whole
    max_message_bytes: int = MESSAGE_BYTES  # of one gRPC message, before anything is known of it
    receive_timeout_s: float = 30.0  # for a request's body to come
    answer_timeout_s: float = 660.0  # for a whole call: a client that reads too slowly is cut off


class Gate:
    """Shared by all calls of one kind."""

    def __init__(
        self,
        limits: GateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        """`ledger` holds what is in flight."""
        self.limits = limits or GateLimits()
        self._ledger = ledger or LocalLedger()
        self._clock = clock
        self._num_refused = 0.0  # of late: as many are forgotten in a second as there are places
        self._refused_at = clock()
        self._max_per_key = self.limits.max_requests_per_key or max(1, self.limits.max_requests // 2)
        # gRPC takes memory for a whole message once it is asked to read it, and says its size only afterwards.
        num_reads = max(
            1, self.limits.max_buffered_bytes // self.limits.max_message_bytes // self._ledger.num_processes
        )
        self._reads = asyncio.Semaphore(num_reads)
        self._reads_by_key: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(max(1, num_reads // 2))
        )

    def requests(self, key: str, num: int = 1) -> AbstractContextManager[None]:
        """Use it around all work for `num` requests. `key` is empty if no keys are required. Raises
        `OverloadedError`."""
        return _Places(self, key, num)

    def take(self, key: str, num: int) -> None:
        limits, ledger = self.limits, self._ledger
        if not ledger.take("requests", num, limits.max_requests):
            raise self._too_much("requests", f"the router has {limits.max_requests} requests in flight")
        try:
            if key and not ledger.take(f"requests of key {key}", num, self._max_per_key):
                raise self._too_much("key", f"this key has {self._max_per_key} requests in flight, the most for one")
        except BaseException:
            ledger.give("requests", num)
            raise

    def check(self, key: str) -> None:
        """Raises `OverloadedError` if there is no place for one more request now."""
        with self.requests(key):
            pass

    def give(self, key: str, num: int) -> None:
        if key:
            self._ledger.give(f"requests of key {key}", num)
        self._ledger.give("requests", num)

    def reading(self, key: str) -> AbstractAsyncContextManager[None]:
        """Use it around the read of one message; waits for its turn. A key whose messages never come leaves room for
        others."""
        return _Reading(self._reads, self._reads_by_key[key]) if key else self._reads

    def bytes_held(self) -> HeldBytes:
        """Use it around the time in which a request's body or its answer is held."""
        return HeldBytes(self)

    def hold(self, num: int) -> None:
        if not self._ledger.take("bytes", num, self.limits.max_buffered_bytes):
            total = self._ledger.total("bytes")
            raise self._too_much("bytes", f"the router holds {total} bytes of requests and answers")

    def release(self, num: int) -> None:
        self._ledger.give("bytes", num)

    def _too_much(self, reason: str, message: str) -> OverloadedError:
        """The refusal, with a delay that spreads the retries: in each second no more come back than there are
        places."""
        metrics.router_refused.labels(reason).inc()
        now = self._clock()
        self._num_refused = max(0.0, self._num_refused - (now - self._refused_at) * self.limits.max_requests)
        self._refused_at = now
        delay_s = min(MIN_DELAY_S + self._num_refused / self.limits.max_requests, MAX_DELAY_S)
        self._num_refused += 1
        return OverloadedError(f"{message}; try again later", delay_s)


# Each request enters some of these: as generators they would cost three times as much.


class _Places:
    __slots__ = ("_gate", "_key", "_num")

    def __init__(self, gate: Gate, key: str, num: int) -> None:
        self._gate = gate
        self._key = key
        self._num = num

    def __enter__(self) -> None:
        self._gate.take(self._key, self._num)

    def __exit__(self, *_: object) -> None:
        self._gate.give(self._key, self._num)


class _Reading:
    __slots__ = ("_of_all", "_of_key")

    def __init__(self, of_all: asyncio.Semaphore, of_key: asyncio.Semaphore) -> None:
        self._of_all = of_all
        self._of_key = of_key

    async def __aenter__(self) -> None:
        await self._of_key.acquire()
        try:
            await self._of_all.acquire()
        except BaseException:
            self._of_key.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._of_all.release()
        self._of_key.release()


class HeldBytes:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._num_untold = 0
        self.num = 0

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.release(self.num)

    def add(self, num: int) -> None:
        """Raises `OverloadedError` if the router holds too much already."""
        self._gate.hold(num)
        self.num += num

    def grow(self, num: int) -> None:
        """Does what `add` does, for what comes in small pieces: the gate is told of `TOLD_BYTES` together."""
        self._num_untold += num
        if self._num_untold >= TOLD_BYTES:
            untold, self._num_untold = self._num_untold, 0
            self.add(untold)
