"""A whole stack on this machine: workers and a router as child processes, started and ended together.

    up:    ports and cores chosen -> workers and router start at once -> every one has said that it is ready
    then:  a worker or LMCache server that ends is started again, unless it does so too often; a router ends the stack
    down:  router ends (its answers finish first) -> workers end -> private KV directory goes away

All processes start at once, since each needs about the same time to import what it needs. The router is told worker
addresses that do not answer yet, so worker ports are chosen here beforehand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import queue
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton import lmcache_server
from baton.processes import Child, Ended, Event, Events, Finished, Ready, Signalled, start
from baton.restarts import WINDOW_S, Restarts
from baton.settings import PREFIX, did_you_mean, to_flags
from common.config import RouterSettings, Settings, UpSettings, WorkerSettings
from common.errors import BatonError, ConfigError, StartupError
from common.types import WorkerState
from kv_store.registry import check_store, connector_names

log = logging.getLogger(__name__)

_WORKER_HOST = "127.0.0.1"  # only the router of a local stack is for others
# Below what Linux, macOS and Windows hand out to outgoing connections, so that none of those takes a port between
# our choice and the worker's bind.
_WORKER_PORTS = range(20000, 32000)
_KV_PREFIX = "baton-kv-"
_LMCACHE = "lmcache"  # the child's name
_SHM = Path("/dev/shm")  # noqa: S108 - the directory below it is made by mkdtemp
_SHM_MIN_FREE = 1 << 30  # bytes; containers often have 64 MiB
_ABANDONED_AFTER_S = 60.0
_POLL_S = 0.02  # between questions whether the router has found its workers
_FLEET_TIMEOUT_S = 10.0
_KILL_GRACE_S = 5.0  # beyond its own drain timeout, until a child is killed


@dataclass(slots=True, frozen=True)
class Addresses:
    """Where a stack answers."""

    http: str  # URL
    grpc: str  # host:port


@dataclass(slots=True)
class Stack:
    """Child processes of which `router` is one, and the state of bringing them up and down."""

    commands: Mapping[str, Sequence[str]]  # name to argv
    drain_timeout: float  # seconds
    start_timeout: float  # seconds
    router: str = "router"
    max_restarts: int = 0  # of each child but the router, within WINDOW_S
    front_cores: Sequence[int] = ()  # for all but the engines, which choose their own; anywhere where empty
    not_ready: Callable[[Addresses], str] = lambda _: ""  # why the whole does not answer yet; empty where it does
    events: Events = field(default_factory=Events)
    children: list[Child] = field(default_factory=list)
    ready: dict[str, Mapping[str, str]] = field(default_factory=dict)  # child's name to the fields of its ready line
    _starts: dict[str, float] = field(default_factory=dict)  # children to be started again: time.monotonic()

    def start(self) -> Addresses | Signalled:
        """Starts all; waits for every ready line, and then until the whole answers. Returns a signal that came first.

        Raises StartupError when a child ends or `start_timeout` passes.
        """
        for name in self.commands:
            self.children.append(self._spawn(name))
        deadline = time.monotonic() + self.start_timeout
        while why := self._why_not_ready():
            left = deadline - time.monotonic()
            if left <= 0:
                raise StartupError(f"not ready after {self.start_timeout:g} s (--start-timeout): {why}")
            match self._next(left if len(self.ready) < len(self.children) else _POLL_S):
                case Ready(child, fields):
                    self.ready[child.name] = fields
                case Ended(child):
                    raise StartupError(f"{child.name} could not start: {child.reason()}")
                case Signalled() as event:
                    return event
        return self.addresses()

    def addresses(self) -> Addresses:
        fields = self.ready[self.router]
        return Addresses(fields["http"], fields["grpc"])

    def _why_not_ready(self) -> str:
        late = ", ".join(child.name for child in self.children if child.name not in self.ready)
        return f"waiting for {late}" if late else self.not_ready(self.addresses())

    def watch(self) -> Signalled | Finished:
        """Waits for a signal or for the work beside the stack, and starts workers and LMCache's server again that end.
        Raises StartupError when one does so too often, or the router ends."""
        restarts = Restarts(self.max_restarts)
        while True:
            due = min(self._starts.values(), default=None)
            match self._next(None if due is None else due - time.monotonic()):
                case None:
                    self._start_again()
                case Ready(child):
                    kind = _kind(child)
                    log.info("a %s is back", kind, extra={kind: child.name})
                case Ended(child):
                    self._plan_restart(child, restarts)
                case Signalled() | Finished() as event:
                    return event

    def _plan_restart(self, child: Child, restarts: Restarts) -> None:
        now, is_router = time.monotonic(), child.name == self.router
        delay_s = None if is_router else restarts.delay_s(child.name, now)
        if delay_s is None:
            often = not is_router and self.max_restarts > 0
            times = f" {self.max_restarts + 1} times in {WINDOW_S / 60:g} minutes" if often else ""
            raise StartupError(f"{child.name} went away{times}: {child.reason()}")
        kind = _kind(child)
        log.warning(
            "a %s went away, starting it again",
            kind,
            extra={kind: child.name, "reason": child.reason(), "delay_s": delay_s},
        )
        self._starts[child.name] = now + delay_s

    def _start_again(self) -> None:
        """Those whose time has come."""
        for position, child in enumerate(self.children):
            if self._starts.get(child.name, math.inf) <= time.monotonic():
                del self._starts[child.name]
                self.children[position] = self._spawn(child.name)

    def _spawn(self, name: str) -> Child:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        environ["PYTHONUNBUFFERED"] = "1"
        cores = () if name == _LMCACHE else self.front_cores  # it copies KV, for prefill and decode alike
        return start(name, self.commands[name], self.events, environ=environ, cores=cores)

    def _workers(self) -> list[Child]:
        return [child for child in self.children if child.name not in (self.router, _LMCACHE)]

    def drain(self) -> bool:
        """Ends the router, then the workers, each after what it has in hand, then what they need.

        False where that was cut short, by another signal or because it took longer than `drain_timeout`.
        """
        workers = self._workers()
        routers = [child for child in self.children if child.name == self.router]
        servers = [child for child in self.children if child.name == _LMCACHE]
        for group in (routers, workers, servers):
            for child in group:
                child.terminate()
            deadline = time.monotonic() + self.drain_timeout + _KILL_GRACE_S
            while any(child.running for child in group):
                event = self._next(deadline - time.monotonic())
                if event is None:
                    late = ", ".join(child.name for child in group if child.running)
                    log.warning("not drained in time, ending at once", extra={"processes": late})
                if event is None or isinstance(event, Signalled):
                    self.kill()
                    return False
        return True

    def kill(self) -> None:
        """Ends everything at once, and waits until it is gone."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.join(_KILL_GRACE_S)

    def _next(self, timeout: float | None) -> Event | None:
        """The next event; None when `timeout` seconds pass without one."""
        try:
            return self.events.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return None


