"""Works at batches: reads their files, has their lines answered a few at a time, and writes what came."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice

from common import metrics
from common.logs import RareLine
from router.batches.lines import MAX_ERRORS, output_line, read_lines
from router.batches.records import Batch, BatchLine, BatchStatus, LineAnswer, LineError
from router.batches.store import PART_BYTES, BatchStore

log = logging.getLogger(__name__)

Answer = Callable[[Batch, BatchLine], Awaitable[LineAnswer]]

LEASE_S = 15.0  # a process that ends leaves its batches to others after so long
LOOK_S = 1.0  # how often others' batches, and what became of its own, are looked at
CLEAN_S = 3600.0
NUM_AHEAD = 64  # lines read at a time
BUSY = frozenset({429, 503})  # the fleet takes no more now: the line waits
FAULTS = frozenset({500, 502, 504})  # tried again, a few times
MAX_TRIES = 3
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0


class BatchRunner:
    """Of one process."""

    def __init__(
        self,
        store: BatchStore,
        answer: Answer,
        *,
        at_a_time: int,
        max_line_bytes: Callable[[], int | None],
        priority: int,
        keep_s: float,
        lease_s: float = LEASE_S,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`answer` raises nothing. `at_a_time`: lines that are being answered. `max_line_bytes`: None while that
        is not known. `priority`: of them. `keep_s`: how long
        files and batches are kept."""
        self._store = store
        self._answer = answer
        self._max_line_bytes = max_line_bytes
        self._priority = priority
        self._keep_s = keep_s
        self._lease_s = lease_s
        self._look_s = look_s
        self._clock = clock
        self._name = f"w-{secrets.token_hex(8)}"
        self._at_a_time = at_a_time
        self._places = asyncio.Semaphore(at_a_time)
        self._working: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._clean_at = 0.0
        self._failed = RareLine(log, "the file of batches cannot be used; it is tried again", level=logging.ERROR)

    def look(self) -> None:
        """There may be a new batch, or one that was cancelled."""
        self._news.set()

    async def run(self) -> None:
        """Works until it is cancelled. Then others may go on."""
        try:
            while True:
                self._news.clear()
                try:
                    await self._begin_work()
                except sqlite3.Error as error:  # a full disk, or another process that writes for long
                    self._failed.happened({"reason": str(error)})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await self._news.wait()
        finally:
            for task in self._working.values():
                task.cancel()
            await asyncio.gather(*self._working.values(), return_exceptions=True)
            try:
                await asyncio.shield(asyncio.to_thread(self._store.release, self._name))
            except sqlite3.Error as error:  # the router ends well all the same
                log.warning("batches were not released; others have them later", extra={"reason": str(error)})

    async def _begin_work(self) -> None:
        if time.monotonic() >= self._clean_at:
            self._clean_at = time.monotonic() + CLEAN_S
            if num := await asyncio.to_thread(self._store.clean, self._keep_s):
                log.info("old batches and their files are gone", extra={"number": num})
        for batch_id in [batch_id for batch_id, task in self._working.items() if task.done()]:
            del self._working[batch_id]
        while self._max_line_bytes() is not None and len(self._working) < self._at_a_time:
            batch = await asyncio.to_thread(self._store.lease, self._name, self._lease_s)
            if batch is None or batch.batch_id in self._working:
                return
            self._working[batch.batch_id] = asyncio.create_task(self._work(batch))

    async def _work(self, batch: Batch) -> None:
        extra = {"batch_id": batch.batch_id, "client": batch.client.name}
        stop = asyncio.Event()
        watching = asyncio.create_task(self._watch(batch, stop))
        try:
            status = await self._validate(batch) if batch.status == BatchStatus.VALIDATING else batch.status
            if status == BatchStatus.IN_PROGRESS:
                await self._answer_lines(batch, stop)
            if status not in (BatchStatus.VALIDATING, BatchStatus.FAILED):
                await self._finish(batch.batch_id)
        except sqlite3.Error as error:
            self._failed.happened({**extra, "reason": str(error)})
        except Exception as error:
            log.exception("work at a batch failed; it is tried again", extra={**extra, "reason": str(error)})
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._news.set()

    async def _watch(self, batch: Batch, stop: asyncio.Event) -> None:
        """Keeps the lease. Sets `stop` when no further line is to be answered."""
        while True:
            await asyncio.sleep(self._look_s)
            status: BatchStatus | None = batch.status
            try:
                status = await asyncio.to_thread(self._store.renew, batch.batch_id, self._name, self._lease_s)
            except sqlite3.Error as error:
                self._failed.happened({"batch_id": batch.batch_id, "reason": str(error)})
            if status is None or status == BatchStatus.CANCELLING or self._clock() >= batch.expires_at:
                stop.set()

    async def _validate(self, batch: Batch) -> BatchStatus:
        """Takes in the lines of its file. Returns what the batch is then."""
        if (max_bytes := self._max_line_bytes()) is None:
            return BatchStatus.VALIDATING
        errors = await asyncio.to_thread(self._take_lines, batch, max_bytes)
        became = BatchStatus.FAILED if errors else BatchStatus.IN_PROGRESS
        become = self._store.become
        if not await asyncio.to_thread(become, batch.batch_id, became, of=(BatchStatus.VALIDATING,), errors=errors):
            return BatchStatus.CANCELLING
        log.info("batch", extra={"batch_id": batch.batch_id, "client": batch.client.name, "status": became})
        return became

    def _take_lines(self, batch: Batch, max_bytes: int) -> list[LineError]:
        errors: list[LineError] = []

        def good() -> Iterator[BatchLine]:
            parts = self._store.content(batch.input_file_id)
            for read in read_lines(batch.batch_id, parts, batch.endpoint, max_bytes, self._priority):
                if isinstance(read, BatchLine):
                    yield read
                elif len(errors) < MAX_ERRORS:
                    errors.append(read)

        lines = good()
        while some := list(islice(lines, NUM_AHEAD)):
            self._store.add_lines(some)
        if errors:
            self._store.forget_lines(batch.batch_id)
        else:
            self._store.count_lines(batch.batch_id)
        return errors

    async def _answer_lines(self, batch: Batch, stop: asyncio.Event) -> None:
        """Until all have an answer, or `stop`: those that have begun are then ended."""
        ending = asyncio.create_task(stop.wait())
        answering: set[asyncio.Task[None]] = set()
        last = 0
        try:
            while not stop.is_set():
                lines = await asyncio.to_thread(self._store.unanswered, batch.batch_id, last, NUM_AHEAD)
                if not lines:
                    break
                for line in lines:
                    last = line.number
                    while len(answering) >= self._at_a_time and not stop.is_set():  # waiting ones among them
                        await asyncio.wait((*answering, ending), return_when=asyncio.FIRST_COMPLETED)
                    if stop.is_set():
                        break
                    task = asyncio.create_task(self._answer_line(batch, line))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
            if answering and not stop.is_set():
                await asyncio.wait((asyncio.gather(*answering), ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            for task in answering:
                task.cancel()
            await asyncio.gather(ending, *answering, return_exceptions=True)

    async def _answer_line(self, batch: Batch, line: BatchLine) -> None:
        wait_s = FIRST_WAIT_S
        num_faults = 0
        while True:
            async with self._places:  # which a line that waits leaves to others
                answer = await self._answer(batch, line)
            num_faults += answer.status in FAULTS
            if answer.status not in BUSY and (answer.status not in FAULTS or num_faults == MAX_TRIES):
                break
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)
        if await asyncio.to_thread(self._store.answer, line, answer):
            metrics.router_batch_requests.labels("ok" if answer.is_good else "failed").inc()

    async def _finish(self, batch_id: str) -> None:
        batch = await asyncio.to_thread(self._store.batch, batch_id)
        num_missing = batch.num_lines - batch.num_completed - batch.num_failed
        if batch.status == BatchStatus.CANCELLING:
            became = BatchStatus.CANCELLED
        elif num_missing and self._clock() < batch.expires_at:
            return None  # another process works at it
        else:
            became = BatchStatus.EXPIRED if num_missing else BatchStatus.COMPLETED
        if batch.status == BatchStatus.IN_PROGRESS:
            become, was = self._store.become, (BatchStatus.IN_PROGRESS,)
            if not await asyncio.to_thread(become, batch_id, BatchStatus.FINALIZING, of=was):
                return await self._finish(batch_id)  # it was cancelled at this moment
        files = await asyncio.to_thread(self._write_files, batch, became)
        of = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)
        if not await asyncio.to_thread(self._store.become, batch_id, became, of=of, files=files):
            for file_id in filter(None, files):  # another process was faster
                await asyncio.to_thread(self._store.forget_file, file_id)
        else:
            log.info(
                "batch",
                extra={
                    "batch_id": batch_id,
                    "client": batch.client.name,
                    "status": became,
                    "num_completed": batch.num_completed,
                    "num_failed": batch.num_failed,
                    "num_unanswered": num_missing,
                },
            )
        return None

    def _write_files(self, batch: Batch, became: BatchStatus) -> tuple[str | None, str | None]:
        """(of what went well, of what did not)"""
        output = self._write(batch, "output", became) if batch.num_completed else None
        errors = self._write(batch, "errors", became) if batch.num_completed < batch.num_lines else None
        return output, errors

    def _write(self, batch: Batch, kind: str, became: BatchStatus) -> str:
        file_id = new_file_id()
        self._store.begin_file(file_id, batch.client.owner, f"{batch.batch_id}_{kind}.jsonl", "batch_output")
        buffer = bytearray()
        number = 0
        for line, answer in self._store.answers(batch.batch_id, good=kind == "output"):
            buffer += output_line(line, answer, became)
            if len(buffer) >= PART_BYTES:
                self._store.add_part(file_id, number, bytes(buffer))
                number += 1
                buffer.clear()
        self._store.add_part(file_id, number, bytes(buffer))
        return file_id


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"
