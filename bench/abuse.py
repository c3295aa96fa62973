"""What a quiet client notices of a rude one: its p99 beside abuse, and beside a loop that takes as much of the cores.

    python -m bench.abuse [--seconds 20] [--repeats 3] [--only rapid reset,…] [--json FILE]

A router that asks for keys, one prefill and one decode worker of a tiny model, on the cores that this process may use
(`taskset`). The quiet client (`bench.quiet`) asks one small thing after another, over gRPC and REST. It is alone, then
beside each kind of abuse (`bench.rude`), then beside loops that take as much of the cores as that abuse did, in the
rude client and in the fleet together. Those three take turns. On a machine that others use, all of it is coarser.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kv.tiny_model import make_tiny_model
from bench.measure import Figure, Row, write_json
from bench.processes import running
from bench.quiet import QuietClient
from bench.rude import KINDS
from common.config import DEFAULT_MODEL, default_cache_dir
from engine.loading.embedded_model import ensure_model

QUIET_KEY, RUDE_KEY = "quiet" * 8, "rude-" * 8
REQUESTS = ("grpc", "rest")  # the quiet client's questions that workers answer
PERIOD_S = 0.01
GOAL = 2.0
LOOP = """
import sys, time
share = float(sys.argv[1])
while True:
    begin = time.monotonic()
    while time.monotonic() - begin < share * {period}:
        pass
    time.sleep((1 - share) * {period})
"""


@dataclass(slots=True, frozen=True)
class Phase:
    """What one quiet client measured in one phase."""

    latencies_s: list[float]
    num_failures: int
    cores: float  # that fleet and clients kept busy

    @property
    def p99_ms(self) -> float:
        return 1000 * sorted(self.latencies_s)[int(0.99 * len(self.latencies_s))]


@dataclass(slots=True)
class Fleet:
    grpc: str
    http: str
    seconds: float
    failures: list[str] = field(default_factory=list)

    def measure(self, disturbing: contextlib.AbstractContextManager[None]) -> Phase:
        with disturbing:
            quiet = QuietClient(self.grpc, self.http, QUIET_KEY)
            begin, cpu_s = time.monotonic(), _cpu_s()
            time.sleep(self.seconds)
            cores = (_cpu_s() - cpu_s) / (time.monotonic() - begin)
            answers = quiet.stop()
        self.failures += answers.failures
        latencies = [latency for name in REQUESTS for latency in answers.latencies_s[name]]
        if not latencies:
            raise RuntimeError(f"the quiet client has no answer: {answers.failures}")
        return Phase(latencies, len(answers.failures), cores)

    @contextlib.contextmanager
    def rude(self, kind: str) -> Iterator[None]:
        command = [sys.executable, "-m", "bench.rude", kind, self.grpc, self.http]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "BATON_API_KEY": RUDE_KEY})
        try:
            yield
            if process.poll() is not None:
                raise RuntimeError(f"{kind}: the rude client ended with {process.returncode}")
        finally:
            process.communicate()


@contextlib.contextmanager
def loops(cores: float) -> Iterator[None]:
    """Processes that take so much of the cores, and no more than there are."""
    left = min(max(cores, 0.0), float(len(os.sched_getaffinity(0))))
    processes = []
    try:
        while left > 0.01:
            share, left = min(left, 1.0), left - 1.0
            processes.append(subprocess.Popen([sys.executable, "-c", LOOP.format(period=PERIOD_S), str(share)]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _cpu_s() -> float:
    """CPU seconds of all processes that this one has started and that live, whoever else works on the machine."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            pid, rest = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            parents[pid], ticks[pid] = int(rest[1]), int(rest[11]) + int(rest[12])
    ours, found = {os.getpid()}, 0
    while len(ours) > found:
        found = len(ours)
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return sum(ticks[pid] for pid in ours if pid != os.getpid()) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running_fleet(folder: Path, seconds: float) -> Iterator[Fleet]:
    """Without what `baton up` adds: a router of its own, which asks for keys."""
    model = make_tiny_model(folder / "model", ensure_model(DEFAULT_MODEL, default_cache_dir(), _say))
    keys = folder / "keys"
    keys.write_text(f"{QUIET_KEY} name=quiet\n{RUDE_KEY} name=rude\n")
    baton = [sys.executable, "-m", "baton"]
    common = ["--listen=127.0.0.1:0", f"--model={model}", "--log-level=error", f"--kv-dir={folder / 'kv'}"]
    with contextlib.ExitStack() as stack:
        addresses = {
            role: stack.enter_context(running([*baton, role, *common], f"baton {role}"))["grpc"]
            for role in ("prefill", "decode")
        }
        flags = [f"--prefill={addresses['prefill']}", f"--decode={addresses['decode']}", "--log-level=error"]
        flags += ["--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0", f"--api-keys-file={keys}"]
        ready = stack.enter_context(running([*baton, "router", *flags], "baton router"))
        yield Fleet(ready["grpc"], ready["http"], seconds)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compare(fleet: Fleet, kind: str, repeats: int) -> dict[str, Figure]:
    """Each figure over all repeats."""
    values: dict[str, list[float]] = {}
    for number in range(repeats):
        print(f"run {number + 1}/{repeats}: {kind}", file=sys.stderr, flush=True)
        alone = fleet.measure(contextlib.nullcontext())
        beside = fleet.measure(fleet.rude(kind))
        taken = beside.cores - alone.cores
        loop = fleet.measure(loops(taken))
        found = {"cores taken": taken, "failures": float(beside.num_failures)}
        found |= {
            "p99 alone, ms": alone.p99_ms,
            "p99 beside it, ms": beside.p99_ms,
            "p99 beside a loop, ms": loop.p99_ms,
        }
        found["ratio"] = beside.p99_ms / loop.p99_ms
        for name, value in found.items():
            values.setdefault(name, []).append(value)
    return {name: Figure.of(found) for name, found in values.items()}


def print_rows(rows: dict[str, Row]) -> None:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table("abuse", *names, f"goal: {GOAL:g} x", title="A quiet client's requests: medians [from … to]")
    for kind, row in rows.items():
        cells = [f"{row[name].median:.3g} [{row[name].low:.3g} … {row[name].high:.3g}]" for name in names]
        is_met = row["ratio"].median <= GOAL and not row["failures"].high
        table.add_row(kind, *cells, "met" if is_met else "NOT MET")
    Console(width=180).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.abuse", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of abuse, with commas between them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = args.only.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder), args.seconds) as fleet:
        fleet.measure(contextlib.nullcontext())  # the first requests make what stays
        rows = {kind: compare(fleet, kind, args.repeats) for kind in kinds}
    print_rows(rows)
    for failure in fleet.failures:
        print(f"failed: {failure}", file=sys.stderr)
    if args.json:
        write_json(args.json, rows)
    print(f"load average {os.getloadavg()[0]:.1f} at the end", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
