"""How workers have done lately, as this router saw it: a worker that fails or is slow is left alone for a while. Pure;
time comes in.

    closed ── MAX_FAILURES in a row ──> open ── after a while ──> half open: one request at a time is let through
       ^                                 ^                          │
       │                                 └── it fails: longer ──────┤
       └──────────────────────────── it succeeds ───────────────────┘

A worker whose time between tokens, or for prompts, is far above that of the others is taken out in the same way, and
begins anew afterwards; at most a third of those that do the same work at a time. A decode worker is used all the same
if there is no other; without a prefill worker prompts are computed in place: `router.policy.routing`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MAX_FAILURES = 5  # in a row
OPEN_S = 5.0  # the first time; twice as long each time that a probe fails
MAX_OPEN_S = 60.0
SLOW_FACTOR = 3.0  # times the median of all workers
SLOW_MARGIN_S = 0.02  # above it at least, for one token of an answer
AS_SAID = 2.0  # times what the worker itself said, up to which its pace is no surprise
SLOW_S = 10.0
MIN_ANSWERS = 5  # before a worker's pace counts
MIN_TOKENS = 8  # of an answer whose pace counts
MIN_WORKERS = 3  # with a pace, so that there is a median
TRAFFIC_S = 60.0
PACE_WEIGHT = 0.2  # of the latest answer in the mean

Incarnation = tuple[str, str]


@dataclass(slots=True)
class Traffic:
    """What a decode worker answered lately, older answers counting less and less (`TRAFFIC_S`), in tokens."""

    prompt: float = 0.0
    cached: float = 0.0  # of the prompts, found in a prefix cache
    output: float = 0.0
    at: float = 0.0

    def faded(self, now: float) -> Traffic:
        share = math.exp(-(now - self.at) / TRAFFIC_S)
        return Traffic(self.prompt * share, self.cached * share, self.output * share, now)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.output / TRAFFIC_S


@dataclass(slots=True)
class _Pace:
    """How fast a worker does one kind of work."""

    pace: float = 0.0  # seconds for one token of an answer; for prompts, times what is usual
    num: int = 0  # times, since it began anew
    slow_until: float = -math.inf

    def is_known(self, now: float) -> bool:
        """Whether the worker does this kind of work, so that it counts among those that do."""
        return self.num > 0 or now < self.slow_until


@dataclass(slots=True)
class _Answers(_Pace):
    """Their mean: each answer has many tokens."""

    def came(self, pace_s: float) -> None:
        self.pace += (pace_s - self.pace) * max(PACE_WEIGHT, 1 / (self.num + 1))
        self.num += 1


@dataclass(slots=True)
class _Prompts(_Pace):
    """The middle one of the last: a prompt of which less was cached than the router thought takes many times what its
    cost says, and that is no fault."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=MIN_ANSWERS))

    def came(self, times_usual: float) -> None:
        self.latest.append(times_usual)
        self.pace = statistics.median(self.latest)
        self.num += 1


@dataclass(slots=True)
class _Record:
    num_failures: int = 0  # in a row
    open_s: float = OPEN_S
    open_until: float = 0.0
    is_open: bool = False  # or half open, after `open_until`
    num_probes: int = 0  # requests that were let through while it was open, and run
    answers: _Answers = field(default_factory=_Answers)
    prompts: _Prompts = field(default_factory=_Prompts)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def slow_until(self) -> float:
        return max(self.answers.slow_until, self.prompts.slow_until)


_PaceOf = Callable[[_Record], _Pace]


