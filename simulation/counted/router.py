"""A router whose workers' loads are looked at only once somebody asks for a decision.

The policy, the index of prefixes and the order of workers are the real ones, and a load counts from the moment at which
its worker would have reported it. What a `WorkerRecord` keeps for real workers is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from msgspec.structs import replace

from common.batch_time import BatchTime
from common.types import LOAD_INTERVAL_S, WorkerLoad, WorkerRole
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet
from router.fleet.worker import Sent, SentTokens
from router.policy.base import Policy, RoutingDecision
from router.running.routes import load_of
from simulation.counted.under_way import UnderWay
from simulation.router import SimulatedRouter


@dataclass(slots=True, eq=False)
class Reports:
    """When a worker reports its load: between two steps, each `LOAD_INTERVAL_S` at most, if it may have changed."""

    told_at: float = -LOAD_INTERVAL_S  # when it had its last turn
    since: float | None = None  # from when on it may have something to report; None: nothing
    alarm: float | None = None  # when it reports even in mid-step, as it had nothing to compute when this was set
    is_news: bool = False  # more has happened than that decodes went on
    due: float | None = None  # when the router looks at it next; None: only if it changes
    newcomers: list[str] = field(default_factory=list)  # keys of the requests that came and were not told of


class ReportingWorker(Protocol):
    address: str
    reports: Reports
    under_way: UnderWay

    def load_at(self, time: float) -> WorkerLoad: ...


@dataclass(slots=True, eq=False)
class _Seen:
    """What the router has seen of a worker."""

    load: WorkerLoad = field(default_factory=WorkerLoad)
    sent: dict[str, Sent] = field(default_factory=dict)  # no load counts it
    sent_tokens: SentTokens = field(default_factory=SentTokens)
    example: Endpoint | None = None  # with all but load and `sent`; None: it has changed


class CountedRouter(SimulatedRouter):
    def __init__(self, policy: Policy, block_size: int) -> None:
        super().__init__(policy, block_size)
        self._seen: dict[str, _Seen] = {}
        self._due: list[tuple[float, int, ReportingWorker]] = []
        self._numbers = count()

    def add(
        self,
        address: str,
        role: WorkerRole,
        time: BatchTime | None,
        max_model_len: int,
        takes: WorkerRole | None = None,
    ) -> None:
        super().add(address, role, time, max_model_len, takes)
        self._seen[address] = _Seen()

    def set_role(self, address: str, takes: WorkerRole) -> None:
        super().set_role(address, takes)
        self._seen[address].example = None

    def drain(self, address: str) -> None:
        super().drain(address)
        self._seen[address].example = None

    def remove(self, address: str) -> None:
        super().remove(address)
        del self._seen[address]

    def changing(self, worker: ReportingWorker, now: float) -> None:
        """A worker's load is about to change. What it was until now is taken in if it would have been reported."""
        reports = worker.reports
        earliest = reports.told_at + LOAD_INTERVAL_S
        if reports.since is not None and earliest < now:
            self._advance(worker, now, is_past=True)
            earliest = reports.told_at + LOAD_INTERVAL_S
        reports.is_news = True
        reports.since = now  # what came before is told of
        if earliest < now:
            earliest = now
        if reports.due is None or earliest < reports.due:
            self._look_at(worker, earliest)

    def idle(self, worker: ReportingWorker, now: float) -> None:
        """A worker has nothing to compute, so no step's end brings a report."""
        reports = worker.reports
        if reports.since is not None and reports.alarm is None:
            reports.alarm = max(reports.told_at + LOAD_INTERVAL_S, now)

    def take_reports(self, now: float) -> None:
        """Takes in all loads that would have been reported by now."""
        due = self._due
        while due and due[0][0] <= now:
            time, _, worker = heapq.heappop(due)
            reports = worker.reports
            if reports.due != time:
                continue
            reports.due = None
            next_turn = self._advance(worker, now, is_past=False)
            if reports.is_news:
                self._look_at(worker, next_turn)
            elif (next_s := worker.under_way.next_block_s) is not None:
                self._look_at(worker, max(next_s, next_turn))

    def send(
        self,
        key: str,
        now: float,
        decision: RoutingDecision,
        block_names: Sequence[bytes],
        num_prompt_tokens: int,
    ) -> None:
        for address, num_missing in load_of(decision).items():
            self._index.expect(address, block_names, now)
            seen = self._seen[address]
            seen.sent[key] = sent = Sent(now, num_missing, slack_s=decision.slack_s, num_context=num_prompt_tokens)
            seen.sent_tokens.add(sent)
            self._changed.add(address)

    def ended(self, key: object, decision: RoutingDecision) -> None:
        for address in load_of(decision):
            if (seen := self._seen.get(address)) is not None:
                self._reported(address, seen, str(key))

    # ------------------------------------------------------------------------------------------ internals

    def _look_at(self, worker: ReportingWorker, time: float) -> None:
        worker.reports.due = time
        heapq.heappush(self._due, (time, next(self._numbers), worker))

    def _advance(self, worker: ReportingWorker, now: float, *, is_past: bool) -> float:
        """Takes in what a worker reported until now; with `is_past` before now. Returns when its next turn is, if its
        load may have changed."""
        reports = worker.reports
        if not reports.is_news and reports.alarm is None and reports.since is not None:
            reports.told_at = worker.under_way.last_quiet_turn(reports.told_at, now)
        earliest = reports.told_at + LOAD_INTERVAL_S
        while (since := reports.since) is not None:
            if since > earliest:
                earliest = since
            if earliest > now and not reports.is_news:
                return earliest  # about: nobody waits for it
            turn = worker.under_way.boundary(earliest)
            if (alarm := reports.alarm) is not None and alarm < turn:
                turn = max(alarm, earliest)
            if turn > now or (is_past and turn == now):
                return turn
            reports.told_at = turn
            earliest = turn + LOAD_INTERVAL_S
            if alarm is not None and alarm <= turn:
                reports.alarm = None
            if reports.is_news or ((next_s := worker.under_way.next_block_s) is not None and next_s <= turn):
                reports.is_news = False
                self._take_load(worker, turn)
            reports.since = turn if worker.under_way.goes_on_after(turn) else None
        return earliest

    def _take_load(self, worker: ReportingWorker, time: float) -> None:
        if (seen := self._seen.get(worker.address)) is None:
            return  # it has left
        load = worker.load_at(time)
        if load != seen.load:
            seen.load = load
            self._changed.add(worker.address)
        newcomers = worker.reports.newcomers
        for key in newcomers:
            self._reported(worker.address, seen, key)
        newcomers.clear()
        while seen.sent:  # the oldest first
            key = next(iter(seen.sent))
            if seen.sent[key].at >= time - LOAD_INTERVAL_S:
                return
            self._reported(worker.address, seen, key)

    def _reported(self, address: str, seen: _Seen, key: str) -> None:
        if (sent := seen.sent.pop(key, None)) is not None:
            seen.sent_tokens.add(sent, -1)
            self._changed.add(address)

    def _told(self) -> Fleet:
        if self._fleet is None:
            self._fleet = Fleet(self._endpoint(address) for address in self._records)
        else:
            for address in self._changed:
                if self._seen[address].example is None:
                    self._fleet.update(self._endpoint(address))
                else:
                    self._fleet.update_load(self._endpoint(address))
        self._changed.clear()
        return self._fleet

    def _endpoint(self, address: str) -> Endpoint:
        seen = self._seen[address]
        if (known := seen.example) is None:
            known = seen.example = self._records[address].endpoint()
        tokens = seen.sent_tokens
        return replace(
            known,
            load=seen.load,
            num_unreported=len(seen.sent),
            num_unreported_tokens=tokens.num,
            num_unreported_context=tokens.num_context,
            unreported_by_slack=tokens.by_slack,
        )
