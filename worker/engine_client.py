"""The gRPC front's side of the engine process: starts it, sends commands, hands each request its own events.

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
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from common import metrics
from common.config import WorkerSettings
from common.errors import BatonError, OverloadedError, StartupError, UnavailableError
from common.metric_relay import MetricRelay
from common.tasks import VitalTasks
from common.types import WorkerLoad
from engine import messages as m
from engine.process import Bootstrap
from worker.block_feed import BlockFeed
from worker.engine_stream import EngineStream

log = logging.getLogger(__name__)

ENGINE_MODULE = "engine.process"
STATUS_TIMEOUT_S = 10.0
SILENCE_TICK_S = 0.5
_HUGE_PAGES = "glibc.malloc.hugetlb"
_STOP_TIMEOUT_S = 5.0  # until an engine that is told to end is killed, and until that is given up


class EngineClient:
    def __init__(self, settings: WorkerSettings, name: str, model_dir: Path, worker_id: str, epoch: str) -> None:
        self._settings = settings
        self._name = name
        self._model_dir = model_dir
        self._worker_id = worker_id
        self._epoch = epoch
        self._streams: dict[str, EngineStream] = {}
        self._kept: set[asyncio.TimerHandle] = set()  # when to let go of blocks that others may still read
        self._numbers = itertools.count(1)
        self._num_waiting = 0  # requests that the engine has not begun with
        self._num_waiting_tokens = 0
        self._asked: tuple[int, asyncio.Future[m.Status]] | None = None  # the status call under way
        self._asked_next: asyncio.Future[m.Status] | None = None  # whose callers came after it had begun
        self._hints: dict[int, asyncio.Future[m.CacheHinted]] = {}  # by call id: calls under way
        self._load_changed = asyncio.Condition()
        self._relay = MetricRelay(metrics.ENGINE_METRICS)
        self._failure = ""  # the engine's own last word
        self._folder = ""
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks = VitalTasks(self._give_engine_up)
        self._ready: asyncio.Future[m.EngineReady] = asyncio.get_running_loop().create_future()
        self._silence_s = 0.0  # how long the engine has said nothing
        self.load = WorkerLoad()
        self.blocks = BlockFeed(lambda: self.send(m.GetBlocks()))
        self.died = asyncio.Event()

    async def spawn(self) -> None:
        """Starts the process. To be called before gRPC has threads, which don't survive the fork."""
        self._folder = tempfile.mkdtemp(prefix="baton-engine-")
        address = f"ipc://{self._folder}/engine.sock"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)  # commands are small, and bounded by admission
        self._socket.bind(address)
        bootstrap = Bootstrap(
            address=address,
            name=f"{self._name}.engine",
            model_dir=str(self._model_dir),
            worker_id=self._worker_id,
            epoch=self._epoch,
            settings=self._settings.model_dump_json(),
        )
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", ENGINE_MODULE,
            stdin=asyncio.subprocess.PIPE,
            env=engine_environment(self._settings, os.environ),
            start_new_session=True,  # Ctrl-C goes to the front alone, which drains
        )  # fmt: skip
        assert self._process.stdin is not None  # noqa: S101 (a pipe was asked for)
        self._process.stdin.write(msgspec.json.encode(bootstrap) + b"\n")
        self._tasks.start(self._receive(), name="engine's events")
        self._tasks.start(self._watch(), name="engine's end")
        self._tasks.start(self._watch_silence(), name="engine's silence")

    async def wait_ready(self) -> m.EngineReady:
        """Waits until the model is loaded. Raises `StartupError` with the engine's own reason."""
        return await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """Ends the engine process. Closing its standard input is what tells it. One in a system call of a dead file
        system ends with that call, and is not waited for."""
        process, self._process = self._process, None
        self._tasks.cancel()
        for timer in self._kept:
            timer.cancel()
        if process is not None and process.returncode is None:
            assert process.stdin is not None  # noqa: S101
            process.stdin.close()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                log.warning("the engine did not end, killing it")
                process.kill()
                try:
                    async with asyncio.timeout(_STOP_TIMEOUT_S):
                        await process.wait()
                except TimeoutError:
                    log.error("the engine was killed and does not end: a system call of its does not return")
        if self._socket is not None:
            self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- requests

    @contextlib.contextmanager
    def open(self, request_id: str, num_tokens: int) -> Iterator[EngineStream]:
        """A request of `num_tokens` prompt tokens. Raises `UnavailableError` if the engine has died, and
        `OverloadedError` if too much waits for it already."""
        if self.died.is_set():
            raise UnavailableError(f"the engine process ended: {self._failure}")
        self._check_room(num_tokens)
        stream = EngineStream(self, request_id, f"{request_id}#{next(self._numbers)}", num_tokens)
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
                self._keep(stream)
            else:
                self.release(stream.engine_id)

    def _check_room(self, num_tokens: int) -> None:
        """One prompt may always wait, however long it is."""
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
        """The engine has begun with the request, or it is over: it waits no more."""
        if stream.num_waiting_tokens:
            self._num_waiting -= 1
            self._num_waiting_tokens -= stream.num_waiting_tokens
            stream.num_waiting_tokens = 0

    def _keep(self, stream: EngineStream) -> None:
        """Releases the request later. Nobody waits for that: neither a drain nor the end of this process, with which
        the blocks are gone for their readers too."""
        metrics.worker_leases_kept.inc()
        log.warning(
            "its decode worker did not end the lease, keeping its blocks for a while",
            extra={"request_id": stream.request_id, "keep_s": stream.keep_s},
        )
        self.send(m.StopPrefill(stream.engine_id))
        self._later(stream.keep_s, self.release, stream.engine_id)

    def end_loan(self, engine_id: str, request_id: str, after_s: float) -> None:
        """Blocks that a request lent are free after `after_s`, for which nobody waits either."""
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
        if not self.died.is_set() and self._socket is not None and not self._socket.closed:
            self.send(m.EndLoan(engine_id))

    def release(self, engine_id: str) -> None:
        if not self.died.is_set():
            self.send(m.Release(engine_id))

    def send(self, *commands: m.Command) -> None:
        if self._socket is None or self._socket.closed:
            raise UnavailableError("the engine is not running")
        self._socket.send(m.encode(commands))  # sent at once: the high-water mark is off

    async def status(self) -> m.Status:
        """Load and integrity between two steps, as of after this call. Raises `UnavailableError` if no answer comes.

        The engine is asked once at a time, however many ask: those who come meanwhile share the next answer.
        """
        if self._asked is None:
            self._ask_status(asyncio.get_running_loop().create_future())
        elif self._asked_next is None:
            self._asked_next = asyncio.get_running_loop().create_future()
        future = self._asked_next or self._asked[1]  # type: ignore[index] # set by `_ask_status`
        try:
            # Shielded: others wait for it, and a caller may go away at any time.
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await asyncio.shield(future)
        except TimeoutError:
            raise UnavailableError(f"the engine gave no status within {STATUS_TIMEOUT_S:.0f} s") from None

    def _ask_status(self, future: asyncio.Future[m.Status]) -> None:
        call_id = next(self._numbers)
        self.send(m.GetStatus(call_id))
        self._asked, self._asked_next = (call_id, future), None

    def _take_in_status(self, status: m.Status) -> None:
        if self._asked is None or self._asked[0] != status.call_id:
            return
        self._asked[1].set_result(status)
        self._asked = None
        if self._asked_next is not None:
            self._ask_status(self._asked_next)

    async def hint_cache(
        self, action: m.CacheAction, block_hashes: list[bytes], *, tenant: str, seconds: float
    ) -> m.CacheHinted:
        """Raises `UnavailableError` if no answer comes."""
        call_id = next(self._numbers)
        future: asyncio.Future[m.CacheHinted] = asyncio.get_running_loop().create_future()
        self._hints[call_id] = future
        try:
            self.send(
                m.HintCache(call_id=call_id, action=action, block_hashes=block_hashes, tenant=tenant, seconds=seconds)
            )
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise UnavailableError(f"the engine gave no answer within {STATUS_TIMEOUT_S:.0f} s") from None
        finally:
            del self._hints[call_id]

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
        assert self._socket is not None  # noqa: S101
        while True:
            message = await self._socket.recv()
            self._silence_s = 0.0
            for event in m.decode_events(message):
                await self._dispatch(event)

    async def _dispatch(self, event: m.Event) -> None:
        match event:
            case m.EngineReady():
                shutil.rmtree(self._folder, ignore_errors=True)  # connected: the socket's name is not needed any more
                if not self._ready.done():
                    self._ready.set_result(event)
            case m.Alive():
                pass
            case m.EngineFailed(message):
                self._failure = message
            case m.LoadChanged(load):
                self.load = load
                _show_load(load)
                await self.notify_load()
            case m.BlocksChanged(stored, removed):
                self.blocks.changed(stored, removed)
            case m.BlocksListed(names):
                self.blocks.listed(names)
            case m.MetricsChanged(changes):
                self._relay.apply(changes)
            case m.Status():
                self._take_in_status(event)
            case m.CacheHinted(call_id=call_id):
                if (future := self._hints.get(call_id)) and not future.done():
                    future.set_result(event)
            case _:
                if stream := self._streams.get(event.request_id):
                    self._begun(stream)
                    stream.put(event)

    async def _watch(self) -> None:
        """Tells everyone when the engine process ends without having been asked to."""
        assert self._process is not None  # noqa: S101
        code = await self._process.wait()
        await asyncio.sleep(0.05)  # its last message may still be on its way
        self._failure = self._failure or _exit_words(code)
        self._declare_dead(code)

    def _give_engine_up(self, failure: BatonError) -> None:
        """A task that stands between the engine and its requests has ended: nobody hears the engine any more."""
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
        if self._process is not None and self._process.returncode is None:
            metrics.worker_engine_hangs.inc()
            self._failure = f"killed, as it gave no sign of life for {timeout_s:g} s (--engine-timeout)"
            log.error("the engine hangs, killing it", extra={"timeout_s": timeout_s, "num_streams": len(self._streams)})
            self._process.kill()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self.died.wait()
            except TimeoutError:
                self._failure += "; a system call of its does not return"
                self._declare_dead(None)


def engine_environment(settings: WorkerSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """What the engine's libraries read once, before any of its own code runs. `environ` is this process's.

    OpenMP's thread count; and that the GNU C library's malloc asks for pages of 2 MiB. A decode step reads all weights,
    more than the processor has addresses of small pages at hand for: it takes 6 to 8 % less with large ones.
    """
    environment = dict(environ)
    if num_threads := settings.num_threads or len(settings.cpu_cores):
        environment["OMP_NUM_THREADS"] = str(num_threads)
    tunables = environment.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES not in tunables:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    return environment


def _show_load(load: WorkerLoad) -> None:
    metrics.worker_requests_running.set(load.num_requests_running)
    metrics.worker_requests_waiting.set(load.num_requests_waiting)
    metrics.worker_queued_prompt_tokens.set(load.num_queued_prompt_tokens)
    metrics.worker_leases.set(load.num_leases)
    num_owned = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
    for state, count in (("empty", load.num_free_blocks), ("cached", load.num_cached_blocks), ("owned", num_owned)):
        metrics.worker_kv_blocks.labels(state).set(count)


def _exit_words(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
