"""A router of several processes (`--processes`), seen from their parent. It serves no request itself: it holds the
ports and the one queue, starts the processes, starts again those that end, and hands queries from one to all.

      parent ── holds the ports, queue, queries, life ──> process 1 ... N, each a whole router on the same ports
         └───── ledger of limits and demand, files of metrics: memory that all of them share ─────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

from common.config import RouterSettings
from common.errors import BatonError, OverloadedError, StartupError
from common.logs import flip_debug, order_level, shows_debug
from common.process.restarts import WINDOW_S, Restarts
from common.process.tasks import VitalTasks
from router.limits.request_queue import RequestQueue
from router.processes import scrape
from router.processes.child import Child, start
from router.processes.member import ProcessSpec
from router.processes.messages import (
    Ask,
    Beat,
    Enter,
    Failed,
    Leave,
    OrderLevel,
    Placed,
    QueueLimits,
    Refused,
    Reply,
    ShowDebug,
)
from router.processes.ports import held
from router.processes.shared_folder import shared_folder
from router.processes.shared_ledger import SharedLedger
from router.reload import SettingsFile
from router.stop_signals import hang_up_signal, level_signal, stop_signals

log = logging.getLogger(__name__)

MAX_RESTARTS = 5  # of each process, in WINDOW_S
SILENT_BEATS = 20  # seconds without a sign of life, after which a process is killed
START_BEATS = 120  # the same until it listens: it imports, reads a tokenizer and may wait for a worker
LOCK_RETRY_S = 0.05  # while another process has the lock of the ledger, or of the files of metrics
ANSWER_TIMEOUT_S = 2.0
KILL_GRACE_S = 5.0  # beyond the drain timeout

Ready = Callable[[str, str], None]


def run(settings: RouterSettings, ready: Ready | None = None, file: SettingsFile | None = None) -> None:
    """Runs until SIGTERM or SIGINT, and then until all processes have drained. Raises `StartupError`."""
    asyncio.run(serve(settings, ready, file))


async def serve(settings: RouterSettings, ready: Ready | None = None, file: SettingsFile | None = None) -> None:
    """Calls `ready` once, when each process can serve."""
    with contextlib.ExitStack() as stack:
        http_listen = stack.enter_context(held(settings.http_listen, "http_listen"))
        grpc_listen = stack.enter_context(held(settings.grpc_listen, "grpc_listen"))
        health_listen = settings.health_listen
        if health_listen is not None:
            health_listen = stack.enter_context(held(health_listen, "health_listen"))
        picker_listen = settings.endpoint_picker_listen
        if picker_listen is not None:
            picker_listen = stack.enter_context(held(picker_listen, "endpoint_picker_listen"))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-router-", dir=shared_folder()))
        stack.callback(_restore, scrape.VARIABLE, os.environ.get(scrape.VARIABLE))
        os.environ[scrape.VARIABLE] = directory
        spec = ProcessSpec(
            number=0,
            num_processes=settings.processes,
            directory=directory,
            epoch=secrets.token_hex(8),
            http_listen=http_listen,
            grpc_listen=grpc_listen,
            health_listen=health_listen,
            endpoint_picker_listen=picker_listen,
            pick_key=secrets.token_bytes(32),
            is_replacement=False,
        )
        scheme = "http" if settings.tls_cert is None else "https"
        tell = (lambda: ready(f"{scheme}://{http_listen}", grpc_listen)) if ready else (lambda: None)
        await _Parent(settings, file, spec, tell).serve()


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class _Parent:
    def __init__(
        self, settings: RouterSettings, file: SettingsFile | None, spec: ProcessSpec, ready: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._file = file
        self._spec = spec
        self._ready = ready
        self._was_ready = False
        self._is_draining = False
        self._ledger = SharedLedger(spec.directory, spec.num_processes)
        self._queue = RequestQueue(
            settings.max_running, max_waiting=settings.max_queued, max_wait_s=settings.max_queue_wait
        )
        self._restarts = Restarts(MAX_RESTARTS)
        self._children: dict[int, Child] = {}
        self._ordered_level = ""  # empty: that of the settings
        self._vital = VitalTasks()
        self._numbers = itertools.count()
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        stop = asyncio.Event()
        with stop_signals(stop), hang_up_signal(self._pass_on_hang_up), level_signal(self._flip_debug):
            for number in range(self._spec.num_processes):
                self._vital.start(self._keep(number), name=f"process {number + 1}")
            self._vital.start(self._watch_silence(), name="signs of life")
            try:
                await self._vital.failed_or(stop)
                in_time = await self._drain()
            finally:
                self._vital.let_end()
                for child in self._children.values():
                    child.process.kill()
                await self._vital.close()
                self._ledger.close()
        self._vital.raise_failure()
        if not in_time:
            raise StartupError("processes of the router did not end in time, and were killed")
        log.info("router ended")

    def _flip_debug(self) -> None:
        """SIGUSR1: all processes show debug lines, or show them no longer."""
        is_on = flip_debug()
        for child in self._children.values():
            child.link.send(ShowDebug(is_on))

    def _pass_on_hang_up(self) -> None:
        """SIGHUP: the processes read their files again."""
        for child in self._children.values():
            if child.listens:
                child.send_signal(signal.SIGHUP)

    async def _drain(self) -> bool:
        """Drains all processes at once. Returns whether they ended in time."""
        self._is_draining = True
        self._vital.let_end()
        for child in self._children.values():
            child.process.terminate()
        try:
            async with asyncio.timeout(self._settings.drain_timeout + KILL_GRACE_S):
                for child in list(self._children.values()):
                    await child.gone.wait()
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------------------------------------- life

    async def _keep(self, number: int) -> None:
        """Runs process `number`, and starts another one each time that it ends. Raises `StartupError` if the first
        process ended before it could listen, or if processes end too often."""
        has_listened = False
        while True:
            spec = replace(self._spec, number=number, is_replacement=has_listened)
            child = self._children[number] = await start(self._settings, self._file, spec)
            pid = child.process.pid
            if self._ordered_level:
                child.link.send(OrderLevel(self._ordered_level))
            if shows_debug():
                child.link.send(ShowDebug(True))
            try:
                await self._follow(child)
            finally:
                child.gone.set()
                del self._children[number]
            while not self._ledger.process_ended(number):  # noqa: ASYNC110 (who has its lock may hang, and is killed)
                await asyncio.sleep(LOCK_RETRY_S)
            while pid is not None and not scrape.keep_totals(self._spec.directory, pid):  # noqa: ASYNC110 (as above)
                await asyncio.sleep(LOCK_RETRY_S)
            if self._is_draining:
                return
            has_listened |= child.listens
            if not has_listened and not child.hung:
                raise StartupError(child.why())
            delay_s = self._restarts.delay_s(str(number), time.monotonic())
            what = {"number": number + 1, "pid": pid, "reason": child.why()}
            if delay_s is None:
                often = f"{MAX_RESTARTS + 1} times in {WINDOW_S / 60:g} minutes"
                raise StartupError(f"process {number + 1} of the router went away {often}: {child.why()}")
            log.warning("a process of the router went away, starting another one", extra={**what, "delay_s": delay_s})
            await asyncio.sleep(delay_s)

    async def _follow(self, child: Child) -> None:
        """Does what the process asks, until it has ended."""
        try:
            async for message in child.link.messages():
                self._heard(child, message)
            # Its end of the link closes with it, unless something is wrong with it.
            await child.ended(KILL_GRACE_S)
        finally:
            child.link.close()
            if child.process.is_alive():
                child.process.kill()
            for turn in child.turns.values():
                turn.cancel()
            await asyncio.gather(*child.turns.values(), return_exceptions=True)
            for answer in child.asked.values():
                answer.cancel()
        await child.ended()

    def _heard(self, child: Child, message: object) -> None:
        match message:
            case Beat():
                child.num_silent, child.listens, child.is_ready = 0, True, message.is_ready
                self._tell_ready()
            case Failed():
                child.reason = message.reason
            case Enter():
                turn = child.turns[message.number] = asyncio.create_task(self._take_turn(child, message))
                turn.add_done_callback(lambda _: child.turns.pop(message.number, None))
            case Leave():
                if (turn_of := child.turns.get(message.number)) is not None:
                    turn_of.cancel()
            case QueueLimits():
                self._queue.change(message.max_running, max_waiting=message.max_waiting, max_wait_s=message.max_wait_s)
            case OrderLevel(level):
                self._ordered_level = level
                order_level(level)
                for one in self._children.values():
                    one.link.send(message)
            case Ask():
                task = asyncio.create_task(self._ask_all(child, message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Reply():
                answer = child.asked.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message.contents)

    def _tell_ready(self) -> None:
        children = self._children.values()
        if self._was_ready or len(children) < self._spec.num_processes or not all(one.is_ready for one in children):
            return
        self._was_ready = True
        log.info("router listens", extra={"http": self._spec.http_listen, "grpc": self._spec.grpc_listen})
        self._ready()

    async def _watch_silence(self) -> None:
        """Kills processes that give no sign of life. Counts this process's own beats instead of time: if the machine
        stood still, so did they."""
        while True:
            await asyncio.sleep(1.0)
            for child in self._children.values():
                child.link.send(Beat(True))
                child.num_silent += 1
                most = SILENT_BEATS if child.listens else START_BEATS
                if child.num_silent > most and not self._is_draining:
                    child.hung, child.reason = True, f"gave no sign of life for {most} s, and was killed"
                    child.process.kill()

    # --------------------------------------------------------------------------------- queue, queries

    async def _take_turn(self, child: Child, enter: Enter) -> None:
        """Waits for the request's place and holds it, until cancelled: the request does not need or want its place any
        more, or its process is gone."""
        place = self._queue.place(
            enter.tenant,
            enter.cost,
            enter.left_s,
            priority=enter.priority,
            weight=enter.weight,
            request_priority=enter.request_priority,
            places=enter.places,
        )
        try:
            async with place:
                child.link.send(Placed(enter.number))
                await asyncio.Event().wait()
        except OverloadedError as error:
            child.link.send(Refused(enter.number, error.reason, error.retry_after_s))
        except BatonError as error:
            child.link.send(Refused(enter.number, error.reason, None))

    async def _ask_all(self, asker: Child, ask: Ask) -> None:
        number = next(self._numbers)
        answers = []
        for child in self._children.values():
            if child.listens:
                answer = child.asked[number] = asyncio.get_running_loop().create_future()
                answers.append(answer)
                child.link.send(Ask(number, ask.what, ask.limit, ask.tenant, ask.which))
        done, late = await asyncio.wait(answers, timeout=ANSWER_TIMEOUT_S)
        if late:
            log.warning("a process of the router was asked and did not answer", extra={"about": ask.what})
        for child in self._children.values():
            child.asked.pop(number, None)
        contents = [content for answer in done if not answer.cancelled() for content in answer.result()]
        asker.link.send(Reply(ask.number, contents))
