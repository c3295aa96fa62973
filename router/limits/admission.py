"""The one way of a request into the router, and out of it. What it passes, in this order:

running    it counts against its client's requests a second, and then as one that runs; how it ends is counted
serving    it waits for a worker if there is none; it is refused while the router drains
charged    its answers take places in the gate, and their prompts tokens of its client's limits
turn       it waits in the queue until workers may have it
answered   tokens that came count, too
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from prometheus_client import Counter

from common import metrics
from common.errors import BatonError, UnavailableError
from common.grpc.options import DEADLINE_SLACK_S
from router.fleet.registry import Registry
from router.fleet.served_model import ServedModel
from router.limits.clients import NOBODY, ApiClient, Charge
from router.limits.demand import Demand
from router.limits.gate import Gate
from router.limits.ledger import Ledger, LocalLedger
from router.limits.quotas import NO_TENANT_LIMITS, Quotas
from router.limits.request_queue import Places, RequestQueue
from router.limits.targets import NO_SLO, NOTHING_GIVEN, GivenTargets, Slo

PAUSED = "the router is paused by an operator"
PAUSED_RETRY_S = 5.0
BYTES_PER_TOKEN = 64  # four letters or so, each escaped as \uXXXX, and then as many again
BODY_OVERHEAD_BYTES = 64 * 2**10
MOST_BODY_BYTES = 64 * 2**20


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
        queue: Places | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`ledger`: what all processes of the router know, also one that takes the place of another: whether it is
        paused.
        `worker_wait_s`: how long a request waits for a worker while there is none (a fleet scaled to zero).
        `max_request_bytes`: of one request's body; from the model's context if None."""
        self.gate = gate
        self._quotas = quotas or Quotas()
        self._queue = queue or RequestQueue(None)
        self._max_request_bytes = max_request_bytes
        self.registry = registry
        self.demand = demand
        self._worker_wait_s = worker_wait_s
        self._num_running = 0
        self._draining = False
        ledger = ledger or LocalLedger()
        with ledger.locked():
            self._paused = ledger.state("paused")  # the first number: 1.0 while an operator has it take no requests
        metrics.router_paused.set(self.is_paused)
        self._idle = asyncio.Event()
        self._idle.set()

    def not_ready(self) -> str:
        """Why no request is admitted now; empty if requests are admitted."""
        if self._draining:
            return "the router is shutting down"
        if self.is_paused:
            return PAUSED
        return "" if self._worker_wait_s else self.registry.not_ready()

    def max_request_bytes(self) -> int:
        """Most bytes of one request's body: enough for the model's context, however the text is escaped."""
        if self._max_request_bytes is not None:
            return self._max_request_bytes
        model = self.registry.model
        if model is None:
            return self.gate.limits.max_message_bytes
        return min(BODY_OVERHEAD_BYTES + BYTES_PER_TOKEN * model.limits.max_model_len, MOST_BODY_BYTES)

    def served(self, model: str = "") -> ServedModel:
        """The model of this name, or the one that is served if the name is empty. Raises `UnavailableError` while no
        request can be admitted, `ModelNotFoundError` if this model is not served."""
        if self._draining:
            raise UnavailableError("the router is shutting down")
        if self.is_paused:
            raise UnavailableError(PAUSED, PAUSED_RETRY_S)
        return self.registry.served(model)

    def models(self) -> Mapping[str, ServedModel]:
        """The models that are served, by name. Raises `UnavailableError` while no request can be admitted."""
        self.served()
        return self.registry.models

    async def serving(self, model: str = "") -> ServedModel:
        """`served`, after waiting for a worker if there is none: a first one, or one whose connection broke a moment
        ago."""
        try:
            return self.served(model)
        except UnavailableError:
            if self._draining:
                self.demand.unserved()
                raise
            if self.is_paused:  # nobody scales a fleet up for that
                raise
        return await self._served_later(model)

    async def _served_later(self, model: str) -> ServedModel:
        if not self._draining and self.registry.not_ready():
            wait_s = self._worker_wait_s or self.registry.reconnect_wait_s()
            give_up_at = time.monotonic() + wait_s
            with self.demand.waiting() if self._worker_wait_s else contextlib.nullcontext():
                while not self._draining and self.registry.not_ready() and (left := give_up_at - time.monotonic()) > 0:
                    await self.registry.changed(min(left, 1.0))
        try:
            return self.served(model)
        except UnavailableError:
            self.demand.unserved()
            raise

    @property
    def is_paused(self) -> bool:
        """Whether an operator has the router take no new requests."""
        return bool(self._paused[0])

    def pause(self, *, is_paused: bool) -> None:
        """Has all processes of the router take no new requests, or take them again. Each is told, for its metric."""
        self._paused[0] = float(is_paused)
        metrics.router_paused.set(is_paused)

    def drain(self) -> None:
        """No request is taken from now on."""
        self._draining = True

    @property
    def num_running(self) -> int:
        """Requests of this process that clients wait for."""
        return self._num_running

    async def idle(self) -> None:
        """Returns once no request is running."""
        await self._idle.wait()

    @property
    def num_queued(self) -> int:
        """Requests of this process that wait for their turn."""
        return self._queue.num_waiting

    def charge(self, client: ApiClient | None) -> None:
        """Counts a new request against `client`'s limits. Raises `OverloadedError` if that is too many."""
        if not self._quotas.say_nothing:
            client = client or NOBODY
            self._quotas.request(client.name, client.tenant)

    def check(self, client: ApiClient | None, num_tokens: int = 0) -> None:
        """Whether a request of `client` with so many prompt tokens would be taken now; counts nothing. Raises
        `OverloadedError` if its limits or those of the router do not allow it."""
        self.gate.check(client.name if client else "")
        if not self._quotas.say_nothing:
            client = client or NOBODY
            self._quotas.check(client.name, client.tenant, num_tokens)

    @property
    def worker_wait_s(self) -> float:
        """How long a request waits for a worker while there is none."""
        return self._worker_wait_s

    def running(
        self,
        interface: str,
        timeout_s: float | None = None,
        client: ApiClient | None = None,
        *,
        of_batch: bool = False,
    ) -> AbstractContextManager[Ending]:
        """Use it around all work for one client request, so that draining waits for the work; counts how the request
        ended. gRPC cancels a handler if its client's deadline passes. With `timeout_s`, the time that the client has
        left, such a request counts as late and not as cancelled. Raises `OverloadedError` if `client` sends more
        requests than it may. `of_batch`: nobody waits for the answer.
        """
        late_at = math.inf if timeout_s is None else time.monotonic() + timeout_s - DEADLINE_SLACK_S
        return _Running(self, interface, late_at, client, of_batch)

    def charged(
        self,
        client: ApiClient,
        charges: Sequence[Charge],
        *,
        num_answers: int,
        num_places: int | None = None,
        field: str = "",
        in_room: bool = False,
    ) -> AbstractContextManager[None]:
        """Use it around the answers that one body asks for. They count together, so that a body which is larger than a
        limit's burst is not refused for ever. Tokens of `charges` for which no worker is asked are given back.

        `field` says how many answers there are, `num_answers`; 0 if nothing is generated: nobody scales by that.
        `num_places`: of requests in flight that they take together, if not one each. The request itself has one.
        `in_room`: the room of batches bounds them. They may be paused for hours, so they take no place in the gate and
        none of their client's answers at a time.

        Raises `OverloadedError` if the client's limits do not allow it now, `InvalidArgumentError` if they never do.
        """
        num_places = num_answers if num_places is None else num_places
        return _Charged(self.gate, self._quotas, self.demand, client, charges, num_answers, num_places, field, in_room)

    def turn(
        self, client: ApiClient, cost: float, deadline: float, *, priority: int = 0, places: int = 1
    ) -> AbstractAsyncContextManager[None]:
        """Use it around the time in which workers have a request, which costs so many tokens and takes `places`.
        Raises `OverloadedError` if the queue refuses it, and `DeadlineError` if its turn does not come in time."""
        limits = NO_TENANT_LIMITS if self._quotas.say_nothing else self._quotas.tenant(client.tenant)
        return self._queue.place(
            client.owner,
            cost,
            deadline - time.monotonic(),
            priority=limits.priority,
            weight=limits.weight,
            request_priority=priority,
            places=places,
        )

    def slo(self, client: ApiClient | None, *asked: GivenTargets) -> Slo:
        """See `Quotas.slo`."""
        if self._quotas.say_nothing and all(given is NOTHING_GIVEN for given in asked):
            return NO_SLO
        client = client or NOBODY
        return self._quotas.slo(client.name, client.tenant, *asked)

    def answered(self, client: ApiClient, num_tokens: int) -> None:
        """Counts tokens of an answer."""
        self.demand.num_output_tokens += num_tokens
        if not self._quotas.say_nothing:
            self._quotas.answered(client.name, client.tenant, num_tokens)

    def began(self, of_batch: bool) -> None:
        self._num_running += 1
        self.demand.num_running += 1
        self.demand.num_of_batches += of_batch
        self.demand.changed()
        self.demand.arrived()
        self._idle.clear()
        metrics.router_requests_running.set(self._num_running)

    def refused(self, interface: str, outcome: str) -> None:
        """A request that its client's limits do not allow: it never runs, so no batch makes way for it."""
        self.demand.arrived()
        _counted(interface, outcome).inc()

    def ended(self, interface: str, outcome: str, of_batch: bool) -> None:
        self._num_running -= 1
        self.demand.num_running -= 1
        self.demand.num_of_batches -= of_batch
        self.demand.changed()
        metrics.router_requests_running.set(self._num_running)
        _counted(interface, outcome).inc()
        if self._num_running == 0:
            self._idle.set()


