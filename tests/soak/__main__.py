"""An hour of mixed traffic while things go wrong: nothing may grow, slow down, get lost or come out wrong.

    make soak                                             one hour; SOAK_SECONDS, SOAK_SEED, SOAK_CONNECTOR, SOAK_DIR
    SOAK_SECONDS=180 taskset -c 0 make soak               three minutes, on one core
    SOAK_ROUTERS=3 make soak                              three routers that share the clients

Two prefill workers, two decode workers and a router serve a tiny random model, at 70 % of the goodput that is measured
at the start. Every ten seconds a request is cancelled, or a worker stands still or is cut off for some seconds; every
three minutes a worker is killed and started again. One prefill and one decode worker are never killed: their processes
and the router show whether memory grows. Each third of the run has the same faults in the same order.

Python keeps the memory of the most requests that a process had at once. Two faults at once may hold every request up at
one worker, and whether that happens early is chance. So before the clock starts it is brought about: for some seconds
all clients wait for one prefill and one decode worker, and only what has a short deadline ends.

Checked in the end: no answer wrong (greedy and seeded, against transformers' logits) or lost; each process that lived
through holds at most 2 % more than after the first sixth of the run; the p99 of the last third is at most 1.3 times
that of the first; every block is free or cached. Runs of less than half an hour have not come to rest: there, memory
and p99 are shown and not judged. Writes soak.json and soak.png to SOAK_DIR, and prints one line of JSON; exits 1 if
anything of that does not hold. Cuts need root; the line says if they were left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cases import make_cases, with_references
from tests.chaos.faults import Faults, signal_all
from tests.chaos.load import REQUEST_TIMEOUT_S, Tally
from tests.chaos.tiny_model import write_tiny_model
from tests.faults import network as networks
from tests.faults.disk import Disk
from tests.faults.network import Network
from tests.integration.stack import Fleet, OneHost, descendants, router_names
from tests.soak.picture import draw
from tests.soak.record import Record
from tests.soak.traffic import NUM_CLIENTS, Latencies, OpenLoop, Traffic, closed_loop, goodput

LOAD_SHARE = 0.7
FAULT_INTERVAL_S = 10.0
KILL_INTERVAL_S = 180.0
LOOK_INTERVAL_S = 5.0
HOLD_UP_S = 9.0  # as long as a fault at most
SAVE_INTERVAL_S = 60.0
NEVER_KILLED = ("prefill-0", "decode-0")
WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
FLAGS = ("--chunk-size=64", "--log-level=warning", "--kv-dir-size-gb=0.2")


@dataclass(slots=True)
class Soak:
    seconds: float
    seed: int
    connector: str
    num_routers: int
    folder: Path

    def run(self) -> dict[str, object]:
        model_dir = self.folder / "model"
        write_tiny_model(model_dir)
        cases, wanted = with_references(model_dir, make_cases(random.Random(self.seed)))
        with contextlib.ExitStack() as stack:
            disk = Disk(self.folder / "kv", megabytes=512)
            stack.callback(disk.close)
            network = networks.why_not(self.folder) or Network(self.folder, [*router_names(self.num_routers), *WORKERS])
            if isinstance(network, Network):
                stack.callback(network.close)
            flags = [f"--model={model_dir}", f"--connector={self.connector}", *FLAGS]
            fleet = Fleet(
                self.folder,
                *flags,
                prefill=2,
                decode=2,
                routers=self.num_routers,
                hosts=network if isinstance(network, Network) else OneHost(),
                environ=networks.UCX_ENVIRON if isinstance(network, Network) else {},
            )
            stack.callback(fleet.stop)
            return self._soak(fleet, Traffic.of(fleet, cases, wanted), disk, network)

    def _soak(self, fleet: Fleet, traffic: Traffic, disk: Disk, network: Network | str) -> dict[str, object]:
        best, by_clients = goodput(traffic, min(20.0, self.seconds / 12), self.seed)
        print(f"goodput by clients: {by_clients}; load {LOAD_SHARE * best:.2f} a second", file=sys.stderr, flush=True)
        problems = self._hold_up(fleet, traffic)
        rng = random.Random(self.seed)
        faults = Faults(fleet, self.connector, disk, network, None, rng, never_killed=NEVER_KILLED)
        record = Record(self.seconds)
        load = OpenLoop(traffic, LOAD_SHARE * best, self.seed, record.begin + self.seconds)
        load.start()
        kill_interval_s = min(KILL_INTERVAL_S, self.seconds / 3)
        next_fault, next_kill, next_look, next_save = FAULT_INTERVAL_S, kill_interval_s / 2, 0.0, SAVE_INTERVAL_S
        deck: list[str] = []
        third = -1
        while (now := record.now) < self.seconds:
            if third != (third := int(3 * now / self.seconds)):
                rng.seed(self.seed)
                deck.clear()
            if now >= next_kill:
                next_kill += kill_interval_s
                record.event(faults.one("kill worker") or "no kill: nobody is well")
            elif now >= next_fault:
                next_fault += FAULT_INTERVAL_S
                deck = deck or self._deck(rng, faults)
                record.event(self._fault(deck.pop(), faults, load, rng))
            else:
                faults.repair_due()
            if now >= next_look:
                next_look += min(LOOK_INTERVAL_S, self.seconds / 60)
                record.look(fleet)
            if now >= next_save:
                next_save += SAVE_INTERVAL_S
                left = f"{self.seconds - now:5.0f} s left"
                print(f"{left}, {dict(load.tally.outcomes)}, {load.num_waiting} wait", file=sys.stderr, flush=True)
                self._save(record, load, faults, best, [])
            time.sleep(0.2)
        problems += load.join()
        try:
            faults.repair_all()
            fleet.settle()
        except AssertionError as error:
            problems.append(str(error))
        record.look(fleet)
        return self._save(record, load, faults, best, [*problems, *faults.problems])

    def _hold_up(self, fleet: Fleet, traffic: Traffic) -> list[str]:
        """All clients ask while those workers stand still that may be killed, and the engine of the prefill worker that
        may not. The problems that clients had."""
        kept, stopped = set(NEVER_KILLED), set[int]()
        for member in fleet.members:
            if member.name not in kept:
                stopped |= member.pids
            elif member.role == "prefill":
                stopped |= descendants(member.process.popen.pid)
        tally = Tally()
        signal_all(stopped, signal.SIGSTOP)
        try:
            clients = closed_loop(traffic, tally, Latencies(), NUM_CLIENTS, HOLD_UP_S, self.seed)
            time.sleep(HOLD_UP_S)
        finally:
            signal_all(stopped, signal.SIGCONT)
        for client in clients:
            client.join(REQUEST_TIMEOUT_S)
        problems = [*tally.problems, *(f"{client.name} hangs" for client in clients if client.is_alive())]
        try:
            fleet.settle()
        except AssertionError as error:
            problems.append(str(error))
        return problems

    def _deck(self, rng: random.Random, faults: Faults) -> list[str]:
        """The next faults, in an order of their own."""
        kinds = ["cancel", "stop worker", "cancel", "stop engine", "cut worker"]
        kinds = [kind for kind in kinds if kind not in faults.why_not]
        rng.shuffle(kinds)
        return kinds

    def _fault(self, kind: str, faults: Faults, load: OpenLoop, rng: random.Random) -> str:
        if kind != "cancel":
            return faults.one(kind) or f"{kind}: nobody is well"
        faults.repair_due()
        return "cancel" if load.cancel_one(rng) else "cancel: nothing runs"

    def _save(
        self, record: Record, load: OpenLoop, faults: Faults, best: float, problems: list[str]
    ) -> dict[str, object]:
        """Writes what is known so far. The verdict."""
        outcomes = dict(load.tally.outcomes)
        num_bad = sum(load.tally.outcomes[name] for name in ("wrong", "lost", "client error"))
        criteria = record.criteria(load.latencies, num_bad)
        verdict: dict[str, object] = {
            "ok": all(criterion.ok for criterion in criteria) and not problems and bool(load.latencies.found),
            "seconds": self.seconds,
            "seed": self.seed,
            "connector": self.connector,
            "routers": self.num_routers,
            "cpu": _cpu(),
            "cores": sorted(os.sched_getaffinity(0)),
            "goodput_per_s": best,
            "load_per_s": round(LOAD_SHARE * best, 2),
            "requests": outcomes,
            "faults": dict(faults.counts),
            "left_out": {kind: why for kind, why in faults.why_not.items() if kind == "cut worker"},
            **dict(load.tally.extras),
            "p99_by_third_s": record.p99_by_third(load.latencies),
            "criteria": [str(criterion) for criterion in criteria],
            "problems": problems,
        }
        series = {
            "by_minute": record.by_minute(load.latencies),
            "memory_mb": {name: life.memory for name, life in record.lives().items()},
            "load_average": record.load_average,
            "events": record.events,
            "failed": load.tally.problems,
        }
        (self.folder / "soak.json").write_text(json.dumps({**verdict, **series}, indent=1) + "\n")
        title = f"soak: {self.connector}, {LOAD_SHARE * best:.1f} requests a second, {_cpu()}, red: a worker is killed"
        draw(record, load.latencies, self.folder / "soak.png", title)
        return verdict


def _cpu() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else "unknown"


def main() -> int:
    seconds = float(os.environ.get("SOAK_SECONDS", "3600"))
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**31))
    connector = os.environ.get("SOAK_CONNECTOR", "shared_storage")
    num_routers = int(os.environ.get("SOAK_ROUTERS", "1"))
    folder = Path(os.environ.get("SOAK_DIR") or tempfile.mkdtemp(prefix="baton-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"soak: {seconds:g} s, seed {seed}, {connector}; logs and results in {folder}", file=sys.stderr)
    verdict = Soak(seconds, seed, connector, num_routers, folder).run()
    print("\n".join(map(str, verdict["criteria"])), file=sys.stderr)  # type: ignore[call-overload]
    print(json.dumps(verdict), flush=True)
    return 0 if verdict["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