def _kind(child: Child) -> str:
    """What log lines call a child that may be started again."""
    return "server" if child.name == _LMCACHE else "worker"


def run(
    stack: Stack, *, on_ready: Callable[[Addresses], None] | None = None, work: Callable[[Addresses], int] | None = None
) -> int:
    """Brings the stack up, runs `work` beside it (or waits for a signal), and takes it down. Returns the exit code.

    `work` runs in a thread of its own. Without it, a signal is how a stack is meant to end: exit code 0 once drained.
    """
    with _signals_into(stack.events):
        try:
            started = stack.start()
            if isinstance(started, Signalled):
                return 128 + started.signum
            if on_ready is not None:
                on_ready(started)
            if work is not None:
                threading.Thread(target=_work, args=(work, started, stack.events), daemon=True).start()
            drained = False
            try:
                event = stack.watch()
            finally:
                drained = stack.drain()
            if isinstance(event, Signalled):
                return 0 if work is None and drained else 128 + event.signum
            if event.error is not None:
                raise event.error
            return event.code
        finally:
            stack.kill()


def _work(work: Callable[[Addresses], int], addresses: Addresses, events: Events) -> None:
    finished = Finished(1)  # where it raises what it should not, which the thread's own hook prints
    try:
        finished = Finished(work(addresses))
    except BatonError as error:
        finished = Finished(1, error)
    finally:
        events.put(finished)


