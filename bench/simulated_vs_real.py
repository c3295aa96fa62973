"""The same traffic played to a real stack and to a simulated fleet: how far a simulation is from the truth.

    python -m bench.simulated_vs_real                              # 9 minutes on an idle machine; nothing else may run
    python -m bench.simulated_vs_real --times MODEL.json           # a model of time that is there: 4 minutes
    python -m bench.simulated_vs_real --device simulated           # real processes, steps that only wait: 4 minutes

`baton profile` first learns how long steps take on as many cores as a worker has, while the other workers' cores do the
same. Then, for each fleet, `baton up` starts it, some requests tell what the host takes between two steps and what a
message takes, and five kinds of traffic are sent, each at --load of what the simulated fleet can do. The simulator gets
the same requests; a real turn of a conversation repeats the answers that the stack gave. Router and client run on the
workers' cores, which no simulation knows of. A fleet that has more workers than there are cores is left out.

With `--device simulated` a step takes exactly the predicted time. What differs then is not the model's fault: it is
messages, scheduling, routing and transfers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.load.clients import GrpcClient, Request
from bench.load.loops import open_loop
from bench.processes import running_stack
from common.batch_time_file import decode
from common.config import DEFAULT_MODEL, SimulateSettings, default_cache_dir
from common.cpu import read_cpu
from common.errors import ConfigError, InternalError
from common.percentiles import percentile
from common.traffic.requests import ANSWER, TrafficRequest, prompt_token_ids
from engine.loading.embedded_model import ensure_model
from engine.simulated.data_sheet import SHEETS
from engine.simulated.device import PIECE_S
from simulation.fleet import Fleet
from simulation.scenario import fleet_options, scenarios, traffic

WORKLOADS: Mapping[str, Mapping[str, object]] = {
    "poisson": {"prompt_tokens": 256, "output_tokens": 48, "length_sigma": 0.5},
    "bursts": {"arrivals": "bursts", "burst_size": 4, "prompt_tokens": 128, "output_tokens": 32},
    "conversations": {"arrivals": "conversations", "prompt_tokens": 96, "output_tokens": 32, "think_time": 3.0},
    "long prompts": {"prompt_tokens": 1024, "output_tokens": 16},
    "long answers": {"prompt_tokens": 64, "output_tokens": 128},
}
NUM_BLOCKS = 2048  # of KV, of each worker
MAX_MODEL_LEN = 4096
VOCABULARY = range(1000, 20_000)
GAP_S = 1.5  # between requests that are alone
REQUESTS_AT_ONCE = 8  # of each decode worker
BAR = 0.1  # by which a figure may differ
SIMULATED_KV_BYTES = 8  # of a token, on a simulated device


@dataclass(slots=True, frozen=True)
class Answer:
    ttft_s: float  # from the moment at which the request was due
    e2e_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float | None:
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(slots=True, frozen=True)
class Row:
    name: str
    real: float
    simulated: float

    @property
    def error(self) -> float:
        """Of the simulation, as a share of the truth."""
        return self.simulated / self.real - 1


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """`seconds`: until the last answer's end."""
    found: dict[str, float] = {}
    for name, values in (
        ("TTFT", [one.ttft_s for one in answers]),
        ("TPOT", [tpot for one in answers if (tpot := one.tpot_s) is not None]),
    ):
        for share in (0.5, 0.9):
            found[f"{name} p{round(100 * share)} ms"] = 1000 * percentile(sorted(values), share)
    found["requests/s"] = len(answers) / seconds
    return found


# ------------------------------------------------------------------------------------------------------ the real stack


