"""Limits of each API key and each tenant: requests and tokens a second, and answers at a time.

From a YAML file, read again when it changes (`--limits-file`):

    default:                     # of each key that is not named below; of all together if no keys are asked for
      requests_per_second: 5
    keys:
      alice: {requests_per_second: 20, tokens_per_second: 50000, streams: 16}
    tenants:                     # of all keys of a tenant together, beside each key's own
      research: {tokens_per_second: 100000, weight: 2, priority: 1, slo_class: batch, slo_least: {ttft_ms: 2000}}
    slo_classes:                 # latency targets by name
      chat: {ttft_ms: 500, tpot_ms: 50}
      batch: {}

What is left out is not limited. A request counts when it comes, each further answer to it as one more, its prompt's
tokens before they are computed, and the answer's tokens as they come; an answer that has begun goes on, and who is in
debt waits longer for the next. Tokens of a prompt that no worker was asked for are given back. `weight` and `priority`
are for the queue (`request_queue`). `slo` and `slo_class`, of the default, a key or a tenant, are latency targets of
requests that ask for none (`targets`), and `slo_least` the tightest that a request may ask for itself.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pydantic
import yaml

from common import metrics
from common.config import Settings
from common.errors import InvalidArgumentError, OverloadedError, StartupError
from common.process.watched_files import FilesInUse, WatchedFiles, read_file
from common.targets import MAX_TARGET_MS, LatencyTargets
from router.limits.ledger import Ledger, LocalLedger
from router.limits.targets import NO_CLASS, NOTHING_GIVEN, GivenTargets, Slo, check_class, check_least, slo_of
from router.limits.token_bucket import TokenBucket

BURST_S = 2.0  # a rate's worth of so many seconds may come at once
STREAMS_RETRY_S = 1.0


_CLASS = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class Targets(Settings):
    """Latency targets. None: no such target."""

    ttft_ms: float | None = pydantic.Field(None, gt=0, le=MAX_TARGET_MS)
    tpot_ms: float | None = pydantic.Field(None, gt=0, le=MAX_TARGET_MS)


class Limits(Settings):
    requests_per_second: float | None = pydantic.Field(None, gt=0)
    tokens_per_second: float | None = pydantic.Field(None, gt=0)
    streams: int | None = pydantic.Field(None, gt=0)
    slo: Targets = Targets()
    slo_class: str = ""
    slo_least: Targets = Targets()

    @functools.cached_property
    def targets(self) -> GivenTargets:
        return GivenTargets(ttft_ms=self.slo.ttft_ms, tpot_ms=self.slo.tpot_ms, slo_class=self.slo_class)


class TenantLimits(Limits):
    weight: float = pydantic.Field(1.0, gt=0, le=1000)
    priority: int = pydantic.Field(0, ge=-100, le=100)


class LimitsFile(Settings):
    default: Limits = Limits()
    keys: dict[str, Limits] = pydantic.Field(default_factory=dict)
    tenants: dict[str, TenantLimits] = pydantic.Field(default_factory=dict)
    slo_classes: dict[str, Targets] = pydantic.Field(default_factory=dict)

    @functools.cached_property
    def classes(self) -> Mapping[str, GivenTargets]:
        return {name: GivenTargets(ttft_ms=one.ttft_ms, tpot_ms=one.tpot_ms) for name, one in self.slo_classes.items()}

    def _places(self) -> Iterable[tuple[str, Limits]]:
        """All that has targets, by its name in the file."""
        yield "default", self.default
        for name, limits in self.keys.items():
            yield f"keys.{name}", limits
        for name, limits in self.tenants.items():
            yield f"tenants.{name}", limits

    def wrong_class(self) -> str:
        """What is wrong with the classes; empty if nothing is."""
        for name in self.slo_classes:
            if not _CLASS.fullmatch(name) or name == NO_CLASS:
                return f"slo_classes: {name!r} is no name: up to 64 letters, digits and . _ @ -, and not {NO_CLASS}"
        for place, limits in self._places():
            if limits.slo_class and limits.slo_class not in self.slo_classes:
                return f"{place}.slo_class: there is no class {limits.slo_class!r} in slo_classes"
        return ""


def _least(places: Iterable[Limits]) -> LatencyTargets:
    """The tightest targets that may be asked for: each number of the first place that has it."""
    ttft_ms, tpot_ms = None, None
    for place in places:
        ttft_ms = place.slo_least.ttft_ms if ttft_ms is None else ttft_ms
        tpot_ms = place.slo_least.tpot_ms if tpot_ms is None else tpot_ms
    return LatencyTargets(ttft_ms, tpot_ms)


NO_TENANT_LIMITS = TenantLimits()


def read_limits(path: str) -> LimitsFile:
    """Raises `StartupError` that names the file and what is wrong in it."""
    try:
        content = yaml.safe_load(read_file("limits_file", path).decode()) or {}
        limits = LimitsFile.model_validate(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"limits_file: {path} is not YAML: {' '.join(str(error).split())}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise StartupError(f"limits_file: {path}: {where}: {first['msg']}") from error
    if wrong := limits.wrong_class():
        raise StartupError(f"limits_file: {path}: {wrong}")
    return limits


class Quotas:
    """Shared by all requests of a router. State is kept for names of the limits file and of keys alone."""

    def __init__(
        self,
        path: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
        targets: GivenTargets = NOTHING_GIVEN,
    ) -> None:
        """Without a `path` nothing is limited. `ledger` holds what was taken. `targets` are those of requests for which
        the file has none. Raises `StartupError`."""
        self._watched = None if path is None else WatchedFiles("limits", [path], lambda: read_limits(path))
        self._file = LimitsFile() if self._watched is None else self._watched.current()
        self._clock = clock
        self._buckets: dict[tuple[str, str, str], TokenBucket] = {}
        self._ledger = ledger or LocalLedger()
        self._targets = targets
        self.say_nothing = path is None and targets == NOTHING_GIVEN  # no request needs to ask them

    def look(self) -> None:
        """Reads the file again if it has changed."""
        if self._watched is not None:
            self._file = self._watched.current()

    def in_use(self) -> FilesInUse | None:
        """What is known of the file, after `look`; None without one."""
        if self._watched is None:
            return None
        self.look()
        return self._watched.in_use()

    def tenant(self, name: str) -> TenantLimits:
        return self._file.tenants.get(name, NO_TENANT_LIMITS)

    def slo(self, key: str, tenant: str, *asked: GivenTargets) -> Slo:
        """The latency targets of a request. `asked`: what it says itself, the most important first. By the limits as
        they were when it came. Raises `InvalidArgumentError` for a class that there is not, and for targets that are
        tighter than the client may ask for."""
        file = self._file
        for given in asked:
            check_class(given, file.classes)
        limits = [*self._say_targets(file, key, tenant)]
        if limits and any(given is not NOTHING_GIVEN for given in asked):
            check_least(asked, file.classes, _least(limits))
        return slo_of([*asked, *(one.targets for one in limits), self._targets], file.classes)

    def _say_targets(self, file: LimitsFile, key: str, tenant: str) -> Iterator[Limits]:
        if self._watched is None:
            return
        if key in file.keys:
            yield file.keys[key]
        if tenant and tenant in file.tenants:
            yield file.tenants[tenant]
        yield file.default

    def request(self, key: str, tenant: str) -> None:
        """Counts a new request. Raises `OverloadedError` if it is one too many."""
        self.look()
        self._charge("requests_per_second", "requests", key, tenant, 1)

    def check(self, key: str, tenant: str, num_tokens: int) -> None:
        """Whether a request with so many prompt tokens would be taken now; counts nothing. Raises `OverloadedError`."""
        self.look()
        limits = self._limits_of(key, tenant)
        for field, what, num in (("requests_per_second", "requests", 1), ("tokens_per_second", "tokens", num_tokens)):
            if limits and num:
                with self._ledger.locked():
                    self._check(self._buckets_of(field, limits, now := self._clock()), what, num, now)
        with self.streams(key, tenant):
            pass

    def more_requests(self, key: str, tenant: str, num: int) -> None:
        """An admitted body held `num` further requests. They are charged even if the bucket goes below zero: a body
        that is larger than a bucket would never find it full enough."""
        self._take("requests_per_second", key, tenant, num)

    def prompt(self, key: str, tenant: str, num_tokens: int) -> None:
        """Counts tokens that are about to be computed. Raises `OverloadedError` if they are too many."""
        self._charge("tokens_per_second", "tokens", key, tenant, num_tokens)

    def answered(self, key: str, tenant: str, num_tokens: int) -> None:
        """So many tokens of an answer came: they count, whether or not they were left. By the limits as they were when
        the last request came: the file is not looked at for each token."""
        if self._watched is None:
            return
        self._take("tokens_per_second", key, tenant, num_tokens)

    def give_back(self, key: str, tenant: str, num_tokens: int) -> None:
        """Gives tokens of `prompt` back that were not computed after all."""
        self._take("tokens_per_second", key, tenant, -num_tokens)

    def streams(self, key: str, tenant: str, num: int = 1, field: str = "") -> contextlib.AbstractContextManager[None]:
        """Around the answers to one request, of which `field` asks for `num`. Raises `OverloadedError`, and
        `InvalidArgumentError` if so many are never allowed."""
        owners = [
            ((kind, name), limits.streams)
            for kind, name, limits in self._limits_of(key, tenant)
            if limits.streams is not None
        ]
        for (kind, _), most in owners:
            if num > most:
                raise InvalidArgumentError(field, f"{num} answers: this {kind} may have {most} at a time")
        return self._taken(owners, num) if owners else contextlib.nullcontext()

    @contextlib.contextmanager
    def _taken(self, owners: Sequence[tuple[tuple[str, str], int]], num: int) -> Iterator[None]:
        with contextlib.ExitStack() as taken:
            for (kind, name), most in owners:
                entry = f"streams of {kind} {name}"
                if not self._ledger.take(entry, num, most):
                    metrics.router_refused.labels("streams").inc()
                    words = f"this {kind} has {self._ledger.total(entry)} answers in flight, and may have {most}"
                    raise OverloadedError(words, STREAMS_RETRY_S)
                taken.callback(self._ledger.give, entry, num)
            yield

    def _charge(self, field: str, what: str, key: str, tenant: str, num: int) -> None:
        limits = self._limits_of(key, tenant)
        if not limits:
            return
        now = self._clock()
        with self._ledger.locked():
            found = self._buckets_of(field, limits, now)
            self._check(found, what, num, now)
            for _, bucket in found:
                bucket.take(num, now)

    @staticmethod
    def _check(buckets: Sequence[tuple[str, TokenBucket]], what: str, num: int, now: float) -> None:
        """Inside of the ledger's lock. Raises `OverloadedError`."""
        for kind, bucket in buckets:
            if (wait_s := bucket.wait_s(num, now)) > 0:
                metrics.router_refused.labels(what).inc()
                raise OverloadedError(f"this {kind} may ask for {bucket.rate:g} {what} a second", wait_s)

    def _take(self, field: str, key: str, tenant: str, num: int) -> None:
        limits = self._limits_of(key, tenant)
        if not limits:
            return
        now = self._clock()
        with self._ledger.locked():
            for _, bucket in self._buckets_of(field, limits, now):
                bucket.take(num, now)

    def _limits_of(self, key: str, tenant: str) -> list[tuple[str, str, Limits]]:
        if self._watched is None:
            return []
        file = self._file
        found: list[tuple[str, str, Limits]] = [("key", key, file.keys.get(key, file.default))]
        if tenant and tenant in file.tenants:
            found.append(("tenant", tenant, file.tenants[tenant]))
        return found

    def _buckets_of(
        self, field: str, all_limits: list[tuple[str, str, Limits]], now: float
    ) -> list[tuple[str, TokenBucket]]:
        """Inside of the ledger's lock."""
        found = []
        for kind, name, limits in all_limits:
            rate: float | None = getattr(limits, field)
            if rate is None:
                if self._buckets.pop((field, kind, name), None) is not None:
                    self._ledger.forget_state(f"{field} of {kind} {name}")
                continue
            burst = max(rate * BURST_S, 1.0)
            bucket = self._buckets.get((field, kind, name))
            if bucket is None:
                bucket = self._buckets[field, kind, name] = TokenBucket(
                    rate, burst, self._ledger.state(f"{field} of {kind} {name}")
                )
            elif bucket.rate != rate:
                bucket.change(rate, burst, now)
            found.append((kind, bucket))
        return found
