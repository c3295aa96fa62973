"""What operators order of a router itself: each of its processes carries it out (`ProcessQuery`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import UnavailableError
from common.logs import shown_level
from common.process.watched_files import FilesInUse
from router.limits.admission import Admission
from router.processes.process_query import ProcessQuery, T
from router.processes.router_process import RouterProcess

ABORT_REASON = "an operator ended this request"


@dataclass(slots=True, frozen=True)
class ProcessState:
    is_paused: bool
    num_requests: int  # that run
    log_level: str


@dataclass(slots=True, frozen=True)
class Aborted:
    """So many requests of one process were ended."""

    num_requests: int


class RouterOrders:
    def __init__(
        self,
        process: RouterProcess,
        admission: Admission,
        files: Callable[[], Sequence[FilesInUse]],
        num_processes: int = 1,
    ) -> None:
        """`files` reads again those that have changed, and says what is in use."""
        self._process = process
        self._admission = admission
        self._num_processes = num_processes
        self._look = ProcessQuery("state", ProcessState, self._state)
        self._pause = ProcessQuery("pause", ProcessState, lambda *_: self._paused(is_paused=True))
        self._resume = ProcessQuery("resume", ProcessState, lambda *_: self._paused(is_paused=False))
        self._abort = ProcessQuery("abort", Aborted, self._aborted)
        self._reload = ProcessQuery("reload", FilesInUse, lambda *_: list(files()))
        for query in (self._look, self._pause, self._resume):
            process.answers(query)
        process.answers(self._abort)
        process.answers(self._reload)

    async def state(self) -> list[ProcessState]:
        """Of each process that answers."""
        return await self._process.ask(self._look)

    async def pause(self, *, is_paused: bool) -> list[ProcessState]:
        """Has the router take no new requests, or take them again. Raises `UnavailableError` if a process is not
        known to have done it."""
        return await self._of_all(self._pause if is_paused else self._resume)

    async def order_level(self, level: str) -> None:
        """See `common.logs`. Raises `UnavailableError` if a process is not known to have done it."""
        self._process.order_level(level)
        await self._of_all(self._look)  # what a process is told first, it does first

    async def abort(self, request_id: str) -> int:
        """Ends requests of this id. Returns how many there were."""
        return sum(one.num_requests for one in await self._of_all(self._abort, request_id))

    async def reload(self) -> list[FilesInUse]:
        """Of each file: if processes differ, what is told is of one that could not read it."""
        found: dict[str, FilesInUse] = {}
        for one in await self._process.ask(self._reload):
            if one.what not in found or one.error:
                found[one.what] = one
        return list(found.values())

    async def _of_all(self, query: ProcessQuery[T], which: str = "") -> list[T]:
        answers = await self._process.ask(query, which=which)
        if len(answers) < self._num_processes:
            raise UnavailableError(f"{len(answers)} of the router's {self._num_processes} processes answered")
        return answers

    def _state(self, *_: object) -> list[ProcessState]:
        return [ProcessState(self._admission.is_paused, self._admission.num_running, shown_level())]

    def _paused(self, *, is_paused: bool) -> list[ProcessState]:
        self._admission.pause(is_paused=is_paused)
        return self._state()

    def _aborted(self, _limit: int, _tenant: str | None, request_id: str) -> list[Aborted]:
        return [Aborted(self._process.requests.abort(request_id, ABORT_REASON))]