class Prompts:
    """Tokens of prompts. A turn of a conversation repeats the answers that the stack gave."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._answers: dict[int, list[int]] = {}  # by run id

    def of(self, request: TrafficRequest) -> list[int]:
        token_ids: list[int] = []
        for run in request.runs:
            run_id, num_tokens = run
            if run_id & ANSWER and len(answer := self._answers.get(run_id, [])) >= num_tokens:
                token_ids += answer[:num_tokens]
            else:
                alone = TrafficRequest(at=0.0, runs=(run,), num_output_tokens=1)
                token_ids += prompt_token_ids(alone, VOCABULARY, self._seed)
        return token_ids

    def answered(self, request: TrafficRequest, token_ids: list[int]) -> None:
        self._answers[request.runs[-1][0] | ANSWER] = token_ids


async def send(address: str, requests: Sequence[TrafficRequest], seed: int) -> tuple[list[Answer], float]:
    """Each request when it is due. Returns what came of them, and the seconds until the last one's end."""
    client, prompts, clock = GrpcClient(address), Prompts(seed), asyncio.get_running_loop().time

    async def ask(number: int) -> tuple[float, int]:
        request = requests[number]
        asked = Request(
            prompt=prompts.of(request),
            max_tokens=request.num_output_tokens,
            options={"temperature": 0.0, "ignore_eos": True},
        )
        begin, first, token_ids = clock(), 0.0, list[int]()
        async for response in client.responses(asked):
            if response.token_ids and not token_ids:
                first = clock() - begin
            token_ids += response.token_ids
        if len(token_ids) != request.num_output_tokens:
            raise InternalError(f"{len(token_ids)} tokens instead of {request.num_output_tokens}")
        prompts.answered(request, token_ids)
        return first, len(token_ids)

    try:
        sent = await open_loop([one.at for one in requests], ask)
    finally:
        await client.close()
    answers = [Answer(one.lag_s + one.result[0], one.latency_s, one.result[1]) for one in sent]
    start = sent[0].due - requests[0].at
    return answers, max(one.ended for one in sent) - start


def calibrated(address: str, settings: SimulateSettings) -> SimulateSettings:
    """With the times of what no model of steps knows: the host between two steps and a message, from requests that are
    alone, and the host for each request of a step, from some that come at once. Two messages come before a first token,
    four if a prefill worker is asked."""
    num_decoders = settings.both or settings.decode
    num_cold = 4 * num_decoders * max(settings.prefill, 1)  # that open each connection, and warm both ends of it
    alone = [_known_request(number, at=GAP_S * number) for number in range(num_cold + 8)]
    answers = asyncio.run(send(address, alone, seed=-1))[0][num_cold:]
    silent = settings.model_copy(update={"message_latency": 0.0, "link_latency": 0.0})
    (expected, *_), _ = simulate(silent, alone[:1])
    host_s = max(_median_tpot_s(answers) - (expected.tpot_s or 0.0), 0.0)
    rest_s = max(statistics.median(one.ttft_s for one in answers) - expected.ttft_s, 0.0)
    latency_ms = 1000 * rest_s / (2 if settings.both else 4)
    known = silent.model_copy(update={"host_time": 1000 * host_s, "message_latency": latency_ms})

    together = [_known_request(1000 + number, at=0.0) for number in range(REQUESTS_AT_ONCE * num_decoders)]
    expected_s = _median_tpot_s(simulate(known, together)[0])
    more_s = max(_median_tpot_s(asyncio.run(send(address, together, seed=-1))[0]) - expected_s, 0.0)
    request_ms = 1000 * more_s / (REQUESTS_AT_ONCE - 1)
    return known.model_copy(update={"host_time": max(1000 * host_s - request_ms, 0.0), "host_request_time": request_ms})


def _known_request(number: int, at: float) -> TrafficRequest:
    return TrafficRequest(at=at, runs=((number, 64),), num_output_tokens=48)


def _median_tpot_s(answers: Sequence[Answer]) -> float:
    return statistics.median(one.tpot_s or 0.0 for one in answers)


# ---------------------------------------------------------------------------------------------------- the simulated one


def simulate(settings: SimulateSettings, requests: Sequence[TrafficRequest]) -> tuple[list[Answer], float]:
    (scenario,) = scenarios(settings)
    outcome = Fleet(fleet_options(settings, scenario)).run(requests)
    answers = []
    for one in outcome.requests:
        if one.failure or one.ttft_s is None:
            raise InternalError(f"a simulated request failed: {one.failure}")
        answers.append(Answer(one.ttft_s, one.e2e_s, one.num_output_tokens))
    return answers, outcome.seconds