class TrackRecord:
    """The track records of all workers, by `Endpoint.incarnation`: a worker that restarts begins anew."""

    def __init__(self, on_suspended: Callable[[str], None] = lambda _: None) -> None:
        """`on_suspended` is called each time that a worker is left alone from then on: "failures" or "slow"."""
        self._on_suspended = on_suspended
        self._records: dict[Incarnation, _Record] = {}
        self._troubled: set[Incarnation] = set()

    def suspended(self, worker: Incarnation, now: float) -> str:
        """Why `worker` should be left alone; empty if it should not. `now` in seconds."""
        record = self._records.get(worker)
        if record is None:
            return ""
        if record.is_open and now < record.open_until:
            return f"left alone for {record.open_until - now:.1f} s after {record.num_failures} failures in a row"
        if record.is_open and record.num_probes:
            return "probed by another request after failures"
        if now < record.slow_until:
            return f"left alone for {record.slow_until - now:.1f} s, as it was slower than others"
        return ""

    def troubled(self, now: float) -> list[Incarnation]:
        """Workers that may be left alone, and each once more that was until a moment ago: of all others `suspended`
        says nothing."""
        found = list(self._troubled)
        for worker in found:
            record = self._records.get(worker)
            if record is None or not (record.is_open or now < record.slow_until):
                self._troubled.discard(worker)
        return found

    def state(self, worker: Incarnation, now: float) -> str:
        """ "closed", "open", "half open" or "slow"."""
        record = self._records.get(worker)
        if record is None:
            return "closed"
        if record.is_open:
            return "open" if now < record.open_until else "half open"
        return "slow" if now < record.slow_until else "closed"

    def began(self, worker: Incarnation) -> bool:
        """A request was sent. True if it probes the worker: `ended` has to follow then."""
        record = self._records.setdefault(worker, _Record())
        record.num_probes += record.is_open
        return record.is_open

    def ended(self, worker: Incarnation) -> None:
        """A probe ended, however it did."""
        if (record := self._records.get(worker)) is not None:
            record.num_probes = max(record.num_probes - 1, 0)

    def probing(self, *workers: Incarnation) -> Probing:
        """While a request runs on workers that have failed before, no other request probes them. Requests that began
        before the failure do not count as probes: they may go on for long."""
        return Probing(self, workers)

    def failed(self, worker: Incarnation, now: float) -> None:
        """Counts a failure that was the worker's fault."""
        record = self._records.setdefault(worker, _Record())
        record.num_failures += 1
        if record.is_open and now >= record.open_until:
            record.open_s = min(2 * record.open_s, MAX_OPEN_S)
            record.open_until = now + record.open_s
            self._on_suspended("failures")
        elif not record.is_open and record.num_failures >= MAX_FAILURES:
            record.is_open = True
            record.open_until = now + record.open_s
            self._troubled.add(worker)
            self._on_suspended("failures")

    def succeeded(
        self,
        worker: Incarnation,
        now: float,
        num_tokens: int = 0,
        elapsed_s: float = 0.0,
        step_s: float | None = None,
    ) -> None:
        """Counts a complete answer. `elapsed_s`: how long the router waited for the worker between the first token and
        the last. A client that reads slowly is not its worker's fault.

        `step_s`: what the worker itself said that a token takes. A worker of a slower kind is as slow as it says, which
        routing knows: it is left alone only if it is slower than that, too."""
        record = self._records.setdefault(worker, _Record())
        record.num_failures, record.is_open, record.open_s = 0, False, OPEN_S
        if num_tokens < MIN_TOKENS:
            return
        record.answers.came(elapsed_s / (num_tokens - 1))
        if step_s is not None and record.answers.pace <= AS_SAID * step_s:
            return
        self._leave_alone_if_slow(worker, record.answers, lambda one: one.answers, SLOW_MARGIN_S, now)

    def prefilled(self, worker: Incarnation, now: float, times_usual: float) -> None:
        """Counts a prompt that took the prefill worker so many times as long as others of its size."""
        prompts = self._records.setdefault(worker, _Record()).prompts
        prompts.came(times_usual)
        self._leave_alone_if_slow(worker, prompts, lambda one: one.prompts, 0.0, now)

    def answered(self, worker: Incarnation, now: float, *, prompt: int, cached: int, output: int) -> None:
        """Counts the tokens of one answer."""
        record = self._records.setdefault(worker, _Record())
        faded = record.traffic.faded(now)
        record.traffic = Traffic(faded.prompt + prompt, faded.cached + cached, faded.output + output, now)

    def traffic(self, worker: Incarnation, now: float) -> Traffic:
        record = self._records.get(worker)
        return Traffic() if record is None else record.traffic.faded(now)

    def _leave_alone_if_slow(
        self, worker: Incarnation, pace: _Pace, pace_of: _PaceOf, margin: float, now: float
    ) -> None:
        """`pace` is the pace of `worker`, `pace_of` finds each worker's pace at the same kind of work. Workers that are
        suspended for the other kind still count in the comparison."""
        if pace.num < MIN_ANSWERS:
            return
        known = [record for record in self._records.values() if pace_of(record).is_known(now)]
        paces = [pace_of(record).pace for record in known if pace_of(record).num >= MIN_ANSWERS]
        num_slow = sum(now < record.slow_until for record in known)
        if len(paces) < MIN_WORKERS or 3 * (num_slow + 1) > len(known):
            return
        median = statistics.median(paces)
        if pace.pace > max(SLOW_FACTOR * median, median + margin):
            pace.slow_until = now + SLOW_S
            pace.num = 0
            self._troubled.add(worker)
            self._on_suspended("slow")

    def forget_others(self, workers: set[Incarnation]) -> None:
        """Forgets all workers but these."""
        for gone in self._records.keys() - workers:
            del self._records[gone]


class Probing:
    """See `TrackRecord.probing`. A generator would cost each request more."""

    __slots__ = ("_probed", "_record", "_workers")

    def __init__(self, record: TrackRecord, workers: Sequence[Incarnation]) -> None:
        self._record = record
        self._workers = workers

    def __enter__(self) -> Probing:
        self._probed = [worker for worker in self._workers if self._record.began(worker)]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it now, if it has not ended."""
        for worker in self._probed:
            self._record.ended(worker)
        self._probed = []
