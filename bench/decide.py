"""Which way of deciding serves most requests in time, on equal hardware, with traffic of a recorded trace.

    python -m bench.decide TRACE                  # real processes: 35 minutes on two cores; nothing else may run
    python -m bench.decide TRACE --simulated      # simulated workers, beside an oracle: 20 minutes

Four ways, each with two workers (of a simulation, with `--sizes`): all of both roles, with plain chunked prefill; half
of them for prefill and half for decode, where each prompt is computed by the first; the same, by the rule that counts
tokens; the same, where router and workers decide by the model of time and requests say when they are due. Then two
workers of both roles at 1.2 times their capacity, simulated or real: by arrival, by slack, and by slack with refusals.

The trace is in a format that `baton simulate` reads. Its short prompts are chats, its long ones are scaled down more
(`bench.decide_ways`). Loads are shares of what workers of both roles can do by the model of time. Targets are 4 times
the first token and 2.5 times the time per token of a request that is alone. All ways get the same requests at the same
times. Repeats are interleaved; each has another piece of the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.cli.main import main as baton
from baton.stack import stack_plan
from bench.decide_ways import LATE_WAYS, WAYS, WORKLOADS, Answer, Simulation, Way, decide_as, piece, targets_of, traffic
from bench.load.clients import GrpcClient, RefusedError, Request
from bench.load.loops import open_loop
from bench.processes import running
from bench.simulated_vs_real import SIMULATED_KV_BYTES, VOCABULARY, kv_token_bytes, profiled
from common.config import DEFAULT_MODEL, SimulateSettings, default_cache_dir
from common.config.base import Settings
from common.cpu import read_cpu
from common.errors import BatonError
from common.percentiles import percentile
from common.targets import LatencyTargets
from common.traffic.requests import TrafficRequest, prompt_token_ids
from engine.loading.embedded_model import ensure_model

NUM_BLOCKS = 2048  # of KV, of each worker
MAX_MODEL_LEN = 4096
NUM_TOGETHER = 32  # requests for each worker, of which the capacity is found
NUM_ALONE = 5  # requests of a kind, by which targets are found
NUM_WARM = 2  # of them, which each stack gets before it is measured
LEAST_REQUESTS = 8  # of a run: fewer say nothing
LATE = "mixed", 1.2  # workload and load of `LATE_WAYS`
ORACLE = "oracle"
SHEET = "xeon-135m"  # of simulated workers
CHILD = "--decide-as"


@dataclass(slots=True)
class Cell:
    """Sums over repeats."""

    size: int  # workers
    workload: str
    load: float
    way: str
    num: int = 0  # requests
    num_in_time: int = 0
    num_late_ttft: int = 0  # of real ones
    num_late_tpot: int = 0
    seconds: float = 0.0  # in which they came
    chat_itl_p99_ms: float = 0.0  # the mean of the repeats

    def __str__(self) -> str:
        return f"{self.num_in_time / self.num:.1%} {self.num_in_time / self.seconds:.2f}/s"


class Runs:
    """Of all ways, simulated or real."""

    def __init__(self, args: argparse.Namespace, simulation: Simulation, progress: Progress) -> None:
        self._args = args
        self._simulation = simulation
        self._progress = progress
        self._traffic = traffic(args.trace)
        self._alone = {kinds[0]: self._traffic[name][:NUM_ALONE] for name, kinds in WORKLOADS.items() if not kinds[1:]}
        self._capacities: dict[tuple[int, str], float] = {}
        self.cells: dict[tuple[int, str, float, str], Cell] = {}
        self.idle_itl_p99_ms = 0.0

    def simulate(self) -> None:
        args, simulation = self._args, self._simulation
        simulation.targets = targets_of({kind: simulation.alone(one) for kind, one in self._alone.items()})
        places = [*itertools.product(args.sizes, args.workload.split(","), args.loads, range(args.repeats))]
        for size, workload, load, repeat in self._progress.track(places):
            requests, rate = self._requests(size, workload, load, repeat)
            found: dict[Way, list[bool]] = {}
            for way in WAYS:
                found[way] = simulation.in_time(requests, simulation.run(way, size, requests))
                self._add(size, workload, load, way.name, len(requests), sum(found[way]), rate)
            best = max(WAYS, key=lambda way: sum(found[way]))
            num = simulation.oracle(best, size, requests, found[best])
            self._add(size, workload, load, ORACLE, len(requests), num, rate)
        for way, repeat in itertools.product(LATE_WAYS if args.late else (), range(args.repeats)):
            requests, rate = self._requests(2, *LATE, repeat)
            found_late = simulation.in_time(requests, simulation.run(way, 2, requests))
            self._add(2, *LATE, way.name, len(requests), sum(found_late), rate)

    def measure(self, flags: Sequence[str]) -> None:
        args = self._args
        own = [*itertools.product(args.workload.split(","), args.loads)]
        with stack(WAYS[0], flags) as address:
            alone = {
                kind: [
                    asyncio.run(send(address, [replace(one, at=0.0)], {}, seed=-2 - number))[0]  # as a fleet's first
                    for number, one in enumerate(requests)
                ]
                for kind, requests in self._alone.items()
            }
        answers = {kind: [one for one in found[1:] if one] for kind, found in alone.items()}  # the first warms it up
        self._simulation.targets = targets_of(answers)
        self.idle_itl_p99_ms = itl_p99_ms(answers["chat"])
        ways = [*((way, own) for way in WAYS), *((way, [LATE]) for way in LATE_WAYS if args.late)]
        for repeat, (way, places) in self._progress.track([*itertools.product(range(args.repeats), ways)]):
            with stack(way, flags) as address:
                for requests in self._alone.values():
                    warm = [replace(one, at=0.0) for one in requests[:NUM_WARM]]
                    asyncio.run(send(address, warm, {}, seed=-1))
                for seed, (workload, load) in enumerate(places):
                    self._measure(address, way, workload, load, repeat, seed)

    def _measure(self, address: str, way: Way, workload: str, load: float, repeat: int, seed: int) -> None:
        """`seed`: of the prompts, so that none is in a cache since an earlier run."""
        requests, rate = self._requests(2, workload, load, repeat)
        print(f"{way.name}, {workload} at {load:g}: {len(requests)} requests", file=sys.stderr, flush=True)
        targets = self._simulation.targets
        answers = asyncio.run(send(address, requests, targets if way.has_targets else {}, seed))
        pairs = [*zip(requests, answers, strict=True)]
        num = sum(one is not None and one.is_in_time(targets[request.tenant]) for request, one in pairs)
        cell = self._add(2, workload, load, way.name, len(requests), num, rate)
        cell.num_late_ttft += sum(one is not None and one.is_late(targets[request.tenant])[0] for request, one in pairs)
        cell.num_late_tpot += sum(one is not None and one.is_late(targets[request.tenant])[1] for request, one in pairs)
        chats = [one for request, one in pairs if request.tenant == "chat" and one is not None]
        cell.chat_itl_p99_ms += itl_p99_ms(chats) / self._args.repeats

    def _requests(self, size: int, workload: str, load: float, repeat: int) -> tuple[list[TrafficRequest], float]:
        """And how many a second."""
        requests, key = self._traffic[workload], (size, workload)
        if key not in self._capacities:
            self._capacities[key] = self._simulation.capacity(size, requests, NUM_TOGETHER * size)
        rate = load * self._capacities[key]
        return piece(requests, max(round(rate * self._args.seconds), LEAST_REQUESTS), repeat, rate), rate

    def _add(self, size: int, workload: str, load: float, way: str, num: int, num_in_time: int, rate: float) -> Cell:
        key = size, workload, load, way
        cell = self.cells.setdefault(key, Cell(*key))
        cell.num += num
        cell.num_in_time += num_in_time
        cell.seconds += num / rate
        return cell

    def show(self, reference: str, console: Console) -> None:
        """`reference`: whose requests in time those of the last way are divided by; empty: the best of the others."""
        for kind, one in self._simulation.targets.items():
            console.print(f"targets of {kind}: TTFT {one.ttft_ms:.0f} ms, TPOT {one.tpot_ms:.1f} ms")
        *others, last = [way.name for way in WAYS]
        names, ratios = [*others, *([reference] if reference else []), last], list[float]()
        table = Table("workers", "workload", "load", *names, f"{last} / {reference or 'best other'}")
        for place in dict.fromkeys(key[:3] for key in self.cells):
            row = {name: self.cells[*place, name] for name in names if (*place, name) in self.cells}
            if len(row) == len(names):
                best = max(row[name].num_in_time for name in ([reference] if reference else others))
                ratios.append(row[last].num_in_time / max(best, 1))
                table.add_row(*map(str, place), *map(str, row.values()), f"{ratios[-1]:.3f}")
        console.print(table)
        console.print(f"ratio: least {min(ratios):.3f}, mean {sum(ratios) / len(ratios):.3f}, most {max(ratios):.3f}")
        late = [cell for way in LATE_WAYS if (cell := self.cells.get((2, *LATE, way.name)))]
        for cell in late:
            times = cell.num_in_time / max(late[0].num_in_time, 1)
            console.print(
                f"two of both, {cell.workload} at {cell.load:g}, {cell.way}: {cell}, {times:.2f} times the first"
            )
        for cell in self.cells.values():
            if self.idle_itl_p99_ms and cell.workload == "mixed":
                times = cell.chat_itl_p99_ms / self.idle_itl_p99_ms
                console.print(
                    f"chats' ITL p99 beside long prompts at {cell.load:g}, {cell.way}: {times:.2f} times idle"
                )


# ------------------------------------------------------------------------------------------------------ real processes


def child(name: str, arguments: Sequence[str]) -> int:
    """`baton` with these arguments; its router decides as `name` says."""
    make = stack_plan.baton_command

    def own_command(command: str, settings: Settings) -> list[str]:
        found = make(command, settings)
        return [sys.executable, "-m", "bench.decide", CHILD, name, *found[3:]] if command == "router" else found

    if arguments[0] == "router":
        decide_as(name)
    else:
        stack_plan.baton_command = own_command
    return baton(arguments)


@contextlib.contextmanager
def stack(way: Way, flags: Sequence[str]) -> Iterator[str]:
    """The gRPC address of a stack that decides so."""
    own = ["--prefill=1", "--decode=1"] if way.is_split else ["--prefill=0", "--decode=0", "--both=2"]
    own += [f"--queue-policy={way.queue_policy}", f"--slo-late={way.slo_late}", "--policy=prefix_aware"]
    own += ["--http-port=0", "--grpc-port=0", "--log-level=error", "--max-restarts=0", *flags]
    with running([sys.executable, "-m", "bench.decide", CHILD, way.router, "up", *own], way.name) as fields:
        yield fields["grpc"]


async def send(
    address: str, requests: Sequence[TrafficRequest], targets: Mapping[str, LatencyTargets], seed: int
) -> list[Answer | None]:
    """Each when it is due; None for one that was refused. `targets` that they have, by kind; `seed` of the prompts."""
    client, clock = GrpcClient(address), asyncio.get_running_loop().time
    asked = [
        Request(
            prompt=prompt_token_ids(one, VOCABULARY, seed),
            max_tokens=one.num_output_tokens,
            options={"temperature": 0.0, "ignore_eos": True},
            targets=targets.get(one.tenant),
        )
        for one in requests
    ]

    async def ask(number: int) -> list[float]:
        begin, times = clock(), list[float]()
        with contextlib.suppress(RefusedError):
            async for response in client.responses(asked[number]):
                times += [clock() - begin] * len(response.token_ids)
        return times

    try:
        sent = await open_loop([one.at for one in requests], ask)
    finally:
        await client.close()
    found: list[Answer | None] = []
    for one in sent:
        gaps = [after - before for before, after in itertools.pairwise(one.result)]
        tpot_s = sum(gaps) / len(gaps) if gaps else None
        found.append(Answer(one.lag_s + one.result[0], tpot_s, gaps) if one.result else None)
    return found


def itl_p99_ms(answers: Sequence[Answer]) -> float:
    gaps = sorted(gap for one in answers for gap in one.gaps_s)
    return 1000 * percentile(gaps, 0.99) if gaps else 0.0


# --------------------------------------------------------------------------------------------------------- the command


def run(args: argparse.Namespace, made: contextlib.ExitStack, console: Console) -> Runs:
    given = {"policy": "prefix_aware", "num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN, "leap": True}
    flags = [f"--num-blocks={NUM_BLOCKS}", f"--max-model-len={MAX_MODEL_LEN}", f"--connector={args.connector}"]
    flags += [f"--model={args.model}", f"--cache-dir={args.cache_dir}", f"--device={args.device}"]
    given["times"] = args.times or SHEET
    if args.device == "simulated":
        given["kv_token_bytes"] = SIMULATED_KV_BYTES
        flags.append(f"--simulated-time={given['times']}")
    elif not args.simulated:
        num_workers = min(len(os.sched_getaffinity(0)), 2)
        num_cores = len(os.sched_getaffinity(0)) // num_workers
        model = ensure_model(args.model, args.cache_dir, lambda line: print(line, file=sys.stderr))
        given["kv_token_bytes"] = kv_token_bytes(Path(model), args.dtype)
        given["times"] = args.times or made.enter_context(profiled(args, num_cores, num_workers))
        flags.append(f"--dtype={args.dtype}")
    folder = Path(made.enter_context(tempfile.TemporaryDirectory()))
    progress = made.enter_context(Progress(console=Console(stderr=True)))
    runs = Runs(args, Simulation(SimulateSettings.model_validate(given), folder), progress)
    console.print(f"{read_cpu().name}, {len(os.sched_getaffinity(0))} cores; times of steps: {given['times']}")
    if args.simulated:
        logging.disable()  # lines of its workers
        made.callback(logging.disable, logging.NOTSET)
        runs.simulate()
    else:
        runs.measure(flags)
    return runs


def numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [CHILD]:
        return child(given[1], given[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--loads", type=numbers, default=[0.4, 0.6, 0.8, 1.0, 1.2], help="shares of the capacity")
    parser.add_argument("--sizes", type=lambda text: [*map(int, text.split(","))], default=[8, 64, 256])
    parser.add_argument("--seconds", type=float, help="of each run; 8, and 4 of a simulated one")
    parser.add_argument("--repeats", type=int, help="2, and 1 of a simulated run")
    parser.add_argument("--no-late", dest="late", action="store_false", help="no comparison of orders under overload")
    parser.add_argument("--device", default="cpu", choices=["cpu", "simulated"], help="of the real processes")
    parser.add_argument("--times", help="a file of baton profile, which is not run then; or a data sheet's name")
    parser.add_argument("--minutes", type=float, default=2.0, help="that baton profile measures")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--connector", default="shared_storage")
    parser.add_argument("--cache-dir", default=default_cache_dir())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    args.seconds = args.seconds or (4.0 if args.simulated else 8.0)
    args.repeats = args.repeats or (1 if args.simulated else 2)
    if unknown := {*args.workload.split(",")} - {*WORKLOADS}:
        parser.error(f"--workload: {', '.join(sorted(unknown))}: they are {', '.join(WORKLOADS)}")
    console = Console(width=150)
    try:
        with contextlib.ExitStack() as made:
            runs = run(args, made, console)
    except BatonError as error:
        print(f"bench.decide: error: {error.message}", file=sys.stderr)
        return 2
    runs.show(ORACLE if args.simulated else "", console)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in runs.cells.values()], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
