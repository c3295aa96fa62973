"""CPU time of one routing decision, by the number of workers: `python -m bench.decisions [--policies prefix_aware]`.

A decision begins with the load of the two workers that the request before it went to, as in a router. Half of the
workers prefill. All of them have the first blocks of each prompt, three have more of it, and their loads differ. With
a latency target, the first token is due in time (a minute), or too soon for all (a millisecond).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from msgspec.structs import replace

from common.batch_time import BatchTime
from common.types import WorkerLoad, WorkerRole, WorkerState
from engine.simulated.data_sheet import simulated_time
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet
from router.fleet.prefix_index import PrefixIndex
from router.policy.base import FirstTokenTarget, RoutingRequest
from router.policy.registry import create_policy

BLOCK_SIZE = 16
PROMPT_BLOCKS = 64
COMMON_BLOCKS = 4  # that all workers have
NUM_PROMPTS = 20
WARM_UP = 50


def made_fleet(num_workers: int, times: Sequence[BatchTime | None], draw: random.Random) -> list[Endpoint]:
    return [
        Endpoint(
            worker_id=f"w{number}",
            role=WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE,
            address=f"10.0.{number // 256}.{number % 256}:9000",
            fingerprint="f",
            block_size=BLOCK_SIZE,
            batch_time=times[number % len(times)],
            state=WorkerState.READY,
            load=made_load(draw),
        )
        for number in range(num_workers)
    ]


def made_load(draw: random.Random) -> WorkerLoad:
    return WorkerLoad(
        num_requests_running=draw.randrange(16),
        num_requests_waiting=draw.randrange(3),
        num_blocks=10_000,
        num_free_blocks=draw.randrange(10_000),
        num_queued_prompt_tokens=(num_queued := draw.choice((0, draw.randrange(8000)))),
        num_queued_prompts=-(-num_queued // 1000),
    )


def microseconds(
    policy_name: str,
    num_workers: int,
    times: Sequence[BatchTime | None],
    num: int,
    first_token: FirstTokenTarget | None = None,
) -> tuple[float, float]:
    """CPU time of the decision, and of the look-up in the index before it: the least of `num`, which neighbours on the
    same cores disturb least."""
    draw = random.Random(num_workers)
    workers = made_fleet(num_workers, times, draw)
    common, index = draw.randbytes(16 * COMMON_BLOCKS), PrefixIndex()
    prompts = [common + draw.randbytes(16 * (PROMPT_BLOCKS - COMMON_BLOCKS)) for _ in range(NUM_PROMPTS)]
    for one in workers:
        index.reset(one.address)
        index.store(one.address, common)
    for prompt in prompts:
        for one in draw.sample(workers, min(3, num_workers)):
            index.store(one.address, prompt[: 16 * draw.randrange(COMMON_BLOCKS, PROMPT_BLOCKS + 1)])
    names = [[prompt[at : at + 16] for at in range(0, len(prompt), 16)] for prompt in prompts]
    fleet, policy = Fleet(workers), create_policy(policy_name)
    request = RoutingRequest(num_prompt_tokens=BLOCK_SIZE * PROMPT_BLOCKS + 9, fingerprint="f", first_token=first_token)
    changed: list[Endpoint] = []
    decisions, look_ups = [], []
    for number in range(WARM_UP + num):
        start = time.thread_time_ns()
        matched = index.match(names[number % NUM_PROMPTS], 0.0)
        middle = time.thread_time_ns()
        for one in changed:
            fleet.update(one)
        more = number * 37 % 900  # prompts differ in their length, so nothing is known from the one before
        asked = replace(
            request,
            cached_blocks=matched,
            session=f"s{number % 8}",
            num_prompt_tokens=request.num_prompt_tokens + more,
        )
        decision = policy.pick(asked, fleet)
        end = time.thread_time_ns()
        changed = [replace(one, load=made_load(draw)) for one in (decision.decode, *decision.prefill[:1])]
        look_ups.append((middle - start) / 1000)
        decisions.append((end - middle) / 1000)
    return min(decisions[WARM_UP:]), min(look_ups[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="prefix_aware,least_load,power_of_two,round_robin,session")
    parser.add_argument("--workers", default="2,32,128,1000")
    parser.add_argument("--requests", type=int, default=300)
    args = parser.parse_args()
    time_model = simulated_time("h100-8b").time
    sizes = [int(size) for size in args.workers.split(",")]
    print(f"{'µs of CPU':36}" + "".join(f"{size:>8}" for size in sizes))
    for name in args.policies.split(","):
        for unit, times, target in (
            ("tokens", [None], None),
            ("seconds", [time_model], None),
            ("seconds, in time", [time_model], FirstTokenTarget(60.0)),
            ("seconds, too late", [time_model], FirstTokenTarget(0.001)),
        ):
            found = [microseconds(name, size, times, args.requests, target) for size in sizes]
            print(f"{f'{name}, in {unit}':36}" + "".join(f"{decision:8.0f}" for decision, _ in found), flush=True)
    print(f"{'look-up of the blocks':36}" + "".join(f"{look_up:8.0f}" for _, look_up in found))


if __name__ == "__main__":
    main()
