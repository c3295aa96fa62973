"""What every servicer of one worker process shares: its identity, its engine, and whether it takes new work."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from common import metrics
from common.cache_hints import MAX_RETAIN_S, Retain, check_retain
from common.config import WorkerSettings
from common.errors import (
    AbortedError,
    BatonError,
    DeadlineError,
    IncompatibleError,
    InvalidArgumentError,
    UnavailableError,
    error_of,
)
from common.grpc.transport import Channels
from common.logs import flip_debug, order_level
from common.model_files import broken_template
from common.retry_budget import hedge_budget
from common.targets import LatencyTargets, check_age_ms, check_targets
from common.tracing import RequestSpans, SpanSink, Traced, sampled_context
from common.types import WorkerRole, WorkerState
from common.validation import ModelLimits, check_priority, check_prompt
from engine.messages import EngineReady, RequestFailed
from worker.channels import ChannelPool
from worker.engine_client import EngineClient
from worker.engine_process import StartEngine
from worker.engine_stream import EngineStream, HandoverDue
from worker.profiles import Profiles
from worker.role import Pin, RoleShifts

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Work:
    """One stream that the worker serves."""

    service: str
    request_id: str = ""
    stream: EngineStream | None = None  # once the engine knows of it


STORED_POLL_S = 0.02
MAX_NAME_CHARS = 4096  # a router makes it of a tenant and a salt; JSON may write one of their characters as twelve


def worker_id(settings: WorkerSettings, role: WorkerRole, epoch: str) -> str:
    """The worker's id, made of the address by which others reach it, so that peers recognise a restarted worker.

    If the settings do not say the address (any interface or port, or one of this machine alone), it is made of the
    epoch: two workers that share an id would take each other for a restart.
    """
    address = settings.advertise or (settings.listen if _is_routable(settings.listen) else "")
    return f"{role.value}-{address or epoch[:8]}"


def _is_routable(listen: str) -> bool:
    host, _, port = listen.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return port != "0" and not ip.is_unspecified and not ip.is_loopback


class Worker:
    """One worker process. `epoch` is new at each start, so that references into an earlier process are recognised."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: WorkerRole,
        model_dir: Path,
        model_name: str,
        start_engine: StartEngine | None = None,
    ) -> None:
        self.settings = settings
        self.role = role
        self.model_dir = model_dir
        self.model_name = model_name
        self.epoch = uuid.uuid4().hex[:16]
        self.worker_id = worker_id(settings, role, self.epoch)
        self.address = ""  # as others reach it; set once the port is bound
        self.state = WorkerState.READY
        self.roles = RoleShifts(role, settings, self.offer_handover)
        self.engine = EngineClient(settings, role.value, model_dir, self.worker_id, self.epoch, start_engine)
        self.channels = ChannelPool(Channels(settings))
        self.profiles = Profiles(self.engine)
        self.hedges = hedge_budget()
        self.drain_requested = asyncio.Event()
        self.drain_timeout = settings.drain_timeout
        self.spans: SpanSink | None = None  # set once the engine's process has begun, before which no thread may be
        self.active: set[Work] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready: EngineReady | None = None
        self.chat_template_error = ""  # why the model's chat template cannot be used; empty if it can, or if none

    async def wait_ready(self) -> None:
        """Waits for the engine. Raises `StartupError` with its reason."""
        self.chat_template_error = await asyncio.to_thread(broken_template, Path(self.model_dir))
        if self.chat_template_error:
            log.error("no chats are served with a broken template", extra={"reason": self.chat_template_error})
        self._ready = await self.engine.wait_ready()

    @property
    def ready(self) -> EngineReady:
        if self._ready is None:
            raise UnavailableError("the worker is still starting")
        return self._ready

    @property
    def fingerprint(self) -> str:
        return self.ready.spec.fingerprint()

    @property
    def limits(self) -> ModelLimits:
        """Limits of requests that are token ids already."""
        ready = self.ready
        return ModelLimits(
            model=self.model_name, max_model_len=ready.max_model_len, vocab_size=ready.vocab_size, max_token_bytes=1
        )

    @contextlib.asynccontextmanager
    async def admit(self, work: Work) -> AsyncIterator[None]:
        """Counts `work` as active while the block runs. Raises `UnavailableError` while draining or paused, and
        `DeadlineError` if the work takes longer than `--max-request-time`."""
        if self.state is not WorkerState.READY:
            raise UnavailableError(f"worker {self.worker_id} is {self.state.value}")
        self.active.add(work)
        self._idle.clear()
        limit = asyncio.timeout(self.settings.max_request_time)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(f"it took {self.settings.max_request_time:g} s (--max-request-time)") from None
        finally:
            self.active.discard(work)
            if not self.active:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits for all work in flight to end, until the timeout. Returns whether it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._idle.wait()
        return not self.active

    def finish_later(self, work: Coroutine[None, None, None]) -> None:
        """Runs short work that no caller has to wait for and that does not raise. The process waits for it before it
        ends."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def wait_finished(self) -> None:
        while self._finishing:
            await asyncio.wait(self._finishing)

    async def wait_stored(self, deadline: float) -> int:
        """Waits until `deadline`, in `time.monotonic`, for computed KV to reach the store. Returns how many blocks are
        left."""
        while True:
            num_left = (await self.engine.calls.status()).load.num_unstored_blocks
            if not num_left or time.monotonic() >= deadline:
                return num_left
            await asyncio.sleep(STORED_POLL_S)

    async def pause(self, *, is_paused: bool) -> None:
        """Takes no new work from now on, or takes it again. Raises `IncompatibleError` while draining."""
        if self.drain_requested.is_set():
            raise IncompatibleError(f"worker {self.worker_id} drains, and will end")
        self.state = WorkerState.PAUSED if is_paused else WorkerState.READY
        metrics.worker_paused.set(is_paused)
        await self.engine.notify_load()

    async def set_role(self, role: WorkerRole, pin: Pin | None, num_shifts: int | None, reason: str) -> int:
        """See `RoleShifts`. Returns how many streams of work go on that it takes no longer. Raises
        `IncompatibleError`."""
        if self.drain_requested.is_set():
            raise IncompatibleError(f"worker {self.worker_id} drains, and will end")
        self.roles.check(role, pin, num_shifts)
        left = {WorkerRole.PREFILL: "decode", WorkerRole.DECODE: "prefill"}.get(role)
        num_streams = sum(work.service == left for work in self.active)
        if self.roles.set(role, pin, reason, num_streams):
            await self.engine.notify_load()
        return num_streams

    def offer_handover(self) -> None:
        """Offers each answer to its router, which takes it elsewhere if another decode worker is ready."""
        for work in self.active:
            if work.service == "decode" and work.stream is not None:
                work.stream.put(HandoverDue())
                log.debug("offering a handover", extra={"request_id": work.request_id})

    def abort(self, request_id: str, reason: str) -> int:
        """Ends this request's answers and embeddings here. Returns how many there were. A prefill ends with the answer
        that it is for."""
        error = AbortedError(reason)
        found = [work for work in self.active if work.request_id == request_id and work.service != "prefill"]
        for stream in [work.stream for work in found if work.stream is not None]:
            stream.put(RequestFailed(stream.engine_id, error.grpc_code, error.reason, error.field))
        return sum(work.stream is not None for work in found)

    def order_level(self, level: str) -> None:
        """Which log lines this process and its engine show from now on."""
        order_level(level)
        self.engine.order_level(level)

    def flip_debug(self) -> None:
        """This process and its engine show debug lines, or show them no longer."""
        self.engine.show_debug(is_on=flip_debug())

    def traced(self, traceparent: str, tracestate: str) -> RequestSpans | None:
        """Takes spans of a request whose caller says that it is sampled; None if they would go nowhere."""
        if self.spans is None or not traceparent:
            return None
        caller = sampled_context(traceparent, tracestate)
        return None if caller is None else RequestSpans(Traced(caller.child(), caller))

    def check_fingerprint(self, fingerprint: str) -> None:
        if fingerprint and fingerprint != self.fingerprint:
            spec = self.ready.spec
            raise IncompatibleError(
                f"KV blocks of fingerprint {fingerprint} do not fit worker {self.worker_id} ({self.fingerprint}: "
                f"model {spec.model_id}, {spec.dtype}, blocks of {spec.block_size} tokens)"
            )

    def check_priority(self, priority: int) -> None:
        check_priority(priority)
        if priority and not self.settings.takes_priorities:
            raise InvalidArgumentError(
                "priority", f"must be 0, not {priority}: requests run in the order of their arrival (--queue-policy)"
            )

    def check_tokens(self, field: str, token_ids: Sequence[int], *, has_answer: bool = True) -> None:
        """Refuses what the model cannot take in, naming `field`."""
        check_prompt(token_ids, self.limits, field, has_answer=has_answer)


def check_names(request_id: str, cache_salt: str) -> None:
    """Checks the texts that go into log lines and names of blocks. They come from a router or decode worker, which may
    have added to what its client sent. Raises `InvalidArgumentError`."""
    for field, text in (("request_id", request_id), ("cache_salt", cache_salt)):
        if len(text) > MAX_NAME_CHARS:
            raise InvalidArgumentError(field, f"must have at most {MAX_NAME_CHARS} characters, not {len(text)}")
    if not request_id.isprintable():
        raise InvalidArgumentError("request_id", "must be printable")


def check_hint(retain: Retain | None, tenant: str) -> None:
    """Raises `InvalidArgumentError`."""
    if retain is not None:
        check_retain(retain, MAX_RETAIN_S)
    if len(tenant) > MAX_NAME_CHARS:
        raise InvalidArgumentError("tenant", f"must have at most {MAX_NAME_CHARS} characters, not {len(tenant)}")


def check_latency(targets: LatencyTargets | None, age_ms: float) -> None:
    """Raises `InvalidArgumentError`."""
    if targets is not None:
        check_targets(targets, "targets")
    check_age_ms(age_ms, "age_ms")


@contextlib.contextmanager
def ends_counted(service: str) -> Iterator[None]:
    """Counts by what outcome streams of `service` end."""
    code = "OK"
    try:
        yield
    except BatonError as error:
        code = error.grpc_code
        raise
    except DecodeError:
        code = InvalidArgumentError.grpc_code
        raise
    except asyncio.CancelledError:
        code = "CANCELLED"
        raise
    except BaseException:
        code = "UNKNOWN"
        raise
    finally:
        metrics.worker_streams.labels(service, code).inc()


def error_from(event: RequestFailed) -> BatonError:
    """The error that an engine's refusal stands for."""
    return error_of(event.grpc_code, event.reason, field=event.field)
