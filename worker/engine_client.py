"""The gRPC front's side of the engine: sends commands, hands each request its own events, and notices if the engine is
gone.

A request is a stream: `with engine.open(request_id, num_tokens) as stream: stream.send(...); await stream.next()`.
Leaving the block releases the request, whatever its state (a prefill's blocks maybe later). Engine-side ids get a
suffix, so that two requests that bring the same id don't meet.

What waits for the engine to begin with it is bounded (`--max-waiting-requests`, `--max-waiting-tokens`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from common import metrics
from common.config import WorkerSettings
from common.errors import BatonError, OverloadedError, StartupError, UnavailableError
from common.metric_relay import MetricRelay
from common.process.tasks import VitalTasks
from common.types import WorkerLoad
from engine import messages as m
from worker.block_feed import BlockFeed
from worker.engine_calls import EngineCalls
from worker.engine_process import STOP_TIMEOUT_S, EngineProcess, StartEngine, exit_words
from worker.engine_stream import EngineStream

log = logging.getLogger(__name__)

SILENCE_TICK_S = 0.5


class EngineClient:
    def __init__(
        self,
        settings: WorkerSettings,
        name: str,
        model_dir: Path,
        worker_id: str,
        epoch: str,
        start_engine: StartEngine | None = None,
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._streams: dict[str, EngineStream] = {}
        self._kept: set[asyncio.TimerHandle] = set()  # when to let go of blocks that others may still read
        self._numbers = itertools.count(1)
        self._num_waiting = 0  # requests that the engine has not begun with
        self._num_waiting_tokens = 0
        self._load_changed = asyncio.Condition()
        self._relay = MetricRelay(metrics.ENGINE_METRICS)
        self._failure = ""  # the engine's own last word
        self._process = EngineProcess(settings, f"{name}.engine", model_dir, worker_id, epoch, start_engine)
        self._tasks = VitalTasks(self._give_engine_up)
        self._ready: asyncio.Future[m.EngineReady] = asyncio.get_running_loop().create_future()
        self._silence_s = 0.0  # how long the engine has said nothing
        self.load = WorkerLoad()
        self.counted_requests: Sequence[int] = ()  # see `m.LoadChanged`
        self.batch_time: m.BatchTimeChanged | None = None  # the latest, with the latest model
        self.calls = EngineCalls(self.send)
        self.blocks = BlockFeed(lambda: self.send(m.GetBlocks()))
        self.died = asyncio.Event()

    async def spawn(self) -> None:
        """Starts the process. Call it before gRPC has threads, which do not survive the fork."""
        await self._process.start()
        self._tasks.start(self._receive(), name="engine's events")
        self._tasks.start(self._watch(), name="engine's end")
        self._tasks.start(self._watch_silence(), name="engine's silence")

    async def wait_ready(self) -> m.EngineReady:
        """Waits until the model is loaded. Raises `StartupError` with the engine's own reason."""
        return await asyncio.shield(self._ready)

    def show_debug(self, *, is_on: bool) -> None:
        """See `common.logs`."""
        if not self.died.is_set() and self._process.is_open:
            self.send(m.ShowDebug(is_on))

    def order_level(self, level: str) -> None:
        """See `common.logs`."""
        if not self.died.is_set() and self._process.is_open:
            self.send(m.OrderLevel(level))

    @property
    def pid(self) -> int:
        """The engine process's. Raises `UnavailableError` if it has ended."""
        return self._process.pid

    async def stop(self) -> None:
        """Ends the engine process."""
        self._tasks.cancel()
        for timer in self._kept:
            timer.cancel()
        await self._process.stop()

    # ------------------------------------------------------------------------------------------- requests

    @contextlib.contextmanager
    def open(self, request_id: str, num_tokens: int) -> Iterator[EngineStream]:
        """A request of `num_tokens` prompt tokens. Raises `UnavailableError` if the engine has died, and
        `OverloadedError` if too much waits for it already."""
        if self.died.is_set():
            raise UnavailableError(f"the engine process ended: {self._failure}")
        self._check_room(num_tokens)
        stream = EngineStream(self, request_id, m.engine_id_of(request_id, next(self._numbers)), num_tokens)
        self._streams[stream.engine_id] = stream
        self._num_waiting += 1
        self._num_waiting_tokens += num_tokens
        try:
            yield stream
        except asyncio.CancelledError:
            log.info("released before its end: the caller went away", extra={"request_id": request_id})
            raise
        finally:
            del self._streams[stream.engine_id]
            self._begun(stream)
            if stream.keep_s and not self.died.is_set():
                self._release_later(stream)
            else:
                self.release(stream.engine_id)

    def _check_room(self, num_tokens: int) -> None:
        """Raises `OverloadedError` if too much waits already. While nothing waits, a prompt of any length may."""
        limits = self._settings
        if self._num_waiting >= limits.max_waiting_requests:
            what = f"{self._num_waiting} requests (--max-waiting-requests)"
        elif self._num_waiting and self._num_waiting_tokens + num_tokens > limits.max_waiting_tokens:
            what = f"{self._num_waiting_tokens} prompt tokens (--max-waiting-tokens)"
        else:
            return
        metrics.worker_requests_refused.inc()
        raise OverloadedError(f"worker {self._worker_id} is full: {what} wait already")

    def _begun(self, stream: EngineStream) -> None:
        """The request waits no more: the engine has begun with it, or it has ended."""
        if stream.num_waiting_tokens:
            self._num_waiting -= 1
            self._num_waiting_tokens -= stream.num_waiting_tokens
            stream.num_waiting_tokens = 0

    def _release_later(self, stream: EngineStream) -> None:
        """Releases the request's blocks after `keep_s`. Neither a drain nor the end of this process waits for that: the
        blocks end with the process, for their readers too."""
        metrics.worker_leases_kept.inc()
        log.warning(
            "its decode worker did not end the lease, keeping its blocks for a while",
            extra={"request_id": stream.request_id, "keep_s": stream.keep_s},
        )
        self.send(m.StopPrefill(stream.engine_id))
        self._later(stream.keep_s, self.release, stream.engine_id)

    def end_loan(self, engine_id: str, request_id: str, after_s: float) -> None:
        """Ends a request's loan after `after_s`. Neither a drain nor the end of this process waits for that."""
        if not after_s:
            self._end_loan(engine_id)
            return
        log.warning(
            "its prefill worker did not end the stream, keeping what it was lent for a while",
            extra={"request_id": request_id, "keep_s": after_s},
        )
        self._later(after_s, self._end_loan, engine_id)

    def _later(self, after_s: float, let_go: Callable[[str], None], engine_id: str) -> None:
        def due() -> None:
            self._kept.discard(timer)
            let_go(engine_id)

        timer = asyncio.get_running_loop().call_later(after_s, due)
        self._kept.add(timer)

    def _end_loan(self, engine_id: str) -> None:
        if not self.died.is_set() and self._process.is_open:
            self.send(m.EndLoan(engine_id))

    def release(self, engine_id: str) -> None:
        if not self.died.is_set():
            self.send(m.Release(engine_id))

    def send(self, *commands: m.Command) -> None:
        self._process.send(m.encode(commands))

    async def load_change(self, timeout_s: float) -> None:
        """Returns when the load has changed, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._load_changed:
                await self._load_changed.wait()

    async def notify_load(self) -> None:
        """Wakes everyone who waits in `load_change`."""
        async with self._load_changed:
            self._load_changed.notify_all()

    # ------------------------------------------------------------------------------------------ internals

    async def _receive(self) -> None:
        while True:
            message = await self._process.receive()
            self._silence_s = 0.0
            for event in m.decode_events(message):
                await self._dispatch(event)

    async def _dispatch(self, event: m.Event) -> None:
        match event:
            case m.EngineReady():
                self._process.connected()
                if not self._ready.done():
                    self._ready.set_result(event)
            case m.Alive():
                pass
            case m.EngineFailed(message):
                self._failure = message
            case m.LoadChanged(load, counted):
                self.load, self.counted_requests = load, counted
                _show_load(load)
                await self.notify_load()
            case m.BlocksChanged(stored, removed):
                self.blocks.changed(stored, removed)
            case m.BlocksListed(names):
                self.blocks.listed(names)
            case m.MetricsChanged(changes):
                self._relay.apply(changes)
            case m.BatchTimeChanged():
                await self._learn_times(event)
            case m.Status() | m.CacheHinted() | m.StepsProfiled():
                self.calls.answered(event)
            case _:
                if stream := self._streams.get(event.request_id):
                    self._begun(stream)
                    stream.put(event)

    async def _learn_times(self, event: m.BatchTimeChanged) -> None:
        before, self.batch_time = self.batch_time, event
        if before is not None and not event.model:
            self.batch_time = msgspec.structs.replace(event, model=before.model)
        metrics.worker_step_time_error.labels("50").set(event.error_median)
        metrics.worker_step_time_error.labels("90").set(event.error_p90)
        metrics.worker_step_time_drifts.set(event.drifts)
        if before is None or before.version != event.version:
            await self.notify_load()  # which has the version

    async def _watch(self) -> None:
        """Fails all requests if the engine process ends without having been told to."""
        code = await self._process.ended()
        await asyncio.sleep(0.05)  # its last message may still be on its way
        self._failure = self._failure or exit_words(code)
        self._declare_dead(code)

    def _give_engine_up(self, failure: BatonError) -> None:
        """Declares the engine dead after a task that passes its events on has ended, since nothing hears the engine any
        more."""
        self._failure = self._failure or failure.message
        self._declare_dead(None)

    def _declare_dead(self, code: int | None) -> None:
        """`code` is None if the process has not ended: it was killed and hangs, or is not heard any more."""
        self._tasks.let_end()
        if not self._ready.done():
            self._ready.set_exception(StartupError(self._failure))
            return
        if self.died.is_set():
            return
        log.error("the engine process ended", extra={"reason": self._failure, "exit_code": code})
        self.died.set()
        for stream in self._streams.values():
            stream.put(m.RequestFailed(stream.engine_id, "UNAVAILABLE", f"the engine process ended: {self._failure}"))

    async def _watch_silence(self) -> None:
        """Kills an engine that has been silent for `engine_timeout`; `_watch` then sees it end like any other.

        What is watched is the engine's loop, which passes here between the layers of a step, and not a thread beside
        it: that would go on while the loop is stuck. So the timeout has to exceed what one layer of the largest step
        takes, and not a whole step. Counts ticks rather than time, since a front that was itself stopped, together
        with its engine or alone, must not take its own absence for the engine's.
        """
        await asyncio.wait([self._ready])
        timeout_s = self._settings.engine_timeout
        while self._silence_s < timeout_s:
            await asyncio.sleep(SILENCE_TICK_S)
            self._silence_s += SILENCE_TICK_S
        if self._process.is_running:
            metrics.worker_engine_hangs.inc()
            self._failure = f"killed, as it gave no sign of life for {timeout_s:g} s (--engine-timeout)"
            log.error("the engine hangs, killing it", extra={"timeout_s": timeout_s, "num_streams": len(self._streams)})
            self._process.kill()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.died.wait()
            except TimeoutError:
                self._failure += "; a system call of its does not return"
                self._declare_dead(None)


def _show_load(load: WorkerLoad) -> None:
    metrics.worker_requests_running.set(load.num_requests_running)
    metrics.worker_requests_waiting.set(load.num_requests_waiting)
    metrics.worker_queued_prompt_tokens.set(load.num_queued_prompt_tokens)
    metrics.worker_leases.set(load.num_leases)
    num_owned = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
    for state, count in (("empty", load.num_free_blocks), ("cached", load.num_cached_blocks), ("owned", num_owned)):
        metrics.worker_kv_blocks.labels(state).set(count)
