"""A whole stack on this machine: workers and a router as child processes, started and ended together.

    up:    workers and router start at once -> every one has said that it is ready -> the whole answers
    then:  a child that ends is started again, unless it does so too often: that ends the stack
    down:  router ends (its answers finish first) -> workers end

All processes start at once, since each needs about the same time to import what it needs. `baton.stack.stack_plan` says
which there are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.settings import PREFIX
from baton.stack.fork_messages import Imported
from baton.stack.fork_server import ForkServer
from baton.stack.processes import Child, Ended, Event, Events, Finished, Ready, Signalled, start, watched
from common.errors import BatonError, StartupError
from common.process.restarts import FIRST_DELAY_S, WINDOW_S, Restarts

log = logging.getLogger(__name__)

BATON = (sys.executable, "-m", "baton")  # begins the command of each child but LMCache's
LMCACHE = "lmcache"  # the child's name
_POLL_S = 0.02  # between questions whether the router has found its workers
_KILL_GRACE_S = 5.0


@dataclass(slots=True, frozen=True)
class Addresses:
    """Where a stack answers."""

    http: str  # URL
    grpc: str  # host:port


@dataclass(slots=True, frozen=True)
class Forks:
    """Children that are forks of one process (`baton.stack.fork_server`)."""

    names: frozenset[str]
    command: Sequence[str]  # of that process


@dataclass(slots=True)
class Stack:
    """Child processes of which `router` is one, and the state of bringing them up and down."""

    commands: Mapping[str, Sequence[str]]  # name to argv
    drain_timeout: float  # seconds
    start_timeout: float  # seconds
    router: str = "router"
    max_restarts: int = 0  # of each child, within WINDOW_S
    first_delay_s: float = FIRST_DELAY_S  # until a child is started again
    kill_grace_s: float = _KILL_GRACE_S  # beyond a child's own drain timeout, until it is killed
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of each child; no others of ours
    front_cores: Sequence[int] = ()  # for all but the engines, which choose their own; anywhere if empty
    forks: Forks | None = None  # which children are forks of one process
    not_ready: Callable[[Addresses], str] = lambda _: ""  # why the whole does not answer yet; empty if it does
    progress: Callable[[int, int], None] = lambda _ready, _all: None  # how many children are ready
    events: Events = field(default_factory=Events)
    children: list[Child] = field(default_factory=list)
    ready: dict[str, Mapping[str, str]] = field(default_factory=dict)  # child's name to the fields of its ready line
    _fork_server: ForkServer | None = None
    _unforked: list[str] = field(default_factory=list)  # children that wait for the fork server
    _starts: dict[str, float] = field(default_factory=dict)  # children to be started again: time.monotonic()

    def start(self) -> Addresses | Signalled:
        """Starts all; waits for every ready line, and then until the whole answers. Returns a signal that came first.

        Raises StartupError when a child ends or `start_timeout` passes.
        """
        deadline = time.monotonic() + self.start_timeout
        for name in self.commands:
            self._begin(name)
        while True:
            asked_at = time.monotonic()
            if not (why := self._why_not_ready()):
                break
            left = deadline - time.monotonic()
            if left <= 0:
                raise StartupError(f"not ready after {self.start_timeout:g} s (--start-timeout): {why}")
            self.progress(len(self.ready), len(self.commands))
            asked_s = time.monotonic() - asked_at  # a large fleet takes longer to look at
            wait_s = left if len(self.ready) < len(self.commands) else max(_POLL_S, asked_s)
            match self._next(0.0 if self._fork_next() else wait_s):
                case Ready(child, fields):
                    self.ready[child.name] = fields
                case Ended(child):
                    raise StartupError(f"{child.name} could not start: {child.reason()}")
                case Signalled() as event:
                    return event
                case Finished(_, BatonError() as error):  # the work has not begun: it is a defect of ours
                    raise error
                case Imported(reason):
                    self._know_forks(reason)
        return self.addresses()

    def addresses(self) -> Addresses:
        fields = self.ready[self.router]
        return Addresses(fields["http"], fields["grpc"])

    def _why_not_ready(self) -> str:
        late = ", ".join(name for name in self.commands if name not in self.ready)
        return f"waiting for {late}" if late else self.not_ready(self.addresses())

    def watch(self) -> Signalled | Finished:
        """Waits for a signal or for the work beside the stack, and starts children again that end. Raises StartupError
        when one does so too often."""
        restarts = Restarts(self.max_restarts, self.first_delay_s)
        while True:
            due = min(self._starts.values(), default=None)
            wait_s = None if due is None else due - time.monotonic()
            match self._next(0.0 if self._fork_next() else wait_s):
                case None:
                    self._start_again()
                case Ready(child):
                    kind = _kind(child)
                    log.info("a %s is back", kind, extra={kind: child.name})
                case Ended(child):
                    self._plan_restart(child, restarts)
                case Imported(reason):
                    self._know_forks(reason)
                case Signalled() | Finished() as event:
                    return event

    def _plan_restart(self, child: Child, restarts: Restarts) -> None:
        now = time.monotonic()
        delay_s = restarts.delay_s(child.name, now)
        if delay_s is None:
            often = self.max_restarts > 0
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
        """Starts the children again whose time has come."""
        for child in list(self.children):
            if self._starts.get(child.name, math.inf) <= time.monotonic():
                del self._starts[child.name]
                self._begin(child.name)

    def _begin(self, name: str) -> None:
        """Starts a child, or has it wait until the fork server has imported what it needs."""
        child = self._fork(name) if self.forks is not None and name in self.forks.names else self._spawn(name)
        if child is None:
            self._unforked.append(name)
        else:
            self.children = [*(one for one in self.children if one.name != name), child]

    def _fork_next(self) -> bool:
        """Starts one child that waited for the fork server; False if there is none, or that server is not ready. One at
        a time, so that a signal between two of a hundred is seen."""
        is_known = self.forks is None or (self._fork_server is not None and self._fork_server.can_fork)
        if not self._unforked or not is_known:
            return False
        self._begin(self._unforked.pop(0))
        return True

    def _know_forks(self, reason: str) -> None:
        """The fork server has imported all, and cannot fork if there is a `reason`."""
        if reason:
            log.warning("workers cannot be forked, so each imports all for itself", extra={"reason": reason})
            self.forks = None

    def _environ(self, name: str) -> dict[str, str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        environ |= self.variables.get(name, {})
        environ["PYTHONUNBUFFERED"] = "1"
        return environ

    def _spawn(self, name: str) -> Child:
        cores = () if name == LMCACHE else self.front_cores  # it copies KV, for prefill and decode alike
        command = self.commands[name]
        if name == self.router and name in self.ready:
            command = _at(self.addresses(), command)
        return start(name, command, self.events, environ=self._environ(name), cores=cores)

    def _fork(self, name: str) -> Child | None:
        """None while the fork server imports."""
        assert self.forks is not None  # noqa: S101 (the child is one of them)
        server = self._fork_server
        if server is not None and server.has_imported and not server.is_running:
            server.close()
            server = None
        if server is None:
            server = ForkServer(self.forks.command, self._environ(name), self.events.put, self.start_timeout)
            self._fork_server = server
        if not server.can_fork:
            return None
        process = server.start(name, self.commands[name][len(BATON) :], self.front_cores)
        return watched(Child(name, process), self.events)

    def _workers(self) -> list[Child]:
        return [child for child in self.children if child.name not in (self.router, LMCACHE)]

    def drain(self) -> bool:
        """Ends the router, then the workers, each after what it has in hand, then what they need.

        False if that was cut short, by another signal or because it took longer than `drain_timeout`.
        """
        workers = self._workers()
        routers = [child for child in self.children if child.name == self.router]
        servers = [child for child in self.children if child.name == LMCACHE]
        for group in (routers, workers, servers):
            for child in group:
                child.terminate()
            deadline = time.monotonic() + self.drain_timeout + self.kill_grace_s
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
            child.join(self.kill_grace_s)
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def _next(self, timeout: float | None) -> Event | None:
        """The next event; None when `timeout` seconds pass without one."""
        try:
            return self.events.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return None


def _kind(child: Child) -> str:
    """What log lines call a child that may be started again."""
    return {LMCACHE: "server", "router": "router"}.get(child.name, "worker")


def _at(addresses: Addresses, command: Sequence[str]) -> list[str]:
    """A router's command with the ports that it found, where it was told to take free ones."""
    listens = {"--http-listen=": addresses.http, "--grpc-listen=": addresses.grpc}
    again = list(command)
    for index, word in enumerate(command):
        for flag, address in listens.items():
            if word.startswith(flag) and word.endswith(":0"):
                again[index] = f"{word.removesuffix('0')}{address.rstrip('/').rpartition(':')[2]}"
    return again


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
    finished = Finished(1)  # if `work` raises what it should not: the thread's own hook prints that
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
