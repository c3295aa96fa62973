"""One configured address of a router, with what is known of the worker behind it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import grpc

from common.batch_time import BatchTime
from common.types import LOAD_INTERVAL_S, SLACKS_S, WorkerLoad, WorkerRole, WorkerState
from protos.baton.v1 import worker_pb2
from protos.convert import role_of
from router.fleet.endpoint import Endpoint, RoleTaken
from router.fleet.served_model import ServedModel, why_excluded


@dataclass(slots=True, frozen=True)
class Sent:
    at: float  # time.monotonic()
    num_tokens: int  # of the prompt, that the worker computes
    tag: int | None = None  # by which the worker names it once it counts it (`request_tag`)
    slack_s: float | None = None  # `RoutingDecision.slack_s`
    num_context: int = 0  # tokens that it begins with, whoever computes their KV


class SentTokens:
    """Tokens of requests that were sent and are not reported."""

    __slots__ = ("_by_slack", "num", "num_context")

    def __init__(self) -> None:
        self.num = 0  # of prompts, that the worker computes
        self.num_context = 0  # that the requests begin with
        self._by_slack = [0] * (len(SLACKS_S) + 1)  # of those with a target, by the first of `SLACKS_S` that is longer

    def add(self, sent: Sent, times: int = 1) -> None:
        """`times`: -1 takes it out again."""
        self.num += times * sent.num_tokens
        self.num_context += times * sent.num_context
        if sent.slack_s is not None and sent.slack_s >= 0:  # others go after all that can be in time
            self._by_slack[bisect_left(SLACKS_S, sent.slack_s)] += times * sent.num_tokens

    @property
    def by_slack(self) -> tuple[int, ...]:
        """See `Endpoint.unreported_by_slack`."""
        return tuple(accumulate(self._by_slack[:-1]))


@dataclass(slots=True)
class WorkerRecord:
    address: str
    role: WorkerRole
    channel: grpc.aio.Channel
    channel_version: int  # of the certificates that it shows
    news: set[str] = field(default_factory=set)  # addresses of workers whose endpoints may have changed
    info: worker_pb2.WorkerInfo | None = None
    parameters: frozenset[str] = frozenset()  # of sampling, that it knows
    batch_time: BatchTime | None = None  # that requests are routed by
    load: WorkerLoad = field(default_factory=WorkerLoad)
    taken: RoleTaken | None = None  # as it says; None: it has but one role
    is_needed: bool = False  # for requests, whatever it takes: no other worker is left for them
    state: WorkerState = WorkerState.UNREACHABLE
    problem: str = ""
    ask_again_at: float = -math.inf  # time.monotonic() from which on it may be asked for a newer model of time
    lost_at: float = -math.inf  # time.monotonic() when it was last found to be gone after it had been ready
    sent: dict[object, Sent] = field(default_factory=dict)  # running requests that no report counts
    sent_tokens: SentTokens = field(default_factory=SentTokens)  # of these requests
    running: set[object] = field(default_factory=set)  # requests, reported or not
    _excluded: tuple[worker_pb2.WorkerInfo | None, ServedModel | None, str] | None = None
    _endpoint: Endpoint | None = None  # as it was told last
    _described: worker_pb2.WorkerInfo | None = None  # by `_endpoint`

    def send(self, key: object, sent: Sent) -> None:
        self.sent[key] = sent
        self.sent_tokens.add(sent)
        self.running.add(key)
        self.changed()

    def take_load(self, load: WorkerLoad, now: float, counted: Iterable[int] = ()) -> None:
        """The worker reports `load`. It counts the requests whose tags are in `counted`, and those that were sent long
        enough ago. Each tag stands for one request: a retry has the id, and so the tag, of the request before it."""
        self.load = load
        self.changed()
        left = Counter(counted)
        for key, sent in list(self.sent.items()):
            if sent.tag is not None and left[sent.tag] > 0:
                left[sent.tag] -= 1
                self.reported(key)
            elif sent.at < now - LOAD_INTERVAL_S:
                self.reported(key)

    def take_role(self, report: worker_pb2.WorkerLoad) -> bool:
        """Returns whether it takes work of another role than before."""
        role, before = role_of(report.role), self.taken
        taken = None if role is None else RoleTaken(role, report.num_role_shifts, report.role_pinned)
        if taken == before:
            return False
        self.taken = taken
        self.changed()
        return role is not (before.role if before else None)

    @property
    def takes(self) -> WorkerRole:
        """Of which role it takes work from this router. A worker that is configured for one role alone has that one,
        whatever it takes from others."""
        return self.taken.role if self.taken is not None and self.role is WorkerRole.BOTH else self.role

    def reported(self, key: object) -> None:
        """The worker counts the request itself by now, or it has ended."""
        if sent := self.sent.pop(key, None):
            self.sent_tokens.add(sent, -1)
            self.changed()

    def changed(self) -> None:
        """To be called after `info`, `parameters`, `batch_time`, `load`, `is_needed` or `state` was set."""
        self.news.add(self.address)

    def excluded(self, model: ServedModel | None) -> str:
        """See `why_excluded`. Found out anew only if another process answers or another model is served: each request
        asks."""
        if self._excluded is None or self._excluded[0] is not self.info or self._excluded[1] is not model:
            self._excluded = (self.info, model, why_excluded(self.info, self.role, model))
        return self._excluded[2]

    def endpoint(self, excluded: str = "", suspended: str = "") -> Endpoint:
        """The same object as the last time if nothing has changed: each request asks for all workers'."""
        info, last, role = self.info, self._endpoint, self.role if self.is_needed else self.takes
        by_slack = self.sent_tokens.by_slack
        if (
            last is not None
            and self._described is info
            and last.load is self.load
            and last.state is self.state
            and last.role is role
            and last.taken is self.taken
            and last.num_unreported == len(self.sent)
            and last.num_unreported_tokens == self.sent_tokens.num
            and last.num_unreported_context == self.sent_tokens.num_context
            and last.unreported_by_slack == by_slack
            and last.excluded == excluded
            and last.suspended == suspended
        ):
            return last
        self._described = info
        self._endpoint = Endpoint(
            worker_id=info.worker_id if info else "",
            role=role,
            taken=self.taken,
            has_both=self.role is WorkerRole.BOTH,
            address=self.address,
            epoch=info.epoch if info else "",
            fingerprint=info.fingerprint if info else "",
            block_size=info.block_size if info else 0,
            parameters=self.parameters,
            max_model_len=info.max_model_len if info else None,
            batch_time=self.batch_time,
            splits=info.splits_prompts if info else False,
            load=self.load,
            state=self.state,
            excluded=excluded,
            suspended=suspended,
            num_unreported=len(self.sent),
            num_unreported_tokens=self.sent_tokens.num,
            num_unreported_context=self.sent_tokens.num_context,
            unreported_by_slack=by_slack,
        )
        return self._endpoint

    @property
    def incarnation(self) -> tuple[str, str]:
        """The incarnation of its endpoint."""
        return (self.address, self.info.epoch if self.info else "")
