"""What a quiet tenant notices of a noisy one: its p99 alone, beside one within its limit, beside one at 20 x its limit.

    python -m bench.noisy_tenant [--seconds 10] [--repeats 3] [--limit 5] [--factor 20] [--tokens 8] [--json FILE]

A router that asks for keys and has a limits file, before a decode worker without an engine (`bench.instant_worker`),
and a client process for each tenant (`bench.tenant_load`). The noisy tenant may ask for --limit requests a second; the
quiet one asks for --quiet-rate and has no limit. The three take turns. A tenant within its limit takes its fair share;
the bar is how much longer the quiet one's p99 is beside the noisy one. Exits with 1 if the quiet tenant was refused
anything, or the noisy one got more than its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from bench.load.percentiles import percentile
from bench.measure import interleave, print_table
from bench.processes import running
from bench.router.process_cost import cpu_s
from bench.tenant_load import Asked, TenantClient
from common.config import DEFAULT_MODEL, default_cache_dir
from engine.loading.embedded_model import ensure_model
from router.limits.quotas import BURST_S

QUIET_KEY, NOISY_KEY = "quiet" * 8, "noisy" * 8
ALONE, WITHIN = "alone", "beside one within its limit"
WITHIN_SHARE = 0.8  # of its limit that such a tenant asks for
BAR = 1.3


@dataclass(slots=True)
class Stack:
    grpc: str
    http: str
    router_pid: int
    args: argparse.Namespace
    runs: list[dict[str, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def measure(self, name: str, factor: float) -> Mapping[str, float]:
        """The quiet tenant beside one that asks for `factor` times its limit; 0: alone."""
        with contextlib.ExitStack() as clients:
            noisy = self._client(clients, NOISY_KEY, factor * self.args.limit) if factor else None
            quiet = self._client(clients, QUIET_KEY, self.args.quiet_rate)
            begin, used_s = time.monotonic(), cpu_s(self.router_pid)
            time.sleep(self.args.seconds)
            cores = (cpu_s(self.router_pid) - used_s) / (time.monotonic() - begin)
            of_quiet, of_noisy = quiet.ended(), noisy.ended() if noisy else Asked(0.0, [])
        # The bucket may have been full, and fills up while one run ends and the next begins.
        may_have = self.args.limit * (of_noisy.elapsed_s + BURST_S)
        run = {"system": name, "noisy may have": may_have, "quiet": asdict(of_quiet), "noisy": asdict(of_noisy)}
        self.runs.append(run)
        if len(of_quiet.answered) < len(of_quiet.requests):
            statuses = sorted({one.status for one in of_quiet.requests})
            self.problems.append(f"{name}: the quiet tenant's answers are {', '.join(statuses)}")
        if len(of_noisy.answered) > may_have:
            self.problems.append(f"{name}: the noisy tenant got {len(of_noisy.answered)} answers, not {may_have:.0f}")
        if len(of_noisy.answered) + len(of_noisy.refused) < len(of_noisy.requests):
            statuses = sorted({one.status for one in of_noisy.requests})
            self.problems.append(f"{name}: the noisy tenant's answers are {', '.join(statuses)}")
        if not of_quiet.answered:
            raise RuntimeError(self.problems[-1])
        latencies_ms = [1000 * one.latency_s for one in of_quiet.answered]
        found = {
            "quiet p50 ms": percentile(latencies_ms, 0.5),
            "quiet p99 ms": percentile(latencies_ms, 0.99),
            "quiet requests": float(len(of_quiet.requests)),
            "router, cores": cores,
        }
        if of_noisy.requests:
            found["noisy asked /s"] = len(of_noisy.requests) / of_noisy.elapsed_s
            found["noisy answered /s"] = len(of_noisy.answered) / of_noisy.elapsed_s
            found["noisy refused /s"] = len(of_noisy.refused) / of_noisy.elapsed_s
        return found

    def _client(self, clients: contextlib.ExitStack, key: str, rate: float) -> TenantClient:
        client = TenantClient(self.grpc, self.http, key, rate=rate, max_tokens=self.args.tokens)
        clients.callback(client.kill)
        return client


@contextlib.contextmanager
def running_stack(folder: Path, args: argparse.Namespace) -> Iterator[Stack]:
    tokenizer_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), lambda line: print(line, file=sys.stderr))
    keys, limits = folder / "keys", folder / "limits.yaml"
    keys.write_text(f"{QUIET_KEY} name=quiet tenant=quiet\n{NOISY_KEY} name=noisy tenant=noisy\n")
    limits.write_text(f"tenants:\n  noisy: {{requests_per_second: {args.limit}}}\n")
    python = [sys.executable, "-m"]
    with (
        running([*python, "bench.instant_worker", str(tokenizer_dir), str(args.step_ms)], "a worker") as worker,
        running(
            [
                *(*python, "baton", "router", f"--decode={worker['grpc']}", "--log-level=error"),
                *("--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0", f"--processes={args.processes}"),
                *(f"--api-keys-file={keys}", f"--limits-file={limits}"),
            ],
            "the router",
        ) as router,
    ):
        yield Stack(router["grpc"], router["http"], int(router["pid"]), args)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.noisy_tenant", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=5.0, help="requests a second that the noisy tenant may ask for")
    parser.add_argument("--factor", type=float, default=20.0, help="times its limit that it asks for")
    parser.add_argument("--quiet-rate", type=float, default=20.0, help="requests a second of the quiet tenant")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=10.0, help="between two tokens of an answer")
    parser.add_argument("--processes", type=int, default=1, help="of the router")
    parser.add_argument("--json", type=Path, help="every request of every run")
    args = parser.parse_args()
    beside = f"beside one at {args.factor:g} x its limit"
    with tempfile.TemporaryDirectory() as folder, running_stack(Path(folder), args) as stack:
        factors = {ALONE: 0.0, WITHIN: WITHIN_SHARE, beside: args.factor}
        systems = {name: partial(stack.measure, name, factor) for name, factor in factors.items()}
        rows = interleave(systems, args.repeats)
    print_table("A quiet tenant's requests: medians, from … to", rows)
    p99 = {name: figure.median for name, figure in rows["quiet p99 ms"].items()}
    for name in (WITHIN, ALONE):
        ratio = p99[beside] / p99[name]
        verdict = f" (bar {BAR:g}: {'met' if ratio <= BAR else 'MISSED'})" if name == WITHIN else ""
        print(f"p99 {beside}: {ratio:.2f} x that {name}{verdict}")
    for problem in stack.problems:
        print(f"WRONG: {problem}")
    print(f"load average {os.getloadavg()[0]:.1f} at the end", file=sys.stderr)
    if args.json:
        figures = {name: {system: asdict(figure) for system, figure in row.items()} for name, row in rows.items()}
        args.json.write_text(json.dumps({"figures": figures, "problems": stack.problems, "runs": stack.runs}) + "\n")
    return 1 if stack.problems else 0


if __name__ == "__main__":
    sys.exit(main())
