"""Does the fault of a cell, and undoes it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal

from tests.faults import watch
from tests.faults.disk import FILLER, Disk, corrupt
from tests.faults.matrix import RANKS, Cell, Fault, Process
from tests.faults.network import Cut, Network
from tests.faults.scene import Scene
from tests.integration.stack import START_TIMEOUT_S, Fleet, Member, alive, ranks_of, wait_for
from tests.kv_store.lmcache_process import LMCacheProcess

_FRONTS = {Process.PREFILL_FRONT, Process.DECODE_FRONT}
_PREFILL = {Process.PREFILL_FRONT, Process.PREFILL_ENGINE, Process.PREFILL_RANK}
_DECODE = {Process.DECODE_FRONT, Process.DECODE_ENGINE, Process.DECODE_RANK}


class Harm:
    """One fault. `victim` is the worker that it strikes, if it strikes one."""

    def __init__(self, cell: Cell, scene: Scene, disk: Disk, network: Network | None, cut: Cut = Cut.BOTH) -> None:
        self._cell, self._scene, self._disk, self._network, self._cut = cell, scene, disk, network, cut
        self._stopped: set[int] = set()
        self._cut_off = ""

    @property
    def victim(self) -> Member | None:
        if self._cell.process in _PREFILL:
            return self._scene.prefill
        return self._scene.decode if self._cell.process in _DECODE else None

    def do(self) -> None:
        """Strikes while the scene is held, then lets it go on."""
        scene, fault = self._scene, self._cell.fault
        match fault:
            case Fault.CANCEL:
                scene.client.cancel()
            case Fault.DEADLINE:
                scene.client.outcome()  # it was given little time, and is held beyond
            case Fault.SIGKILL | Fault.SIGSTOP:
                self._signal(signal.SIGKILL if fault is Fault.SIGKILL else signal.SIGSTOP)
            case Fault.CUT:
                assert self._network is not None
                self._cut_off = self._host()
                self._network.cut(self._cut_off, self._cut)
            case Fault.FULL_DISK:
                self._disk.fill()
            case Fault.CORRUPT_FILE:
                for number, path in enumerate(sorted(self._disk.files())):
                    corrupt(path, number)
        scene.thaw()

    def living(self) -> list[Member]:
        """Workers that can still free what they hold: not those that are dead or hang."""
        is_deadly = self._cell.fault in (Fault.SIGKILL, Fault.SIGSTOP)
        return [member for member in self._scene.fleet.members if not (is_deadly and member is self.victim)]

    def undo(self) -> None:
        """The network is whole, the disk has room, the store runs, whoever hung goes on. Workers that died stay dead;
        see `revive`."""
        self._scene.thaw()
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()
        if self._cut_off and self._network is not None:
            self._network.heal(self._cut_off)
            self._cut_off = ""
        (self._disk.path / FILLER).unlink(missing_ok=True)
        server = self._scene.setting.server
        if server is not None and not server.running:
            server.start()

    # ------------------------------------------------------------------------------------------ internals

    def _signal(self, signum: signal.Signals) -> None:
        if self._cell.process is Process.STORE and signum is signal.SIGKILL:
            self._server().kill()
            return
        if self._cell.process is Process.STORE:
            pid = self._server().process.pid
        elif self._cell.process is Process.CLIENT:
            pid = self._scene.client.pid
        elif self.victim is None:
            pid = self._scene.fleet.router.popen.pid
        elif self._cell.process in _FRONTS:
            pid = self.victim.process.popen.pid
        elif self._cell.process in RANKS:
            pid = ranks_of(self.victim.process.popen.pid)[-1]
        else:
            pid = watch.engine_pid(self.victim)
        os.kill(pid, signum)
        self._scene.keep_stopped([pid])
        if signum is signal.SIGSTOP:
            self._stopped.add(pid)

    def _server(self) -> LMCacheProcess:
        server = self._scene.setting.server
        assert server is not None, "this store is no process"
        return server

    def _host(self) -> str:
        if self._cell.process is Process.CLIENT:
            return "client"
        return self.victim.name if self.victim is not None else self._scene.fleet.asked.name


def _is_decided(member: Member, num_ranks: int) -> bool:
    return not member.process.running or len(alive(member.pids)) == 1 + num_ranks


def revive(fleet: Fleet, *, num_ranks: int = 1, may_end: bool = False) -> None:
    """Starts again what has died, and waits until the router uses every worker.

    `num_ranks` of each worker. `may_end`: also whom UCX ends meanwhile, see `restart_whom_ucx_ended`.
    """
    if not fleet.router.running:
        fleet.restart_router()
    for member in list(fleet.members):
        # An engine that was killed takes its front along, a moment later, and a rank its engine.
        wait_for(f"{member.name} runs whole, or ends", functools.partial(_is_decided, member, num_ranks), 30)
        if not member.process.running:
            fleet.restart(member)

    def is_whole() -> bool:
        if may_end:
            restart_whom_ucx_ended(fleet, {member.name for member in fleet.members})
        return fleet.all_ready()

    wait_for("every worker is ready", is_whole, START_TIMEOUT_S)


def restart_whom_ucx_ended(fleet: Fleet, names: set[str]) -> None:
    """As what supervises workers does, for the members of these names. UCX over TCP aborts a producer whose connection
    broke in mid-transfer, at times only when the other end is back (docs/kv-plane.md). Raises AssertionError if one
    ended in another way."""
    for member in list(fleet.members):
        if member.process.running or member.name not in names:
            continue
        assert watch.is_ended_by_ucx(member), f"{member.name} ended, and not by UCX:\n{member.process.tail(40)}"
        fleet.restart(member)
