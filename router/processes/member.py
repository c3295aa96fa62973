"""One process of a router with several processes. Its parent (`router.processes.parent`) starts it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import Metric

from common import metrics
from common.config import RouterSettings
from common.errors import BatonError, ConfigError, InternalError, UnavailableError
from common.logs import order_level, setup_logging, show_debug
from common.process.garbage_collection import look_rarely
from common.process.tasks import VitalTasks
from router.processes import scrape
from router.processes.messages import Ask, Beat, Failed, Link, OrderLevel, Placed, Refused, Reply, ShowDebug
from router.processes.process_query import ProcessQuery, T
from router.processes.remote_queue import RemoteQueue
from router.processes.router_process import RouterProcess
from router.processes.shared_demand import SharedDemand
from router.processes.shared_ledger import SharedLedger
from router.reload import SettingsFile

log = logging.getLogger(__name__)

BEAT_S = 1.0
PARENT_SILENT_BEATS = 60  # own ones without one of the parent, after which this process ends, as if that were gone
SAY_TIMEOUT_S = 1.0
ASK_TIMEOUT_S = 5.0  # the parent waits for each process for less
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
NOT_READY, PID = "not ready", "pid"  # in the ledger


@dataclass(slots=True, frozen=True)
class ProcessSpec:
    """What a process is told when it is started."""

    number: int  # from 0
    num_processes: int
    directory: str  # of the ledger and of metrics
    epoch: str  # of the router, to whoever watches its demand
    http_listen: str
    grpc_listen: str
    health_listen: str | None
    endpoint_picker_listen: str | None
    pick_key: bytes
    is_replacement: bool


class Member(RouterProcess):
    is_one_of_several = True

    def __init__(
        self,
        settings: RouterSettings,
        spec: ProcessSpec,
        parent: socket.socket,
        *,
        beat_s: float = BEAT_S,
        parent_silent_beats: int = PARENT_SILENT_BEATS,
    ) -> None:
        super().__init__(settings)
        self._beat_s = beat_s
        self._parent_silent_beats = parent_silent_beats
        self._spec = spec
        self._socket = parent
        self._link: Link | None = None
        self._vital = VitalTasks()
        self._is_ready = False
        self._num_silent = 0  # own beats since the parent's last one
        self._queries: dict[str, ProcessQuery[Any]] = {}
        self._asked: dict[int, asyncio.Future[list[bytes]]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self.is_replacement = spec.is_replacement
        self.http_listen, self.grpc_listen, self.health_listen = (
            spec.http_listen,
            spec.grpc_listen,
            spec.health_listen,
        )
        self.endpoint_picker_listen, self.pick_key = spec.endpoint_picker_listen, spec.pick_key
        self.max_connections = -(-settings.max_connections // spec.num_processes)
        self.shared = SharedLedger(spec.directory, spec.num_processes, spec.number)
        self.ledger = self.shared
        self.demand = self._demand = SharedDemand(self.shared, spec.epoch)
        self.remote_queue = RemoteQueue(
            settings.max_running, lambda message: self.link.send(message), max_wait_s=settings.max_queue_wait
        )
        self.queue = self.remote_queue
        self.answers(self.decisions.query)
        self.answers(self.requests.query)

    @property
    def link(self) -> Link:
        assert self._link is not None  # noqa: S101 - `start` comes first
        return self._link

    async def start(self, vital: VitalTasks) -> None:
        self._vital = vital
        self._link = Link(*await asyncio.open_unix_connection(sock=self._socket.dup()))
        self.shared.put({PID: os.getpid()})
        vital.start(self._follow(), name="parent")
        vital.start(self._demand.keep_shared(), name="demand")

    def takes_signals(self) -> None:
        """Lets signals through. The parent blocked them: a signal that comes while Python starts would end the
        process."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self._spec.is_replacement:
            metrics.router_process_restarts.inc()
        self._vital.start(self._beat(), name="signs of life")

    def flip_debug(self) -> None:
        """Does nothing: the parent gets the signal too, and tells all of its processes."""

    def order_level(self, level: str) -> None:
        self.link.send(OrderLevel(level))  # the parent tells all, this one too

    def ready(self) -> None:
        self._is_ready = True
        self.link.send(Beat(True))

    def not_ready(self, own_reason: str) -> str:
        """The same for all processes, since a client or a probe does not choose which one it reaches."""
        self.shared.put({NOT_READY: 1.0 if own_reason else 0.0})
        others = sum(self.shared.by_process(NOT_READY))
        return own_reason or ("another process of this router is not ready" if others else "")

    def metrics(self) -> Iterable[Metric]:
        return scrape.families(self._spec.directory, lambda: [os.getppid(), *filter(None, self.shared.by_process(PID))])

    def answers(self, query: ProcessQuery[T]) -> None:
        self._queries[query.name] = query

    async def ask(self, query: ProcessQuery[T], limit: int = 0, tenant: str | None = None, which: str = "") -> list[T]:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.link.send(Ask(number, query.name, limit, tenant, which))
            async with asyncio.timeout(ASK_TIMEOUT_S):
                contents = await answer
        except TimeoutError:
            raise UnavailableError("the router's other processes do not answer") from None
        finally:
            del self._asked[number]
        return [one for content in contents for one in msgspec.msgpack.decode(content, type=list[query.kind])]  # type: ignore[name-defined]

    async def _follow(self) -> None:
        async for message in self.link.messages():
            match message:
                case Beat():
                    self._num_silent = 0
                case ShowDebug(is_on):
                    show_debug(is_on)
                case OrderLevel(level):
                    order_level(level)
                case Placed() | Refused():
                    self.remote_queue.heard(message)
                case Ask():
                    task = asyncio.create_task(self._tell(message))
                    self._telling.add(task)
                    task.add_done_callback(self._telling.discard)
                case Reply():
                    answer = self._asked.get(message.number)
                    if answer is not None and not answer.done():
                        answer.set_result(message.contents)
        log.critical("the router's parent process is gone, this one ends at once")
        os._exit(1)

    async def _tell(self, ask: Ask) -> None:
        query = self._queries.get(ask.what)
        told = [] if query is None else await query.told(ask.limit, ask.tenant, ask.which)
        self.link.send(Reply(ask.number, [msgspec.msgpack.encode(told)]))

    async def _beat(self) -> None:
        """Raises `InternalError` if the parent hangs: a hung parent neither replaces a process that ends nor gives a
        request its spec. Counts this process's own beats instead of time: if the machine stood still, so did they."""
        while True:
            self._num_silent += 1
            if self._num_silent > self._parent_silent_beats:
                silent_s = self._parent_silent_beats * self._beat_s
                raise InternalError(f"the router's parent process gave no sign of life for {silent_s:g} s")
            self.link.send(Beat(self._is_ready))
            await asyncio.sleep(self._beat_s)


