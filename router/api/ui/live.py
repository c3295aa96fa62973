"""What the live page shows, as server-sent events: one look at the fleet for all viewers, at most twice a second.

`full` comes first: every worker's row, and samples of the last minutes. Then `change`, one for each look: the rows that
have changed, and what is new. A viewer that reads too slowly misses changes, and gets `full` again. `missed` says why a
look failed.

While nobody watches, one small sample is taken every few seconds, so that a page begins with the last minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import msgspec
from fastapi import Request
from fastapi.responses import Response

from common import metrics
from common.errors import OverloadedError, UnavailableError
from common.percentiles import middle_and_late
from common.version import VERSION
from router.api.api_keys import check_operator
from router.api.rest.openai.disconnect import EventStream
from router.api.ui.fleet_rows import COLUMNS, Row, info_of, kv_in_use, row_of
from router.api.worker_views import WorkerViews
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.processes.process_query import ProcessQuery
from router.running.known_requests import Pace, RunningRequest
from router.serving.gateway import Gateway

log = logging.getLogger(__name__)

LOOK_S = 0.5
IDLE_LOOK_S = 5.0  # while nobody watches
SAMPLE_S = 1.0
MAX_SAMPLES = 600
HANDOFFS_S = 1.0  # for which a handoff that began is shown, and longer until the request's first token
PACES_S = 10.0  # in which the answers became complete whose paces are shown
MAX_RUNNING = 100  # requests that are shown, of each process
MAX_VIEWERS = 64
SAMPLE_COLUMNS = (
    "time", "requests", "failed", "prompt_tokens", "output_tokens", "running", "queued", "waiting", "prefill_kv",
    "decode_kv", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms",
)  # fmt: skip
NO_FAILURES = ("ok", "cancelled")


@dataclass(slots=True, frozen=True)
class ProcessShare:
    """What one process of the router adds."""

    num_queued: int  # requests that wait in the router for their turn
    num_failed: int  # since the process began
    handoffs: list[tuple[str, str, int]]  # prefill and decode worker, and how many are on their way
    paces: list[Pace]
    running: list[RunningRequest]


@dataclass(slots=True)
class _Look:
    """What was seen at one time."""

    number: int
    change: bytes  # for who has seen the look before
    full: bytes | None = None  # made for the first who needs it


@dataclass(slots=True)
class _Seen:
    """What viewers have been told of the fleet."""

    rows: dict[str, Row] = field(default_factory=dict)  # by address
    infos: dict[str, dict[str, object]] = field(default_factory=dict)
    about: dict[str, object] = field(default_factory=dict)
    handoffs: list[tuple[str, str, int]] = field(default_factory=list)
    running: list[RunningRequest] = field(default_factory=list)


class Live:
    def __init__(self, gateway: Gateway, registry: Registry, views: WorkerViews, num_processes: int = 1) -> None:
        self._gateway = gateway
        self._registry = registry
        self._views = views
        self._num_processes = num_processes
        self._query = ProcessQuery("live", ProcessShare, self._own_share)
        gateway.process.answers(self._query)
        self._view_s = gateway.admission.gate.limits.answer_timeout_s / 2  # then the page asks again
        self._samples: deque[Row] = deque(maxlen=MAX_SAMPLES)
        self._seen = _Seen()
        self._latest = _Look(0, b"")
        self._num_missed = 0  # looks that failed
        self._missed = b""  # what viewers are told of the last one
        self._is_fresh = False  # whether `_latest` was made for somebody who watches now
        self._num_viewers = 0
        self._wanted = asyncio.Event()  # somebody watches
        self._looked = asyncio.Event()
        self._has_ended = False

    async def run(self) -> None:
        """Looks until it is cancelled. What goes wrong here is logged: the router does not need this page."""
        try:
            while True:
                try:
                    await self.look()
                except UnavailableError as error:  # another process does not answer just now
                    log.warning("the live page misses a look", extra={"reason": error.message})
                    self._miss("the router's processes do not answer")
                except Exception:
                    log.exception("the live page misses a look")
                    self._miss("the router could not look at its fleet")
                await asyncio.sleep(LOOK_S)
                if not self._num_viewers:
                    self._is_fresh = False
                    self._wanted.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(IDLE_LOOK_S - LOOK_S):
                            await self._wanted.wait()
        finally:
            self._has_ended = True
            self._looked.set()

    async def events(self, _request: Request) -> Response:
        """`GET /ui/events`. Raises `ForbiddenError` for a key that is no operator's, `OverloadedError` if too many
        watch."""
        check_operator("the fleet is shown to")
        if self._num_viewers >= MAX_VIEWERS:
            metrics.router_refused.labels("viewers").inc()
            raise OverloadedError(f"{MAX_VIEWERS} pages watch this router already", 5.0)
        parts = self.parts()
        return EventStream(await anext(parts), parts, {})

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The events for one viewer."""
        until = time.monotonic() + self._view_s
        self._num_viewers += 1
        self._wanted.set()
        number, num_missed = -1, self._num_missed
        try:
            yield b": baton\n\n"
            while not self._has_ended and (left_s := until - time.monotonic()) > 0:
                look = self._latest
                if num_missed != self._num_missed:
                    num_missed = self._num_missed
                    yield self._missed
                    continue
                if look.number == number or not self._is_fresh:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(left_s):
                            await self._looked.wait()
                    continue
                if look.number == number + 1:
                    yield look.change
                else:
                    if look.full is None:
                        look.full = self._full()
                    yield look.full
                number = look.number
        finally:
            self._num_viewers -= 1

    # ------------------------------------------------------------------------------------------------ a look

    async def look(self) -> None:
        """Tells all viewers what has changed; takes a sample if it is time for one."""
        endpoints = self._registry.endpoints()
        shares = await self._gateway.process.ask(self._query)
        sample = self._sample(endpoints, shares)
        new_samples = [] if sample is None else [sample]
        if not self._num_viewers:
            self._samples.extend(new_samples)
            return
        await asyncio.sleep(0)  # tokens go on between the parts of a look at a large fleet
        views = await self._views.joined()
        await asyncio.sleep(0)
        rows = {one.address: row_of(one, views[one.address]) for one in endpoints if one.address in views}
        told: dict[str, object] = {}
        seen = self._seen
        told["workers"] = [row for address, row in rows.items() if seen.rows.get(address) != row]
        if gone := [address for address in seen.rows if address not in rows]:
            told["gone"] = gone
        if infos := self._new_infos(endpoints):
            told["info"] = infos
        about = self._about()
        if about != seen.about:
            told["about"] = about
        told["samples"] = new_samples
        self._samples.extend(new_samples)
        told["handoffs"] = seen.handoffs = _summed(shares)
        told["running"] = seen.running = _newest(shares)
        seen.rows, seen.about = rows, about
        seen.infos = {address: info for address, info in (seen.infos | infos).items() if address in rows}
        self._latest = _Look(self._latest.number + 1, _event("change", told))
        self._is_fresh = True
        self._looked.set()
        self._looked.clear()

    def _miss(self, reason: str) -> None:
        self._num_missed += 1
        self._missed = _event("missed", {"reason": reason})
        self._looked.set()
        self._looked.clear()

    def _full(self) -> bytes:
        seen = self._seen
        columns = {"workers": COLUMNS, "samples": SAMPLE_COLUMNS}
        return _event(
            "full",
            {
                "columns": columns,
                "about": seen.about,
                "workers": list(seen.rows.values()),
                "info": seen.infos,
                "samples": list(self._samples),
                "handoffs": seen.handoffs,
                "running": seen.running,
            },
        )

    def _new_infos(self, endpoints: list[Endpoint]) -> dict[str, dict[str, object]]:
        found = {}
        for one in endpoints:
            if one.epoch and self._seen.infos.get(one.address, {}).get("epoch") != one.epoch:
                info = self._registry.info(one.address)
                if info is not None:
                    found[one.address] = info_of(info)
        return found

    def _about(self) -> dict[str, object]:
        model = self._registry.model
        return {
            "model": None if model is None else model.limits.model,
            "version": VERSION,
            "processes": self._num_processes,
            "not_ready": self._gateway.not_ready(),
        }

    def _sample(self, endpoints: list[Endpoint], shares: list[ProcessShare]) -> Row | None:
        """In the order of `SAMPLE_COLUMNS`; None if the last one is younger than `SAMPLE_S`."""
        now = time.time()
        last = self._samples[-1][0] if self._samples else 0.0
        if isinstance(last, float) and 0 <= now - last < SAMPLE_S * 0.9:
            return None
        demand = self._gateway.admission.demand.to_proto()
        return (
            round(now, 2),
            demand.num_requests_total,
            sum(share.num_failed for share in shares),
            demand.num_prompt_tokens_total,
            demand.num_output_tokens_total,
            demand.num_requests_running + demand.num_requests_waiting,
            sum(share.num_queued for share in shares) + demand.num_requests_waiting,
            sum(one.load.num_requests_waiting for one in endpoints),
            kv_in_use(one for one in endpoints if one.can_prefill),
            kv_in_use(one for one in endpoints if one.can_decode),
            *_middle_and_late([pace.ttft_ms for share in shares for pace in share.paces]),
            *_middle_and_late([pace.tpot_ms for share in shares for pace in share.paces if pace.tpot_ms is not None]),
        )

    def _own_share(self, *_: object) -> list[ProcessShare]:
        process, num_queued = self._gateway.process, self._gateway.admission.num_queued
        found = process.decisions.handoffs(HANDOFFS_S) + process.requests.handoffs(HANDOFFS_S)
        handoffs = [(*pair, number) for pair, number in found.items()]
        paces, running = process.requests.paces(PACES_S), process.requests.running(MAX_RUNNING)
        return [ProcessShare(num_queued, _num_failed(), handoffs, paces, running)]


def _num_failed() -> int:
    samples = metrics.router_requests.collect()
    found = [one for family in samples for one in family.samples if one.name.endswith("_total")]
    return sum(int(one.value) for one in found if one.labels["outcome"] not in NO_FAILURES)


def _summed(shares: list[ProcessShare]) -> list[tuple[str, str, int]]:
    total: dict[tuple[str, str], int] = {}
    for share in shares:
        for prefill, decode, number in share.handoffs:
            total[prefill, decode] = total.get((prefill, decode), 0) + number
    return [(*pair, number) for pair, number in total.items()]


def _newest(shares: list[ProcessShare]) -> list[RunningRequest]:
    running = [one for share in shares for one in share.running]
    return sorted(running, key=lambda one: one.time, reverse=True)[:MAX_RUNNING]


def _middle_and_late(values: list[float]) -> tuple[float | None, ...]:
    return tuple(None if value is None else round(value, 2) for value in middle_and_late(values))


def _event(name: str, told: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(told))
