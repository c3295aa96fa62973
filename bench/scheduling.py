"""What it costs to decide a step of 32 decodes, by each queue policy; and with requests that wait. And what it takes
`auto` to turn to slack when a request with targets comes to many without.

`python -m bench.scheduling`: CPU microseconds of one thread for each step, without the device.
"""

from __future__ import annotations

import time

from common.block_hash import root_hash
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.types import SampledToken
from engine.blocks.block_manager import BlockManager
from engine.remote_kv import WaitingRoom
from engine.request import Request
from engine.scheduling.schedule import SchedulerConfig
from engine.scheduling.scheduler import Scheduler
from engine.simulated.data_sheet import simulated_time

NUM_DECODES = 32
NUM_STEPS = 400
REPEATS = 7
STEP_S = 0.02
NUM_TURNED = 1000
TARGETS = LatencyTargets(1e6, 50.0)


def make_scheduler(policy: str, num_waiting: int, targets: LatencyTargets | None) -> Scheduler:
    """32 requests decode; `num_waiting` more have no place. Each has these targets."""
    blocks = BlockManager(8192, 16, root_hash("bench"))
    config = SchedulerConfig(
        max_num_seqs=NUM_DECODES,
        max_num_batched_tokens=2048,
        chunk_size=512,
        max_model_len=4096,
        eos_token_ids=frozenset(),
        queue_policy=policy,  # type: ignore[arg-type] # one of those below
    )
    model = simulated_time("xeon-135m").time
    scheduler = Scheduler(config, blocks, WaitingRoom(blocks), lambda: model)
    for number in range(NUM_DECODES + num_waiting):
        scheduler.add(
            make_request(number, targets),
        )
    return scheduler


def make_request(number: int, targets: LatencyTargets | None) -> Request:
    return Request(
        request_id=str(number),
        token_ids=[number] * 200,
        num_prompt_tokens=200,
        sampling_params=SamplingParams(max_tokens=10_000, ignore_eos=True),
        arrival_time=0.0,
        targets=targets,
    )


def step_us(policy: str, num_waiting: int, targets: LatencyTargets | None) -> float:
    """The least of some repeats: other work on the machine adds to the others."""
    best = float("inf")
    for _ in range(REPEATS):
        scheduler, now = make_scheduler(policy, num_waiting, targets), 0.0
        deciding_s = 0.0
        num_counted = 0
        while num_counted < NUM_STEPS:
            now += STEP_S
            begin = time.thread_time()
            output = scheduler.schedule(now)
            tokens = [
                [SampledToken(0)] if one.num_missing_tokens == num_new else []
                for one, num_new in output.num_tokens.items()
            ]
            scheduler.update(output, tokens)
            if len(scheduler.decodes) == len(output.num_tokens) == NUM_DECODES:
                deciding_s += time.thread_time() - begin
                num_counted += 1
        best = min(best, deciding_s / NUM_STEPS)
    return 1e6 * best


def turn_us(num_waiting: int) -> float:
    """The step in which the first request with targets is there, less one without it."""
    best = float("inf")
    for _ in range(REPEATS):
        scheduler, took_s = make_scheduler("auto", num_waiting, None), list[float]()
        for now in (STEP_S, 2 * STEP_S):
            begin = time.thread_time()
            output = scheduler.schedule(now)
            took_s.append(time.thread_time() - begin)
            scheduler.update(output, [[] for _ in output.num_tokens])
            if now == STEP_S:
                scheduler.add(make_request(10_000, TARGETS))
        best = min(best, took_s[1] - took_s[0])
    return 1e6 * best


def main() -> None:
    for num_waiting in (0, 100):
        for policy, targets in (
            ("fcfs", TARGETS),
            ("priority", TARGETS),
            ("slo", TARGETS),
            ("auto", TARGETS),
            ("auto", None),
        ):
            name = policy if targets is not None else f"{policy}, no targets"
            print(f"{name:16} {num_waiting:4} wait  {step_us(policy, num_waiting, targets):7.1f} us")
    print(f"auto turns to slack, {NUM_TURNED} wait  {turn_us(NUM_TURNED):7.1f} us")


if __name__ == "__main__":
    main()