class _Running:
    """See `Admission.running`. A generator would cost each request more."""

    __slots__ = ("_admission", "_client", "_ending", "_interface", "_late_at", "_of_batch")

    def __init__(
        self, admission: Admission, interface: str, late_at: float, client: ApiClient | None, of_batch: bool
    ) -> None:
        self._admission = admission
        self._interface = interface
        self._late_at = late_at
        self._client = client
        self._of_batch = of_batch
        self._ending = Ending()

    def __enter__(self) -> Ending:
        try:
            self._admission.charge(self._client)
        except Exception as error:
            self._ending.outcome = "internal"
            if isinstance(error, BatonError):
                self._ending.failed(error)
            self._admission.refused(self._interface, self._ending.outcome)
            raise
        self._admission.began(self._of_batch)
        return self._ending

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, BatonError):
            self._ending.failed(error)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._ending.outcome = "deadline_exceeded" if time.monotonic() >= self._late_at else "cancelled"
        elif isinstance(error, Exception):
            self._ending.outcome = "internal"
        self._admission.ended(self._interface, self._ending.outcome, self._of_batch)


class _Charged:
    """See `Admission.charged`. A generator would cost each request more."""

    __slots__ = (
        "_charges",
        "_client",
        "_demand",
        "_field",
        "_gate",
        "_in_room",
        "_num_answers",
        "_num_places",
        "_quotas",
        "_undo",
    )

    def __init__(
        self,
        gate: Gate,
        quotas: Quotas,
        demand: Demand,
        client: ApiClient,
        charges: Sequence[Charge],
        num_answers: int,
        num_places: int,
        field: str,
        in_room: bool,
    ) -> None:
        self._gate = gate
        self._quotas = quotas
        self._demand = demand
        self._client = client
        self._charges = charges
        self._num_answers = num_answers
        self._num_places = num_places
        self._field = field
        self._in_room = in_room
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        key, tenant, quotas, num_answers = self._client.name, self._client.tenant, self._quotas, self._num_answers
        num_tokens = sum([one.num_tokens for one in self._charges])
        with contextlib.ExitStack() as undo:
            if self._num_places > 1 and not self._in_room:
                undo.enter_context(self._gate.requests(key, self._num_places - 1))
            if not quotas.say_nothing:
                if not self._in_room:
                    undo.enter_context(quotas.streams(key, tenant, num_answers, self._field))
                quotas.prompt(key, tenant, num_tokens)
                if num_answers > 1:
                    quotas.more_requests(key, tenant, num_answers - 1)
            self._undo = undo.pop_all()
        if num_answers:
            self._demand.prompt(num_tokens)  # before they get a place: autoscalers make places of it

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._undo:
            if not self._quotas.say_nothing:
                num_left = sum([one.num_tokens for one in self._charges if not one.worker_was_asked])
                self._quotas.give_back(self._client.name, self._client.tenant, num_left)


@functools.cache
def _counted(interface: str, outcome: str) -> Counter:
    return metrics.router_requests.labels(interface, outcome)
