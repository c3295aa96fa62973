"""The engine's own process: `python -m engine.process`, started by `worker.engine_process`.

It reads one line of JSON from standard input (`Bootstrap`), connects back over a local ZeroMQ pair, and serves until
standard input closes, which happens when its parent ends, however it ends. Linux makes sure of that. A parent that ends
it as intended says so before (`END_LINE`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from common import metrics
from common.config import WorkerSettings
from common.errors import BatonError, ConfigError
from common.grpc.options import LOSS_NOTICED_S
from common.logs import order_level, setup_logging, show_debug
from common.metric_relay import MetricRelay
from common.process.parent import die_with_parent
from common.process.tasks import end_with_threads
from common.types import LOAD_INTERVAL_S, WorkerLoad
from engine import messages as m
from engine.local.device_choice import SIMULATED

END_LINE = "end\n"  # last line of standard input
IDLE_POLL_S = 1.0
ALIVE_INTERVAL_S = 1.0  # the front hears something at least this often, in mid-step too, else the engine hangs
METRICS_INTERVAL_S = 1.0
BLOCKS_INTERVAL_S = 0.02  # block names that come and go are told on change, at most this often

if TYPE_CHECKING:
    from engine.core import EngineCore  # the gRPC front imports Bootstrap from here without loading these
    from engine.device import Device
    from engine.learning.report import BatchTimeReporter
    from engine.step_profiler import StepProfiler

log = logging.getLogger(__name__)


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """First line of standard input."""

    address: str  # where to connect to, ipc://…
    name: str  # of this process, in log lines
    model_dir: str
    worker_id: str
    epoch: str
    settings: str  # WorkerSettings as JSON


class Wakeup:
    """Lets other threads end the engine's wait for commands. `read_fd` is readable after `set`."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def set(self) -> None:
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def clear(self) -> None:
        try:
            while os.read(self.read_fd, 4096):
                pass
        except BlockingIOError:
            return


