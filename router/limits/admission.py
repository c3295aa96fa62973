"""Admits requests: none before there is a worker, and none while the router drains. Counts the requests and how they
ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prometheus_client import Counter

from common import metrics
from common.errors import BatonError, UnavailableError
from router.fleet.registry import Registry
from router.fleet.served_model import ServedModel
from router.limits.clients import ApiClient
from router.limits.demand import Demand
from router.limits.gate import Gate
from router.limits.quotas import Quotas

BYTES_PER_TOKEN = 64  # four letters or so, each escaped as \uXXXX, and then as many again
BODY_OVERHEAD_BYTES = 64 * 2**10
MOST_BODY_BYTES = 64 * 2**20
DEADLINE_SLACK_S = 0.05  # clocks of gRPC and of this process may differ by so much


@dataclass(slots=True)
class Ending:
    """How a client's request ended, as it is counted."""

    outcome: str = "ok"

    def failed(self, error: BatonError) -> None:
        self.outcome = error.grpc_code.lower()


class Admission:
    """Shared by both interfaces of a router."""

    def __init__(
        self,
        registry: Registry,
        demand: Demand,
        gate: Gate,
        *,
        worker_wait_s: float = 0.0,
        max_request_bytes: int | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """`worker_wait_s`: how long a request waits for a worker while there is none (a fleet scaled to zero).
        `max_request_bytes`: of one request's body; from the model's context if None."""
        self.gate = gate
        self._quotas = quotas or Quotas()
        self._max_request_bytes = max_request_bytes
        self.registry = registry
        self.demand = demand
        self._worker_wait_s = worker_wait_s
        self._num_running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def not_ready(self) -> str:
        """Why no request is admitted now; empty if requests are admitted."""
        if self._draining:
            return "the router is shutting down"
        return "" if self._worker_wait_s else self.registry.not_ready()

    def max_request_bytes(self) -> int:
        """Most bytes of one request's body: enough for the model's context, however the text is escaped."""
        if self._max_request_bytes is not None:
            return self._max_request_bytes
        model = self.registry.model
        if model is None:
            return self.gate.limits.max_message_bytes
        return min(BODY_OVERHEAD_BYTES + BYTES_PER_TOKEN * model.limits.max_model_len, MOST_BODY_BYTES)

    def served(self) -> ServedModel:
        """The served model. Raises `UnavailableError` while no request can be admitted."""
        if self._draining:
            raise UnavailableError("the router is shutting down")
        return self.registry.served()

    async def serving(self) -> ServedModel:
        """`served`, after waiting for a worker if there is none: a first one, or one whose connection broke a moment
        ago. Raises `UnavailableError`."""
        try:
            return self.served()
        except UnavailableError:
            if self._draining:
                self.demand.unserved()
                raise
        return await self._served_later()

    async def _served_later(self) -> ServedModel:
        if not self._draining and self.registry.not_ready():
            wait_s = self._worker_wait_s or self.registry.reconnect_wait_s()
            give_up_at = time.monotonic() + wait_s
            with self.demand.waiting() if self._worker_wait_s else contextlib.nullcontext():
                while not self._draining and self.registry.not_ready() and (left := give_up_at - time.monotonic()) > 0:
                    await self.registry.changed(min(left, 1.0))
        try:
            return self.served()
        except UnavailableError:
            self.demand.unserved()
            raise

    def drain(self) -> None:
        """No request is taken from now on."""
        self._draining = True

    async def idle(self) -> None:
        """Returns once no request is running."""
        await self._idle.wait()

    def charge(self, client: ApiClient | None) -> None:
        """Counts a new request against `client`'s limits. Raises `OverloadedError` if that is too many."""
        self._quotas.request(*_names(client))

    def running(
        self, interface: str, timeout_s: float | None = None, client: ApiClient | None = None
    ) -> AbstractContextManager[Ending]:
        """Use it around all work for one client request, so that draining waits for the work; counts how the request
        ended. gRPC cancels a handler if its client's deadline passes. With `timeout_s`, the time that the client has
        left, such a request counts as late and not as cancelled. Raises `OverloadedError` if `client` sends more
        requests than it may.
        """
        late_at = math.inf if timeout_s is None else time.monotonic() + timeout_s - DEADLINE_SLACK_S
        return _Running(self, interface, late_at, client)

    def began(self) -> None:
        self._num_running += 1
        self.demand.num_running += 1
        self.demand.arrived()
        self._idle.clear()
        metrics.router_requests_running.set(self._num_running)

    def ended(self, interface: str, outcome: str) -> None:
        self._num_running -= 1
        self.demand.num_running -= 1
        metrics.router_requests_running.set(self._num_running)
        _counted(interface, outcome).inc()
        if self._num_running == 0:
            self._idle.set()


class _Running:
    """See `Admission.running`. A generator would cost each request more."""

    __slots__ = ("_admission", "_client", "_ending", "_interface", "_late_at")

    def __init__(self, admission: Admission, interface: str, late_at: float, client: ApiClient | None) -> None:
        self._admission = admission
        self._interface = interface
        self._late_at = late_at
        self._client = client
        self._ending = Ending()

    def __enter__(self) -> Ending:
        self._admission.began()
        try:
            self._admission.charge(self._client)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self._ending

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, BatonError):
            self._ending.failed(error)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._ending.outcome = "deadline_exceeded" if time.monotonic() >= self._late_at else "cancelled"
        elif isinstance(error, Exception):
            self._ending.outcome = "internal"
        self._admission.ended(self._interface, self._ending.outcome)


@functools.cache
def _counted(interface: str, outcome: str) -> Counter:
    return metrics.router_requests.labels(interface, outcome)


def _names(client: ApiClient | None) -> tuple[str, str]:
    """The names of a key and of its tenant."""
    return (client.name, client.tenant) if client else ("", "")
