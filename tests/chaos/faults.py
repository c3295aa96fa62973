"""Harms a fleet at random, and repairs it a little later. One decode worker is always left alone."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import grpc

from common.types import WorkerRole, WorkerState
from protos.baton.v1 import worker_pb2, worker_pb2_grpc
from protos.convert import role_to_proto
from tests.faults import watch
from tests.faults.disk import FILLER, Disk, corrupt
from tests.faults.network import Cut, Network
from tests.integration.stack import START_TIMEOUT_S, Fleet, Member, alive, descendants, ranks_of
from tests.kube.processes import Process

# What a front says of an engine that it has ended for that, and an engine of a rank.
_HUNG = ("gave no sign of life", "was stopped by a signal")
DRAIN_TIMEOUT_S = 20.0


class StoreServer:
    """An LMCache server as a process that can be killed."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        self._num_starts = 0
        self.start()

    def start(self) -> None:
        self.process = Process("store", self._command, self._log)
        self._num_starts += 1

    @property
    def is_up(self) -> bool:
        """It takes its time to start, and a worker that starts needs it: one that is never up is no fault of theirs."""
        return self._log.read_text(errors="replace").count("ready lmcache=") == self._num_starts

    def kill(self) -> None:
        pid = self.process.popen.pid
        signal_all({pid} | descendants(pid), signal.SIGKILL)
        self.process.popen.wait()