@dataclass(slots=True)
class _FirstAsBefore:
    """Loads the settings that the router started with if the file cannot be used now, so that a process can still
    replace another one."""

    settings: RouterSettings
    file: SettingsFile
    has_begun: bool = field(default=False)

    def load(self) -> RouterSettings:
        if self.has_begun:
            return self.file.load()
        self.has_begun = True
        try:
            return self.file.load()
        except ConfigError as error:
            log.warning("the settings file cannot be used: the old ones stay", extra={"reason": error.message})
            return self.settings


def main(settings: RouterSettings, file: SettingsFile | None, spec: ProcessSpec, parent: socket.socket) -> None:
    """The process. It ends with code 0 if it drained, else with 1."""
    from router.server import run

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Values of workers that are gone stay on the page, as 0: no file of metrics loses a line.
    warnings.filterwarnings("ignore", message="Removal of labels has not been implemented")
    setup_logging(f"router-{spec.number + 1}", level=settings.log_level, log_format=settings.log_format)
    if file is not None and spec.is_replacement:
        file = SettingsFile(file.path, _FirstAsBefore(settings, file).load)

    def ready(_http: str, _grpc: str) -> None:
        look_rarely()
        member.ready()

    try:
        member = Member(settings, spec, parent)
        run(settings, ready, file, member)
    except BatonError as error:
        _say_last(parent, error.message)
        raise SystemExit(1) from None


def _say_last(parent: socket.socket, reason: str, timeout_s: float = SAY_TIMEOUT_S) -> None:
    """Sends a last message without the event loop, which has ended."""
    content = msgspec.msgpack.encode(Failed(reason))
    parent.settimeout(timeout_s)
    try:
        parent.sendall(len(content).to_bytes(4, "big") + content)
    except OSError as error:
        log.warning("the router's parent process does not hear why this one ends", extra={"reason": str(error)})
