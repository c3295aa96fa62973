"""Two prefill and two decode workers under load, and something goes wrong every second.

    make chaos                                  10 minutes, shared_storage
    CHAOS_SECONDS=60 CHAOS_SEED=7 CHAOS_CONNECTOR=nixl make chaos          or lmcache, after `make lmcache`
    CHAOS_ROUTERS=3 CHAOS_HEDGE=1 make chaos    three routers that share the clients, with --hedge-prefill
    CHAOS_QUEUE_POLICY=slo make chaos           workers know how long steps take; half of the requests have targets
    CHAOS_RANKS=2 make chaos                    two processes compute the model of each worker
    CHAOS_ROLE_SHIFTS=1 make chaos              four workers of both roles; each second one takes work of another one

Faults: workers, engines and ranks killed or stopped for a while, workers drained and cut off from the network (also in
one direction only), the store wiped, corrupted, killed or its disk full; and each second a request is cancelled, while
others have too short a deadline. One decode worker is always left alone, so no request may fail. Every answer must be
the reference answer, greedy or seeded, made from transformers' logits. In the end every block of every worker is free
or cached, no lease is left, and no process holds more memory than it did when it was warm. Prints one line of JSON;
exits 1 if anything of that does not hold. Cuts and full disks need root; the line says what was left out, and why; and
what never came up, as on a machine so busy that workers take most of the time to start again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from baton.stack import lmcache_server
from baton.stack.stack_plan import free_ports
from common.targets import LatencyTargets
from tests.chaos.cases import make_cases, with_references
from tests.chaos.faults import DRAIN_TIMEOUT_S, Faults, StoreServer
from tests.chaos.load import REQUEST_TIMEOUT_S, ClientThread, Tally
from tests.chaos.memory import Memory
from tests.chaos.tiny_model import write_tiny_model
from tests.faults import network as networks
from tests.faults.disk import Disk
from tests.faults.network import Network
from tests.integration.stack import Fleet, OneHost, router_names, wait_for, worker_names
from tests.integration.written_times import write_times

NUM_CLIENTS = 4
FAULT_INTERVAL_S = 1.0
MAX_GROWTH_MB = 25.0  # below 2 in five minutes, with either connector
# Of requests, if a queue policy is named: none, missed always, missed now and then, met.
TARGETS = (None, None, None, LatencyTargets(1, 1), LatencyTargets(2_000, 50), LatencyTargets(80_000, 10_000))
FLAGS = (
    "--chunk-size=64",
    "--log-level=warning",
    "--engine-timeout=5",
    f"--drain-timeout={DRAIN_TIMEOUT_S:g}",
    "--host-cache-gb=0.01",
)


@dataclass(slots=True)
class Run:
    seconds: float
    seed: int
    connector: str
    num_routers: int
    hedges: bool
    queue_policy: str  # empty: the workers' own, and no request has targets
    shifts_roles: bool
    num_ranks: int  # of each worker
    folder: Path

    def run(self) -> dict[str, object]:
        rng = random.Random(self.seed)
        model_dir = self.folder / "model"
        write_tiny_model(model_dir)
        cases, wanted = with_references(model_dir, make_cases(rng))
        with contextlib.ExitStack() as stack:
            disk = Disk(self.folder / "kv", megabytes=128)
            stack.callback(disk.close)
            network = self._network(stack)
            flags = [f"--model={model_dir}", f"--connector={self.connector}", *FLAGS]
            if self.connector == "nixl":  # keeps nothing; the files that are harmed are those of a store beside it
                flags.append("--store=shared_storage")
            if self.queue_policy:
                write_times(model_dir, self.folder / "cache")
                flags += [f"--queue-policy={self.queue_policy}", f"--cache-dir={self.folder / 'cache'}"]
            if self.num_ranks > 1:
                flags.append(f"--tensor-parallel-size={self.num_ranks}")
            targets = TARGETS if self.queue_policy else ()
            server = self._server(stack, flags)
            hosts = network if isinstance(network, Network) else OneHost()
            # Memory that two hosts share is no link that can be cut.
            environ = networks.UCX_ENVIRON if isinstance(network, Network) else {}
            fleet = Fleet(
                self.folder,
                *flags,
                **self._numbers,
                routers=self.num_routers,
                router_flags=["--hedge-prefill"] if self.hedges else [],
                hosts=hosts,
                environ=environ,
            )
            stack.callback(fleet.stop)
            faults = Faults(fleet, self.connector, disk, network, server, rng)
            tally, memory = Tally(), Memory()
            end_at = time.monotonic() + self.seconds
            clients = [
                ClientThread(router.grpc, cases, wanted, tally, self.seed + number, end_at, targets)
                for number, router in zip(range(1, NUM_CLIENTS + 1), itertools.cycle(fleet.routers), strict=False)
            ]
            for client in clients:
                client.start()
            while time.monotonic() < end_at:
                time.sleep(FAULT_INTERVAL_S)
                faults.one()
                if self.shifts_roles:
                    faults.shift_role()
                rng.choice(clients).cancel()
                memory.look(fleet)
                print(f"{end_at - time.monotonic():5.0f} s left, {dict(tally.outcomes)}", file=sys.stderr, flush=True)
            problems = self._end(fleet, faults, clients)
            memory.look(fleet)
            return self._verdict(tally, faults, memory.growth_mb(), problems)

    @property
    def _numbers(self) -> dict[str, int]:
        return {"prefill": 0, "decode": 0, "both": 4} if self.shifts_roles else {"prefill": 2, "decode": 2}

    def _network(self, stack: contextlib.ExitStack) -> Network | str:
        """The hosts of the fleet, or why there is but one."""
        if self.connector == "lmcache":
            return "an LMCache server and its workers share one host's memory"
        if why := networks.why_not(self.folder):
            return why
        network = Network(self.folder, [*router_names(self.num_routers), *worker_names(**self._numbers)])
        stack.callback(network.close)
        return network

    def _server(self, stack: contextlib.ExitStack, flags: list[str]) -> StoreServer | None:
        if self.connector != "lmcache":
            return None
        lmcache_server.executable()  # raises if there is none
        (port,) = free_ports(1)
        address, log = f"127.0.0.1:{port}", self.folder / "lmcache.log"
        server = StoreServer(lmcache_server.wrapper(address, 0.25, None), log)
        stack.callback(server.kill)
        wait_for("the LMCache server is up", lambda: server.is_up, 120)
        flags.append(f"--lmcache-address={address}")
        return server

    def _end(self, fleet: Fleet, faults: Faults, clients: list[ClientThread]) -> list[str]:
        """Lets everything come to rest. What is wrong then."""
        problems = []
        for client in clients:
            client.join(REQUEST_TIMEOUT_S + 30)
            if client.is_alive():
                problems.append(f"{client.name} hangs")
        try:
            faults.repair_all()
            fleet.settle()
        except AssertionError as error:
            problems.append(str(error))
        return problems + faults.problems

    def _verdict(
        self, tally: Tally, faults: Faults, growth_mb: dict[str, float], problems: list[str]
    ) -> dict[str, object]:
        bad = tally.outcomes["wrong"] + tally.outcomes["lost"] + tally.outcomes["client error"]
        problems += [f"{name} grew by {mb} MB" for name, mb in growth_mb.items() if mb > MAX_GROWTH_MB]
        return {
            "ok": not bad and not problems and tally.outcomes["equal"] > 0 and tally.extras["blocks_moved"] > 0,
            "seconds": self.seconds,
            "seed": self.seed,
            "connector": self.connector,
            "routers": self.num_routers,
            "queue_policy": self.queue_policy,
            "shifts_roles": self.shifts_roles,
            "ranks": self.num_ranks,
            "requests": dict(tally.outcomes),
            "faults": dict(faults.counts),
            "not_done": faults.not_done,
            "left_out": faults.why_not,
            **dict(tally.extras),
            "problems": problems,
            "growth_mb": growth_mb,
        }


def main() -> int:
    seconds = float(os.environ.get("CHAOS_SECONDS", "600"))
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(2**31))
    connector = os.environ.get("CHAOS_CONNECTOR", "shared_storage")
    num_routers, hedges = int(os.environ.get("CHAOS_ROUTERS", "1")), bool(os.environ.get("CHAOS_HEDGE"))
    queue_policy = os.environ.get("CHAOS_QUEUE_POLICY", "")
    shifts_roles = bool(os.environ.get("CHAOS_ROLE_SHIFTS"))
    num_ranks = int(os.environ.get("CHAOS_RANKS", "1"))
    folder = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    print(f"chaos: {seconds:g} s, seed {seed}, {connector}; logs in {folder}", file=sys.stderr)
    outcome = Run(seconds, seed, connector, num_routers, hedges, queue_policy, shifts_roles, num_ranks, folder).run()
    print(json.dumps(outcome), flush=True)
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
