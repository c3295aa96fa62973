"""Brings one request to a moment, and holds it there.

No moment is found by sleeping. An engine process is stopped (SIGSTOP) when its own load, its processor time, or what
the client has received show that the moment is there. Once it is stopped, that is checked again. If the moment had
passed by then, it is tried again with another request.

A stopped engine is a means here, not a fault: `thaw` lets it go on the instant that the fault has happened.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.types import WorkerRole
from tests.faults import watch
from tests.faults.client_process import Ask
from tests.faults.clients import ClientProcess
from tests.faults.disk import Disk
from tests.faults.matrix import Moment
from tests.faults.shifts import Roles, Shifts, roles_now
from tests.integration.stack import Fleet, Member, ranks_of, wait_for
from tests.kv_store.lmcache_process import LMCacheProcess

CHUNK_SIZE = 320  # tokens; takes longer than workers wait between two reports of their load, on fast CPUs too
NUM_CHUNKS = 5
TOKEN_BYTES = 16 * 2 * 2 * 48 * 4  # KV of one token of the reference model: layers, K and V, heads, dimensions, float32
NUM_TOKENS_MID_DECODE = 8
REACH_TIMEOUT_S = 60.0
MAX_TRIES = 8

_numbers = itertools.count()


class MissedError(Exception):
    """The moment had passed, or the request had ended, before it could be held."""


@dataclass(slots=True, frozen=True)
class Setting:
    """What all scenes of a fleet share."""

    fleet: Fleet
    disk: Disk
    prompt: list[int]  # NUM_CHUNKS * CHUNK_SIZE tokens
    chunk_cpu_s: float  # processor time of one chunk
    is_store: bool
    server: LMCacheProcess | None = None  # which is the store, if there is one
    shifts: Shifts | None = None  # None: roles stay


class Scene:
    """One request, from `ask` to its end."""

    def __init__(self, setting: Setting, client: ClientProcess, ask: Ask, router: str) -> None:
        """`router` is the URL of the one that is asked, whatever the interface."""
        self.setting, self.client, self.ask, self.router = setting, client, ask, router
        self.fleet = setting.fleet
        self._frozen: set[int] = set()
        self._roles: Roles = {}  # what each worker took when the request was sent
        self._prefill: Member | None = None
        self._decode: Member | None = None

    @property
    def prefill(self) -> Member:
        assert self._prefill is not None
        return self._prefill

    @property
    def decode(self) -> Member:
        assert self._decode is not None
        return self._decode

    def reach(self, moment: Moment) -> None:
        """Sends the request and holds it at `moment`. Raises `MissedError`; the request may be running then.

        If roles move, they have moved before the request is sent, and its workers change places while it is held.
        """
        shifts = self.setting.shifts
        if shifts is not None:
            shifts.rearrange()
        self._roles = roles_now(self.fleet)
        if moment is Moment.MID_DECODE:
            self._reach_mid_decode()
        else:
            self._reach_before_decode(moment)
        if shifts is not None:
            shifts.swap(self.prefill, self.decode)

    def thaw(self) -> None:
        """Lets everything go on that was held."""
        self._let_go(list(self._frozen))

    def keep_stopped(self, pids: Iterable[int]) -> None:
        """These are not held any more, but stopped by a fault, or dead."""
        self._frozen -= set(pids)

    # ------------------------------------------------------------------------------------------- moments

    def _reach_before_decode(self, moment: Moment) -> None:
        self._reach_queued()
        match moment:
            case Moment.MID_CHUNK:
                self._reach_mid_chunk()
            case Moment.BETWEEN_CHUNKS:
                self._reach_chunk(1)
            case Moment.MID_TRANSFER:
                self._freeze([watch.engine_pid(self.decode)])
                self._reach_chunk(2)
                # The first chunk was announced while the second was computed, and the decode engine fetched nothing.
                self._prove(self._num_moved() == self._num_moved_before, "a block has moved")
            case Moment.AFTER_FIRST_TOKEN:
                self._freeze([watch.engine_pid(self.decode)])
                self._thaw([watch.engine_pid(self.prefill)])
                self._await("the first token", lambda: self.client.told.num_tokens)
                if self.setting.is_store and self.setting.server is None:
                    num_bytes = len(self.setting.prompt) * TOKEN_BYTES
                    self._await("every block is stored", lambda: self.setting.disk.num_bytes() > num_bytes)
                self._prove(self.client.told.num_tokens == 1, "there are more tokens")
                self._prove(self._num_moved() == self._num_moved_before, "a block has moved")

    def _reach_queued(self) -> None:
        engines = {m.name: watch.engine_pid(m) for m in self.fleet.members if self._takes(m, WorkerRole.PREFILL)}
        self._freeze(engines.values())
        self.client.ask(self.ask)
        self._find_workers()
        self._num_moved_before = self._num_moved()
        self._await("the decode worker waits for KV", lambda: watch.load(self.decode).num_running == 1)
        self._thaw(pid for name, pid in engines.items() if name != self.prefill.name)

    def _reach_mid_chunk(self) -> None:
        engine = watch.engine_pid(self.prefill)
        before = watch.cpu_s(engine)
        self._thaw([engine])
        self._await("a part of a chunk", lambda: watch.cpu_s(engine) - before > self.setting.chunk_cpu_s / 3)
        self._freeze([engine])
        self._settle_news(self.prefill)
        load = watch.load(self.prefill)  # reported at the end of a step, or while the request waits for a store's word
        is_first = load.is_idle or load.num_queued_tokens == len(self.setting.prompt)
        self._prove(is_first, "the first chunk was over")

    def _reach_chunk(self, number: int) -> None:
        """`number` chunks or more are computed, not all."""
        engine, size = watch.engine_pid(self.prefill), len(self.setting.prompt)
        self._thaw([engine])

        def is_there() -> bool:
            load = watch.load(self.prefill)
            return load.num_leases > 0 or (
                load.num_running == 1 and load.num_queued_tokens <= size - number * CHUNK_SIZE
            )

        self._await(f"{number} chunks are computed", is_there)
        self._freeze([engine])
        self._settle_news(self.prefill)
        self._prove(watch.load(self.prefill).num_queued_tokens > 0, "all chunks are computed")
        self._prove(self.client.told.num_tokens == 0, "there is a token")

    def _reach_mid_decode(self) -> None:
        self.client.ask(self.ask)
        self._await("tokens", lambda: self.client.told.num_tokens >= NUM_TOKENS_MID_DECODE)
        self._find_workers()
        self._freeze([watch.engine_pid(self.decode)])
        self._settle_news(self.decode)
        self._prove(not self.client.told.outcome, "the answer is complete")

    # ------------------------------------------------------------------------------------------- helpers

    def _find_workers(self) -> None:
        found: set[str] = set()

        def are_known() -> bool:
            found.clear()
            found.update(watch.places(self.router))
            return len(found) == 2

        self._await("the router has sent the request", are_known)
        members = [self.fleet.member(address) for address in found]
        self._prefill = next(member for member in members if self._takes(member, WorkerRole.PREFILL))
        self._decode = next(member for member in members if self._takes(member, WorkerRole.DECODE))

    def _takes(self, member: Member, role: WorkerRole) -> bool:
        """Or took, when the request was sent."""
        return self._roles[member.address] is role

    def _num_moved(self) -> float:
        return watch.total(watch.worker_metrics(self.decode), "baton_worker_kv_blocks_moved_total")

    def _settle_news(self, member: Member) -> None:
        """Returns when the front has taken in what its engine, stopped now, had sent."""
        last = None
        while (now := (watch.load(member), self.client.told.num_tokens)) != last:
            last = now
            time.sleep(0.05)

    def _freeze(self, engines: Iterable[int]) -> None:
        """All ranks of each: one that stands alone is taken for lost by the others."""
        for pid in with_ranks(engines):
            os.kill(pid, signal.SIGSTOP)
            self._frozen.add(pid)

    def _thaw(self, engines: Iterable[int]) -> None:
        self._let_go(with_ranks(engines))

    def _let_go(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._frozen.discard(pid)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue

    def _await(self, what: str, done: Callable[[], object]) -> None:
        """Waits for `done`; a request that ends meanwhile has missed its moment."""
        wait_for(what, lambda: done() or self.client.told.outcome, REACH_TIMEOUT_S)
        if not done():
            raise MissedError(f"{what}: the request ended with {self.client.told}")

    def _prove(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise MissedError(otherwise)


def with_ranks(engines: Iterable[int]) -> list[int]:
    """And the processes of their further ranks."""
    return [pid for engine in engines for pid in (engine, *ranks_of(engine))]


def new_id(name: str) -> str:
    """A request id, and cache salt, that no other request has."""
    return f"{name}-{os.getpid()}-{next(_numbers)}"