def main() -> int:
    first_line = sys.stdin.readline()
    if not first_line:  # the front ended before it began
        return 1
    bootstrap = msgspec.json.decode(first_line, type=Bootstrap)
    settings = WorkerSettings.model_validate_json(bootstrap.settings)
    setup_logging(bootstrap.name, level=settings.log_level, log_format=settings.log_format)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its front gets the signal, and sends `ShowDebug`
    is_pinned = _pin(settings.cpu_cores)
    die_with_parent()
    end_with_threads()  # without a connector's thread its transfers would never end
    at_end: list[Callable[[], None]] = []
    threading.Thread(target=_exit_with_parent, args=(at_end,), daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set(zmq.LINGER, 1000)
    socket.connect(bootstrap.address)
    try:
        if not is_pinned:
            raise ConfigError("--cpu-cores", f"none of {', '.join(map(str, settings.cpu_cores))} is for this process")
        _serve(bootstrap, settings, socket, at_end)
    except BatonError as error:
        socket.send(m.encode([m.EngineFailed(error.message)]))
        return 1
    except MemoryError as error:
        socket.send(m.encode([m.EngineFailed(f"out of memory: {error}")]))
        return 1
    except Exception as error:
        log.exception("the engine failed")
        socket.send(m.encode([m.EngineFailed(f"{type(error).__name__}: {error}")]))
        return 1
    finally:
        socket.close()
        zmq.Context.instance().term()  # once what was sent last is on its way
    return 0


def _pin(cores: Sequence[int]) -> bool:
    """This thread, and all that it starts from now on. False if the system has none of `cores` for it."""
    try:
        if cores:
            os.sched_setaffinity(0, cores)
    except OSError:
        return False
    return True


def _serve(
    bootstrap: Bootstrap, settings: WorkerSettings, socket: zmq.Socket[bytes], at_end: list[Callable[[], None]]
) -> None:
    """Loads the model, then: commands in, one step, events out, for ever. Adds to `at_end` what is to be called if the
    front ends this process."""
    from engine.connectors import create_connectors
    from engine.core import EngineCore
    from engine.device_thread import DeviceThread
    from engine.devices import load_drafter, open_device
    from engine.learning.report import BatchTimeReporter
    from engine.learning.start import start_learning
    from engine.sampling.grammars import GrammarCompiler
    from engine.step_profiler import StepProfiler

    wakeup = Wakeup()
    num_ranks = settings.tensor_parallel_size if settings.num_hosts == 1 else 1  # whose caches this process sees
    connector, store = create_connectors(
        settings, epoch=bootstrap.epoch, worker_id=bootstrap.worker_id, num_ranks=num_ranks
    )
    if settings.record_steps and settings.num_ranks > 1:
        raise ConfigError("--record-steps", f"does not go with {settings.flag_of_ranks}: it sees one process' KV")
    device = open_device(Path(bootstrap.model_dir), settings)
    at_end.append(device.say_end)
    if settings.num_hosts > 1:
        from engine.hosts.device import HostsDevice
        from engine.hosts.kv_messages import Open

        if isinstance(device, HostsDevice):
            opening = Open(
                connector=settings.connector,
                store=settings.store,
                epoch=bootstrap.epoch,
                worker_id=bootstrap.worker_id,
            )
            connector, store = device.open_connectors(opening, connector, store)
    compile_grammar = GrammarCompiler(
        Path(bootstrap.model_dir) / "tokenizer.json", device.info.vocab_size, device.info.eos_token_ids
    )
    if settings.device == SIMULATED:  # one of many: reads the tokenizer if a grammar comes
        device.warm_up()
    else:
        with ThreadPoolExecutor(1) as beside:  # later it would hold up the loop below, whatever thread it is on
            loading = beside.submit(compile_grammar.load)
            device.warm_up()
        if (error := loading.exception()) is not None:
            log.info("no guided text from this model", extra={"reason": str(error)})
    observed, learner = start_learning(device, settings, settings.step_trace)
    profiler = StepProfiler(device.info.device, wakeup.set)
    observed.is_profiled = profiler.is_on
    commands = _Commands(socket, profiler)
    outer: Device = _recorded(observed, settings) if settings.record_steps else observed
    if settings.run_ahead and settings.device != SIMULATED:  # which computes in no time
        outer = DeviceThread(outer, is_inline=profiler.is_on)
    core = EngineCore(
        settings,
        outer,
        connector,
        time.monotonic,
        wakeup.set,
        store,
        read_commands=lambda: commands.hand_to(core),
        compile_grammar=compile_grammar,
        drafter=load_drafter(device, settings),
        batch_time=lambda: learner.sure_model,
    )
    socket.send(m.encode([core.ready()]))
    compile_grammar.start()  # it reads the tokenizer, too: not while everything else starts
    core.may_run_ahead = lambda: not profiler.has_trace
    loop = _Loop(core, device, commands, socket, wakeup, BatchTimeReporter(learner), profiler)
    while True:
        loop.turn()


def _recorded(device: Device, settings: WorkerSettings) -> Device:
    from engine.local.host_memory import host_cache_gb
    from engine.replay.recorder import RecordingDevice
    from engine.replay.step_file import StepFileHeader, StepFileWriter

    info = device.info
    header = StepFileHeader(
        spec=info.spec,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        device=info.device,
        model=settings.model,
        quantization=settings.quantization,
        kernels=settings.kernels,
        host_cache_gb=host_cache_gb(settings),
    )
    try:
        writer = StepFileWriter(Path(settings.record_steps), header)
    except OSError as error:
        raise ConfigError("--record-steps", f"{settings.record_steps} cannot be written: {error.strerror}") from error
    log.info("steps are recorded", extra={"file": settings.record_steps, "num_steps": settings.record_num_steps})
    return RecordingDevice(device, writer, settings.record_num_steps)


class _Commands:
    """Reads the front's commands, and notices if this process was frozen meanwhile."""

    def __init__(self, socket: zmq.Socket[bytes], profiler: StepProfiler) -> None:
        self._socket = socket
        self._profiler = profiler
        self._last_read = time.monotonic()

    def hand_to(self, core: EngineCore) -> None:
        """Hands all commands that have come to `core`, but for those that are about this process."""
        now = time.monotonic()
        stood_still_s, self._last_read = now - self._last_read, now
        while self._socket.poll(0):
            for command in m.decode_commands(self._socket.recv()):
                match command:
                    case m.ProfileSteps():
                        self._profiler.begin(command)
                    case m.EndProfile():
                        self._profiler.end()
                    case m.ShowDebug(is_on):
                        show_debug(is_on)
                    case m.OrderLevel(level):
                        order_level(level)
                    case _:
                        core.handle(command)
        if stood_still_s > LOSS_NOTICED_S:
            log.warning("the engine stood still", extra={"seconds": round(stood_still_s, 1)})
            core.stood_still(stood_still_s)


class _Loop:
    """Commands in, one step, events out. Messages also pass in mid-step, so that a chunk of a long prompt delays
    neither the publication of the chunk before it, nor other requests' fetches, nor a prefill worker's start."""

    def __init__(
        self,
        core: EngineCore,
        device: Device,
        commands: _Commands,
        socket: zmq.Socket[bytes],
        wakeup: Wakeup,
        times: BatchTimeReporter,
        profiler: StepProfiler,
    ) -> None:
        self._times = times
        self._profiler = profiler
        self._core = core
        self._device = device
        self._commands = commands
        self._socket = socket
        self._wakeup = wakeup
        self._reporter = _LoadReporter()
        self._metrics = _MetricsReporter()
        self._is_busy = False
        self._last_sent = time.monotonic()
        self._blocks_due = 0.0
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(wakeup.read_fd, zmq.POLLIN)

    def turn(self) -> None:
        """Waits for something to do, unless the last turn left work, and does one step of it."""
        self._poller.poll(0 if self._is_busy else self._idle_ms(time.monotonic()))
        self._wakeup.clear()
        self._device.check_alive()
        self._commands.hand_to(self._core)
        output = self._core.prepare()
        self._send()
        with self._profiler.step(output):
            self._is_busy = self._core.end(self._core.begin(output), self._pass_messages)
        now = time.monotonic()
        self._send(
            [
                *self._reporter.due(self._core, now),
                *self._metrics.due(now),
                *self._times.due(now),
                *self._profiler.due(),
            ]
        )

    def _pass_messages(self) -> None:
        self._commands.hand_to(self._core)
        self._core.take_in_transfers()
        self._core.begin_remote()
        self._send()

    def _idle_ms(self, now: float) -> int:
        """How long the engine may sleep if nothing else wakes it."""
        idle_ms = self._reporter.ms_until_due(now)
        return min(idle_ms, round(BLOCKS_INTERVAL_S * 1000)) if self._core.blocks.news else idle_ms

    def _send(self, more: Sequence[m.Event] = ()) -> None:
        now = time.monotonic()
        events = [*self._core.take_events(), *more]
        if now >= self._blocks_due and (news := self._core.take_block_news()):
            self._blocks_due = now + BLOCKS_INTERVAL_S
            events += news
        if not events and now - self._last_sent < ALIVE_INTERVAL_S:
            return
        self._socket.send(m.encode(events or [m.Alive()]))
        self._last_sent = now


class _Loaded(Protocol):
    """The part of `EngineCore` that is reported here."""

    @property
    def load(self) -> WorkerLoad: ...

    def take_counted(self) -> tuple[int, ...]: ...


class _LoadReporter:
    """Looks at the load at once, then after each turn, at most every LOAD_INTERVAL_S, and reports it if it has changed
    or a request has come. A look goes through all that waits, so it is not made at each step."""

    def __init__(self) -> None:
        self._last: WorkerLoad | None = None
        self._looked_at = -math.inf
        self._is_pending = False  # something was done since

    def ms_until_due(self, now: float) -> int:
        """How long the engine may sleep before it has to look at the load, if nothing else wakes it."""
        due_s = self._looked_at + LOAD_INTERVAL_S - now if self._is_pending else IDLE_POLL_S
        return max(int(due_s * 1000), 1)

    def due(self, core: _Loaded, now: float) -> list[m.Event]:
        """The load, if it has to be reported now."""
        self._is_pending = now - self._looked_at < LOAD_INTERVAL_S
        if self._is_pending:
            return []
        self._looked_at = now
        load, counted = core.load, core.take_counted()
        if load == self._last and not counted:
            return []
        self._last = load
        return [m.LoadChanged(load, counted)]


class _MetricsReporter:
    """Reports what the engine counted, every METRICS_INTERVAL_S."""

    def __init__(self) -> None:
        self._relay = MetricRelay(metrics.ENGINE_METRICS)
        self._next = 0.0

    def due(self, now: float) -> list[m.MetricsChanged]:
        if now < self._next:
            return []
        self._next = now + METRICS_INTERVAL_S
        changes = self._relay.changes()
        return [m.MetricsChanged(changes)] if changes else []


def _exit_with_parent(at_end: list[Callable[[], None]]) -> None:
    """Ends this process when standard input closes, which happens when the parent ends: the parent holds the other end,
    and writes `END_LINE` before if it ends this process as intended."""
    if sys.stdin.read() == END_LINE:
        for call in at_end:
            call()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