def planned(settings: SimulateSettings, workload: str, seconds: float, load: float) -> list[TrafficRequest]:
    """Requests for some `seconds`, at a share of what the fleet can do: what it serves in a second if many come at
    once."""
    made = settings.model_copy(update={**WORKLOADS[workload], "seed": 1 + [*WORKLOADS].index(workload)})
    together = made.model_copy(
        update={"arrivals": "steady", "rate": 1e5, "requests": 64, "message_poll": 0.0, "leap": True}
    )
    rate = load * 64 / simulate(together, traffic(together))[1]
    return traffic(made.model_copy(update={"rate": rate, "requests": max(round(rate * seconds), 4)}))


# --------------------------------------------------------------------------------------------------------- the command


def fleet_of(text: str) -> dict[str, int]:
    """Flags of `1P1D`, `2B` and the like, which `baton up` and the simulator have in common."""
    parts = re.findall(r"(\d+)([PDB])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise ConfigError("--fleets", f"{text!r} is not like 1P1D or 2B")
    names = {"P": "prefill", "D": "decode", "B": "both"}
    return {"prefill": 0, "decode": 0, "both": 0} | {names[letter]: int(num) for num, letter in parts}


def kv_token_bytes(folder: Path, dtype: str) -> int:
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_heads = config.get("num_key_value_heads", config["num_attention_heads"])
    return int(2 * config["num_hidden_layers"] * num_heads * head_dim * (4 if dtype == "float32" else 2))


@contextlib.contextmanager
def profiled(args: argparse.Namespace, num_cores: int, num_workers: int) -> Iterator[str]:
    """A file of a model of time of this machine, on so many cores of a worker while the other workers' cores do the
    same. For as long, the stack's workers find it, too."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "baton", "profile", f"--minutes={args.minutes}", f"--model={args.model}"]
        command += [f"--dtype={args.dtype}", "--device=cpu", f"--cache-dir={args.cache_dir}"]
        profiles = []
        for number in range(num_workers):
            own = cores[number * num_cores : (number + 1) * num_cores]
            profiles.append(
                subprocess.Popen(
                    [*command, f"--out={folder}/{number}.json"],
                    stdout=subprocess.DEVNULL if number else None,
                    stderr=subprocess.DEVNULL if number else None,
                    preexec_fn=partial(os.sched_setaffinity, 0, own),
                )
            )
        try:
            has_failed = profiles[0].wait()  # it prints what it finds, and why if it fails
        finally:
            for profile in profiles:
                profile.terminate()
                profile.wait()
        if has_failed:
            raise SystemExit("there is no model of time; the reason is above")
        out = Path(folder) / "0.json"
        from engine.learning.key import model_file

        place = model_file(args.cache_dir, decode(out.read_bytes()).key)
        before = place.read_bytes() if place.exists() else None
        shutil.copyfile(out, place)
        try:
            yield str(out)
        finally:
            if before is None:
                place.unlink()
            else:
                place.write_bytes(before)


def measure(
    args: argparse.Namespace, fleet: str, times: str, kv_bytes: int
) -> tuple[SimulateSettings, dict[str, list[Row]]]:
    """How the fleet was simulated, and the figures of each workload."""
    numbers = fleet_of(fleet)
    settings = SimulateSettings.model_validate(
        {
            **numbers,
            "times": times,
            "policy": args.policy,
            "num_blocks": NUM_BLOCKS,
            "kv_token_bytes": kv_bytes,
            "max_model_len": MAX_MODEL_LEN,
            "bandwidth": args.bandwidth,
            "message_poll": 1000 * PIECE_S if args.device == "simulated" else 0.0,
        }
    )
    flags = [f"--{name}={num}" for name, num in numbers.items()]
    flags += [f"--num-blocks={NUM_BLOCKS}", f"--max-model-len={MAX_MODEL_LEN}", f"--policy={args.policy}"]
    flags += [f"--model={args.model}", f"--connector={args.connector}", f"--cache-dir={args.cache_dir}"]
    flags += [f"--device={args.device}"]
    flags += [f"--simulated-time={times}"] if args.device == "simulated" else [f"--dtype={args.dtype}"]
    found: dict[str, list[Row]] = {}
    with running_stack(flags) as address:
        settings = calibrated(address, settings)
        for workload in args.workloads.split(","):
            requests = planned(settings, workload, args.seconds, args.load)
            what = f"{fleet}, {workload}: {len(requests)} requests in {requests[-1].at:.0f} s"
            print(what, file=sys.stderr, flush=True)
            real = figures(*asyncio.run(send(address, requests, seed=[*WORKLOADS].index(workload))))
            simulated = figures(*simulate(settings, requests))
            found[workload] = [Row(name, value, simulated[name]) for name, value in real.items()]
    return settings, found


def show(title: str, found: Mapping[str, Sequence[Row]], console: Console) -> None:
    table = Table("workload", "figure", title=title)
    for column in ("real", "simulated", "error"):
        table.add_column(column, justify="right")
    for workload, rows in found.items():
        for row in rows:
            style = "" if abs(row.error) <= BAR else "red"
            table.add_row(
                workload, row.name, f"{row.real:.2f}", f"{row.simulated:.2f}", f"{row.error:+.1%}", style=style
            )
    console.print(table)
    num_good = sum(all(abs(row.error) <= BAR for row in rows) for rows in found.values())
    console.print(f"all figures within {BAR:.0%}: {num_good} of {len(found)} workloads")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "simulated"])
    parser.add_argument("--times", help="a file of baton profile, which is not run then; a data sheet's name, likewise")
    parser.add_argument("--minutes", type=float, default=2.0, help="that baton profile measures")
    parser.add_argument("--fleets", default="1P1D,2B,2P2D", help="1P1D: a prefill and a decode worker; 2B: two of both")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of those named in the source")
    parser.add_argument("--seconds", type=float, default=16.0, help="of each workload")
    parser.add_argument("--load", type=float, default=0.5, help="share of what the fleet can do")
    parser.add_argument("--policy", default="prefix_aware")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--connector", default="shared_storage")
    parser.add_argument("--bandwidth", type=float, default=1.0, help="GB/s at which the connector moves KV")
    parser.add_argument("--cache-dir", default=default_cache_dir())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := {*args.workloads.split(",")} - {*WORKLOADS}:
        parser.error(f"--workloads: {', '.join(sorted(unknown))}: they are {', '.join(WORKLOADS)}")
    console, results = Console(width=110), dict[str, object]()
    cores = sorted(os.sched_getaffinity(0))
    folder = Path(ensure_model(args.model, args.cache_dir, lambda line: print(line, file=sys.stderr)))
    kv_bytes = SIMULATED_KV_BYTES if args.device == "simulated" else kv_token_bytes(folder, args.dtype)
    console.print(f"{read_cpu().name}, {len(cores)} cores; --device {args.device}")
    profiles: dict[tuple[int, int], str] = {}  # by the cores of a worker, and the workers
    with contextlib.ExitStack() as made:
        for fleet in args.fleets.split(","):
            num_workers = sum(fleet_of(fleet).values())
            num_cores = max(len(cores) // num_workers, 1)
            if args.device == "cpu" and num_workers > len(cores):
                console.print(f"{fleet}: left out, as {num_workers} workers would share {len(cores)} cores")
                continue
            times = args.times or (
                next(iter(SHEETS)) if args.device == "simulated" else profiles.get((num_cores, num_workers))
            )
            if times is None:
                times = profiles[num_cores, num_workers] = made.enter_context(profiled(args, num_cores, num_workers))
            settings, found = measure(args, fleet, times, kv_bytes)
            host_ms, request_ms, message_ms = settings.host_time, settings.host_request_time, settings.message_latency
            between = f"{host_ms:.2f} ms between two steps and {request_ms:.2f} for each request"
            show(f"{fleet}; {between}, {message_ms:.2f} ms a message", found, console)
            results[fleet] = {
                "host_ms": host_ms,
                "host_request_ms": request_ms,
                "message_ms": message_ms,
                "workloads": {
                    workload: {row.name: {"real": row.real, "simulated": row.simulated} for row in rows}
                    for workload, rows in found.items()
                },
            }
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
