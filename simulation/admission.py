"""What a router's limits make of requests: its real gate, quotas and queue, on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from common.errors import BatonError, OverloadedError
from common.targets import LatencyTargets
from router.limits.clients import ApiClient
from router.limits.fair_queue import FairQueue
from router.limits.gate import Gate, GateLimits
from router.limits.quotas import Quotas
from router.limits.targets import given_in_body
from simulation.clock import VirtualClock


@dataclass(slots=True, frozen=True, kw_only=True)
class AdmissionOptions:
    """None: no such limit."""

    max_running: int | None = None
    max_queued: int = 256
    max_queue_wait_s: float = 30.0
    max_requests: int | None = None  # in flight
    max_requests_per_key: int | None = None  # half of `max_requests` if None
    limits_file: str | None = None

    @property
    def is_unlimited(self) -> bool:
        return self.max_running is None and self.max_requests is None and self.limits_file is None


class Visit:
    """One request's stay. It is a `Turn` of the queue."""

    def __init__(self, clock: VirtualClock, begin: Callable[[], None], refuse: Callable[[BatonError], None]) -> None:
        self.is_over = False  # its wait
        self.has_begun = False
        self.held = ExitStack()  # what is given back at its end
        self._clock = clock
        self._begin = begin
        self._refuse = refuse

    def came(self) -> None:
        self.is_over = self.has_begun = True
        self._clock.at(self._clock.now, self._begin)  # not from within the queue

    def refuse(self, error: OverloadedError) -> None:
        self.is_over = True
        self.held.close()
        self._refuse(error)


class SimulatedAdmission:
    """The way of a request into the router and out of it, in the order of `router.limits.admission`. Each tenant has
    one API key, of its own name; without tenants there are no keys."""

    def __init__(self, options: AdmissionOptions, clock: VirtualClock) -> None:
        """Raises `StartupError` for a limits file that is wrong."""
        self._clock = clock
        self._quotas = Quotas(options.limits_file, clock)
        self._gate = None
        if options.max_requests is not None:
            limits = GateLimits(max_requests=options.max_requests, max_requests_per_key=options.max_requests_per_key)
            self._gate = Gate(limits, clock)
        self._queue = FairQueue(
            options.max_running, max_waiting=options.max_queued, max_wait_s=options.max_queue_wait_s, clock=clock
        )

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    def targets(self, tenant: str, asked: LatencyTargets | None) -> LatencyTargets | None:
        """The latency targets of a request that asks for these itself."""
        return self._quotas.slo(tenant, tenant, given_in_body(asked, "")).targets

    def admit(
        self,
        tenant: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        begin: Callable[[], None],
        refuse: Callable[[BatonError], None],
    ) -> Visit:
        """A request comes. `begin` is called when workers may have it, or `refuse` if its turn does not come. Raises
        `OverloadedError` if it is refused at once. Call `end` once it has begun and is over."""
        clock, quotas, queue = self._clock, self._quotas, self._queue
        visit = Visit(clock, begin, refuse)
        with ExitStack() as held:
            if self._gate is not None:
                held.enter_context(self._gate.requests(tenant))
            quotas.request(tenant, tenant)
            held.enter_context(quotas.streams(tenant, tenant))
            quotas.prompt(tenant, tenant, num_prompt_tokens)
            held.callback(self._give_back, visit, tenant, num_prompt_tokens)
            limits = quotas.tenant(tenant)
            waiting = queue.ask(
                ApiClient(tenant, tenant).owner,
                num_prompt_tokens + num_output_tokens,
                visit,
                priority=limits.priority,
                weight=limits.weight,
            )
            visit.held = held.pop_all()
        if waiting is None:
            visit.came()
            return visit

        def waited() -> None:
            if not visit.is_over:
                queue.give_up(waiting)
                visit.refuse(queue.waited_too_long())

        clock.at(clock.now + queue.max_wait_s, waited)
        return visit

    def answered(self, tenant: str, num_tokens: int) -> None:
        """Counts tokens of an answer."""
        self._quotas.answered(tenant, tenant, num_tokens)

    def end(self, visit: Visit) -> None:
        """A request that had begun is over."""
        self._queue.leave(1)
        visit.held.close()

    def _give_back(self, visit: Visit, tenant: str, num_tokens: int) -> None:
        """Tokens of a prompt that nobody computes."""
        if not visit.has_begun:
            self._quotas.give_back(tenant, tenant, num_tokens)