@contextlib.contextmanager
def _signals_into(events: Events) -> Iterator[None]:
    """SIGINT and SIGTERM become events while inside."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(one, lambda signum, _frame: events.put(Signalled(signum))) for one in signals]
    try:
        yield
    finally:
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)


# ------------------------------------------------------------------------------------- from settings to commands


def check(settings: UpSettings) -> None:
    """Raises ConfigError for what no worker could start with: better said once, and before anything runs."""
    if settings.connector not in connector_names():
        hint = did_you_mean(settings.connector, connector_names())
        raise ConfigError("--connector", f"{settings.connector!r} is not one of {', '.join(connector_names())}{hint}")
    check_store(settings.connector, settings.store, "--store")
    if _starts_lmcache(settings):
        lmcache_server.executable()
    if settings.decode + settings.both == 0:
        raise ConfigError("--decode", "a stack needs at least one decode worker or one with --both roles")


def _starts_lmcache(settings: UpSettings) -> bool:
    return "lmcache" in (settings.connector, settings.store) and settings.lmcache_address is None


def plan(settings: UpSettings, kv_dir: Path) -> Stack:
    """The commands of a stack. Worker ports and cores are decided here."""
    roles = ["prefill"] * settings.prefill + ["decode"] * settings.decode + ["worker"] * settings.both
    cores = divide_cores(settings.cpu_cores or usable_cores(), len(roles))
    lmcache_address, *addresses = [f"{_WORKER_HOST}:{port}" for port in free_ports(1 + len(roles))]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    common = WorkerSettings.model_fields.keys() & UpSettings.model_fields.keys()
    shared: dict[str, object] = {name: getattr(settings, name) for name in common}
    shared["kv_dir"] = str(kv_dir)
    if settings.device == "cuda":  # all workers are on the same device, so each gets its share of it
        shared["memory_utilization"] = settings.memory_utilization / len(roles)
    commands: dict[str, list[str]] = {}
    if _starts_lmcache(settings):
        shared["lmcache_address"] = lmcache_address
        files = kv_dir if settings.kv_dir is not None else None
        commands[_LMCACHE] = lmcache_server.wrapper(lmcache_address, settings.lmcache_size_gb, files)
    numbers: dict[str, int] = {}
    for role, address, own in zip(roles, addresses, cores, strict=True):
        worker = WorkerSettings.model_validate({**shared, "listen": address, "cpu_cores": own})
        numbers[role] = numbers.get(role, 0) + 1
        commands[f"{role}-{numbers[role]}"] = baton_command(role, worker)
    router = RouterSettings(
        prefill=tuple(address for role, address in zip(roles, addresses, strict=True) if role != "decode"),
        decode=tuple(address for role, address in zip(roles, addresses, strict=True) if role != "prefill"),
        http_listen=f"{host}:{settings.http_port}",
        grpc_listen=f"{host}:{settings.grpc_port}",
        drain_timeout=settings.drain_timeout,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    commands["router"] = baton_command("router", router)
    return Stack(
        commands,
        settings.drain_timeout,
        settings.start_timeout,
        max_restarts=settings.max_restarts,
        front_cores=front_cores(roles, cores),
        not_ready=fleet_not_ready,
    )


def fleet_not_ready(addresses: Addresses) -> str:
    """Which workers the router cannot use yet; empty when it can use all."""
    from baton.client import Client

    try:
        with Client(addresses.grpc, timeout=_FLEET_TIMEOUT_S) as client:
            workers = client.fleet()
    except BatonError as error:
        return error.message
    return ", ".join(f"{one.address} is {one.state}" for one in workers if one.state is not WorkerState.READY)


def baton_command(command: str, settings: Settings) -> list[str]:
    return [sys.executable, "-m", "baton", command, *to_flags(settings)]


def usable_cores() -> tuple[int, ...]:
    """Cores this process may run on; none where the system cannot pin."""
    if sys.platform != "linux":
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def divide_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Cores of each worker: neighbouring, as equal as possible; shared one by one where there are too few."""
    if len(cores) < num_workers:
        return [(cores[i % len(cores)],) if cores else () for i in range(num_workers)]
    bounds = [len(cores) * i // num_workers for i in range(num_workers + 1)]
    return [tuple(cores[start:stop]) for start, stop in itertools.pairwise(bounds)]


def front_cores(roles: Sequence[str], cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Where the workers' gRPC servers and the router run, given each worker's role and the cores of its engine: beside
    engines that only prefill. Each of a stream's tokens waits for a decode step, of 30 ms perhaps, and a millisecond
    that another process takes of it is felt; in a chunk of a long prompt it is lost. None, so anywhere, where every
    core decodes."""
    decoding = {core for role, own in zip(roles, cores, strict=True) if role != "prefill" for core in own}
    return tuple(sorted({core for own in cores for core in own} - decoding))


def free_ports(count: int) -> list[int]:
    """Different loopback ports that nobody listens on now. Raises StartupError where there are not so many."""
    ports: list[int] = []
    for port in random.sample(_WORKER_PORTS, len(_WORKER_PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind((_WORKER_HOST, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
        ports.append(port)
    if len(ports) < count:
        raise StartupError(f"fewer than {count} free ports from {_WORKER_PORTS.start} to {_WORKER_PORTS.stop - 1}")
    return ports


@contextlib.contextmanager
def kv_directory(given: str | None) -> Iterator[Path]:
    """The directory of shared KV blocks: `given`, created and kept, or a private one in memory that goes at the end.

    A private directory is locked while in use, so that one whose owner was killed is found and removed by the next.
    """
    if given is not None:
        path = Path(given).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"--kv-dir {given}: {error.strerror}") from error
        yield path
        return
    shm = _SHM.is_dir() and os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free >= _SHM_MIN_FREE
    parent = _SHM if shm else Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    path = Path(tempfile.mkdtemp(prefix=_KV_PREFIX, dir=parent))
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_KV_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < _ABANDONED_AFTER_S:
                continue  # somebody else's, or made this moment and not locked yet
            lock = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # its owner removed it just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed the KV directory of a stack that was killed", extra={"path": str(path)})
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(lock)
