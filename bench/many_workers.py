"""What simulated workers under `baton up` cost this machine: memory, CPU time of their start, CPU time while nothing is
asked.

    python -m bench.many_workers --prefill 60 --decode 40

Memory is counted by its share (Pss), so that what the workers have in common counts once; all figures of CPU time are
the kernel's, and are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.processes import running
from bench.router.process_cost import family, own_cpu_s, pss_mib
from common.cpu import read_cpu

SETTLE_S = 3.0
FRONTS, ENGINES = "workers' fronts", "workers' engines"


def by_kind(up: int) -> Mapping[str, list[int]]:
    """Pids of a stack's processes, by what they are."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for pid in family(up):
        found["baton up" if pid == up else _kind(pid)].append(pid)
    return found


def _kind(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    if name.startswith(("prefill-", "decode-")):
        return ENGINES if "." in name else FRONTS
    return "fork server" if b"forked_workers" in command else "router"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.many_workers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", type=int, default=60)
    parser.add_argument("--decode", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=30.0, help="of idling")
    args = parser.parse_args()
    fleet = ["--device=simulated", f"--prefill={args.prefill}", f"--decode={args.decode}", "--log-level=warning"]
    command = [sys.executable, "-m", "baton", "up", *fleet, "--http-port=0", "--grpc-port=0"]
    with running(command, "the stack") as fields:
        time.sleep(SETTLE_S)
        kinds = by_kind(int(fields["pid"]))
        started = {kind: sum(map(own_cpu_s, pids)) for kind, pids in kinds.items()}
        begin = time.monotonic()
        time.sleep(args.seconds)
        minutes = (time.monotonic() - begin) / 60
        idle = {kind: (sum(map(own_cpu_s, pids)) - started[kind]) / minutes for kind, pids in kinds.items()}
        memory = {kind: sum(map(pss_mib, pids)) for kind, pids in kinds.items()}
    table = Table(title=f"{args.prefill} prefill and {args.decode} decode workers, {read_cpu().name}")
    for title in ("processes", "number", "MiB", "CPU s to start", "CPU s a minute, idle"):
        table.add_column(title, justify="left" if title == "processes" else "right")
    for kind, pids in kinds.items():
        table.add_row(kind, str(len(pids)), f"{memory[kind]:.0f}", f"{started[kind]:.1f}", f"{idle[kind]:.2f}")
    rest = f"{sum(memory.values()):.0f}", f"{sum(started.values()):.1f}", f"{sum(idle.values()):.2f}"
    table.add_row("all", str(sum(map(len, kinds.values()))), *rest)
    num_workers = args.prefill + args.decode
    each = [(figures[FRONTS] + figures[ENGINES]) / num_workers for figures in (memory, started, idle)]
    table.add_row("one worker", "2", f"{each[0]:.0f}", f"{each[1]:.2f}", f"{each[2]:.3f}")
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