class Faults:
    """`one` does the next; `why_not` says which kinds are left out here."""

    def __init__(
        self,
        fleet: Fleet,
        connector: str,
        disk: Disk,
        network: Network | str,
        server: StoreServer | None,
        rng: random.Random,
        never_killed: Collection[str] = (),
    ) -> None:
        """`network`: the hosts that the fleet runs on, or why there are none. `never_killed`: names of workers that are
        only stopped and cut off."""
        self._never_killed = never_killed
        self._fleet, self._disk, self._server, self._rng = fleet, disk, server, rng
        self._has_nixl = connector == "nixl"
        self._network = network if isinstance(network, Network) else None
        self._later: list[tuple[float, str, Callable[[], None]]] = []  # when, whose address, what
        self._harmed: set[str] = set()  # addresses
        self._stopped: set[str] = set()  # addresses whose engine stood still in their present life
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.why_not: dict[str, str] = {}
        self._victim = ""  # of the last fault
        self._kinds: dict[str, Callable[[], bool]] = {
            "kill worker": lambda: self._on_member(self._kill_worker, spares=self._never_killed),
            "kill engine": lambda: self._on_member(self._kill_engine, spares=self._never_killed),
            "kill rank": lambda: self._on_rank(self._kill_rank),
            "stop worker": lambda: self._on_member(self._stop_worker),
            "stop engine": lambda: self._on_member(self._stop_engine),
            "stop rank": lambda: self._on_rank(self._stop_rank),
            "drain worker": lambda: self._on_member(self._drain, spares=self._never_killed),
            "cut worker": lambda: self._on_member(self._cut_off),
            "wipe store": self._wipe,
            "corrupt store": self._corrupt,
            "full disk": self._fill,
            "kill store": self._kill_server,
        }
        if self._network is None:
            self.why_not["cut worker"] = str(network)
        if not any(ranks_of(member.process.popen.pid) for member in fleet.members):
            self.why_not["kill rank"] = self.why_not["stop rank"] = "one process computes a worker's model"
        if disk.why_not:
            self.why_not["full disk"] = disk.why_not
        if server is None:
            self.why_not["kill store"] = "only lmcache has a store that is a process"
        else:
            for kind in ("wipe store", "corrupt store", "full disk"):
                self.why_not[kind] = "the LMCache server keeps all in memory"
        for kind in self.why_not:
            del self._kinds[kind]

    @property
    def not_done(self) -> list[str]:
        """Kinds that could have been and never were, by chance or because nobody was well enough to be harmed."""
        return [kind for kind in self._kinds if not self.counts[kind]]

    def repair_due(self) -> None:
        self._repair(time.monotonic())

    def one(self, kind: str = "") -> str:
        """Repairs what is due, then harms something: what `kind` says, or anything.

        Returns what was done to whom; empty if nobody could be harmed.
        """
        self.repair_due()
        kind, self._victim = kind or self._rng.choice(list(self._kinds)), ""
        if not self._kinds[kind]():
            return ""
        self.counts[kind] += 1
        done = f"{kind} {self._victim}".strip()
        print(f"{time.strftime('%H:%M:%S', time.gmtime())} {done}", file=sys.stderr, flush=True)
        return done

    def shift_role(self) -> None:
        """Has any worker of both roles take any work, whatever others take. One that is not there does not."""
        member, role = self._rng.choice(self._fleet.members), self._rng.choice(list(WorkerRole))
        order = worker_pb2.SetWorkerRoleRequest(role=role_to_proto(role), reason="chaos")
        with grpc.insecure_channel(member.admin) as channel:
            try:
                worker_pb2_grpc.WorkerServiceStub(channel).SetRole(order, timeout=1.0)
            except grpc.RpcError:
                return
        self.counts["shift role"] += 1

    def repair_all(self) -> None:
        """Raises `AssertionError` if a worker does not come back."""
        self._repair(float("inf"))
        deadline = time.monotonic() + START_TIMEOUT_S
        while unhealed := self._unhealed():
            assert time.monotonic() < deadline, f"not back: {unhealed}"
            time.sleep(0.2)
            self._replace_the_dead()

    # ------------------------------------------------------------------------------------------- workers

    def _on_member(self, harm: Callable[[Member], None], spares: Collection[str] = ()) -> bool:
        """Harms someone who is well, and, if a decode worker, whose colleague is well too."""
        usable = {w.address for w in self._fleet.workers() if w.state is WorkerState.READY and w.integrity == "ok"}
        self._harmed = {address for address in self._harmed if address not in usable or self._is_pending(address)}
        well = [m for m in self._fleet.members if m.address in usable and m.address not in self._harmed]
        num_decode = sum(member.role != "prefill" for member in well)
        candidates = [m for m in well if (m.role == "prefill" or num_decode > 1) and m.name not in spares]
        if not candidates:
            return False
        victim = self._rng.choice(candidates)
        self._harmed.add(victim.address)
        harm(victim)
        self._victim = victim.name
        return True

    def _on_rank(self, harm: Callable[[Member], None]) -> bool:
        return self._on_member(harm, spares=self._never_killed)

    def _kill_worker(self, member: Member) -> None:
        signal_all(member.pids, signal.SIGKILL)
        self._after(self._rng.uniform(1.0, 3.0), member, lambda: self._restart(member))

    def _kill_engine(self, member: Member) -> None:
        signal_all(descendants(member.process.popen.pid), signal.SIGKILL)
        self._after(self._rng.uniform(1.0, 3.0), member, lambda: self._restart(member))

    def _stop_worker(self, member: Member) -> None:
        pids = member.pids
        signal_all(pids, signal.SIGSTOP)
        self._stopped.add(member.address)
        self._after(self._rng.uniform(0.5, 9.0), member, lambda: self._resume(member, pids))

    def _stop_engine(self, member: Member) -> None:
        """For less than --engine-timeout, or until the front has ended it."""
        engine = descendants(member.process.popen.pid)
        signal_all(engine, signal.SIGSTOP)
        self._stopped.add(member.address)
        self._after(self._rng.uniform(0.5, 9.0), member, lambda: self._resume(member, engine))

    def _kill_rank(self, member: Member) -> None:
        signal_all(set(ranks_of(member.process.popen.pid)[-1:]), signal.SIGKILL)
        self._after(self._rng.uniform(1.0, 3.0), member, lambda: self._restart(member))

    def _stop_rank(self, member: Member) -> None:
        """For a moment, or until the other ranks have given it up."""
        pids = set(ranks_of(member.process.popen.pid)[-1:])
        signal_all(pids, signal.SIGSTOP)
        self._stopped.add(member.address)
        self._after(self._rng.uniform(0.2, 3.0), member, lambda: self._resume(member, pids))

    def _drain(self, member: Member) -> None:
        member.process.popen.send_signal(signal.SIGTERM)
        give_up_at = time.monotonic() + DRAIN_TIMEOUT_S + 30

        def look() -> None:
            code = member.process.popen.poll()
            if code is None and time.monotonic() < give_up_at:
                self._after(0.5, member, look)
                return
            if code != 0:
                self.problems.append(f"{member.name} was drained and ended with {code}")
            self._restart(member)

        self._after(0.5, member, look)

    def _cut_off(self, member: Member) -> None:
        assert self._network is not None
        self._network.cut(member.name, self._rng.choice(list(Cut)))

        def heal() -> None:
            assert self._network is not None
            self._network.heal(member.name)

        self._after(self._rng.uniform(0.5, 9.0), member, heal)

    def _resume(self, member: Member, pids: set[int]) -> None:
        signal_all(pids, signal.SIGCONT)

    def _restart(self, member: Member) -> None:
        signal_all(alive(member.pids), signal.SIGKILL)
        member.process.popen.wait()
        self._start_again(member)

    def _start_again(self, member: Member) -> None:
        self._stopped.discard(member.address)
        self._fleet.restart(member)

    def _replace_the_dead(self) -> None:
        """Starts those again that ended by themselves: whom UCX ended, and whose engine hung for too long. Any other
        end is a problem."""
        for member in list(self._fleet.members):
            if member.process.running or self._is_pending(member.address):
                continue
            if self._has_nixl and watch.is_ended_by_ucx(member):
                self.counts["(ended by UCX)"] += 1
            elif not (member.address in self._stopped and watch.last_life(member, *_HUNG)):
                code = member.process.popen.returncode
                self.problems.append(f"{member.name} ended by itself with {code}:\n{member.process.tail(10)}")
                print(self.problems[-1], file=sys.stderr, flush=True)
            self._start_again(member)

    # --------------------------------------------------------------------------------------------- store

    def _wipe(self) -> bool:
        self._disk.empty()
        return True

    def _corrupt(self) -> bool:
        for path in self._disk.files():
            if self._rng.random() < 0.2:
                try:
                    corrupt(path, self._rng.randrange(3))
                except (FileNotFoundError, ValueError):
                    continue  # evicted, or cut short, meanwhile
        return True

    def _fill(self) -> bool:
        if self._is_pending("disk"):
            return False
        self._disk.fill()
        self._later.append(
            (
                time.monotonic() + self._rng.uniform(1.0, 4.0),
                "disk",
                lambda: (self._disk.path / FILLER).unlink(missing_ok=True),
            )
        )
        return True

    def _kill_server(self) -> bool:
        if self._server is None or self._is_pending("store") or not self._server.is_up:
            return False
        self._server.kill()
        self._later.append((time.monotonic() + self._rng.uniform(0.5, 3.0), "store", self._server.start))
        return True

    # ------------------------------------------------------------------------------------------- repairs

    def _repair(self, now: float) -> None:
        """Does what is due; with infinity, also what the repairs themselves put off."""
        while due := [item for item in self._later if item[0] <= now]:
            self._later = [item for item in self._later if item[0] > now]
            for _, _, action in due:
                action()
            if now != float("inf"):
                break
            time.sleep(0.1)
        self._replace_the_dead()

    def _after(self, delay_s: float, member: Member, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + delay_s, member.address, action))

    def _is_pending(self, address: str) -> bool:
        return any(whose == address for _, whose, _ in self._later)

    def _unhealed(self) -> list[str]:
        return [
            f"{worker.address}: {worker.state.value}, {worker.integrity}"
            for worker in self._fleet.workers()
            if worker.state is not WorkerState.READY or worker.integrity != "ok"
        ]


def signal_all(pids: set[int], signum: signal.Signals) -> None:
    """Those that are gone are left out."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue
