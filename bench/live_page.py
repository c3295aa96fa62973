"""What the live page costs a router: CPU time of one look at a fleet whose workers have all changed, for ten viewers.

    python -m bench.live_page --workers 100 500

The workers are made, not connected: what it takes to hear of their loads is not part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from dataclasses import dataclass

from common.config import RouterSettings
from common.types import WorkerLoad, WorkerState
from protos.baton.v1 import worker_pb2
from router.api.ui.live import LOOK_S, Live
from router.api.worker_views import WorkerViews
from router.fleet.registry import Registry
from router.limits.quotas import Quotas
from router.make_gateway import make_gateway
from router.processes.router_process import RouterProcess
from router.running.threads import TextThreads

NUM_VIEWERS = 10
NUM_LOOKS = 40


@dataclass(slots=True)
class Cost:
    look_ms: float  # CPU time
    look_bytes: float  # to each viewer
    full_bytes: int


async def measured(num_workers: int) -> Cost:
    settings = RouterSettings()
    process = RouterProcess(settings)
    addresses = [f"10.0.{number // 200}.{number % 200}:50052" for number in range(num_workers)]
    registry = Registry(addresses[: num_workers // 2], addresses[num_workers // 2 :])
    workers = list(registry._workers.values())
    for number, worker in enumerate(workers):
        worker.info = worker_pb2.WorkerInfo(worker_id=f"worker-{number}", epoch="e", model="m", device="cuda")
        worker.state = WorkerState.READY
    gateway = make_gateway(settings, registry, process, Quotas(None), TextThreads(), TextThreads(1))
    live = Live(gateway, registry, WorkerViews(registry, process))
    num_bytes = []

    async def view() -> None:
        async for part in live.parts():
            num_bytes.append(len(part))

    viewers = [asyncio.create_task(view()) for _ in range(NUM_VIEWERS)]
    await asyncio.sleep(0)
    spent_s = 0.0
    for number in range(NUM_LOOKS + 1):
        for worker in workers:
            worker.load = _load()
        begun_at = time.thread_time()
        await live.look()
        await asyncio.sleep(0)
        if number:  # the first one is whole
            spent_s += time.thread_time() - begun_at
        else:
            full_bytes = max(num_bytes)
            num_bytes.clear()
    for viewer in viewers:
        viewer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*viewers)
    await registry.close()
    return Cost(1000 * spent_s / NUM_LOOKS, sum(num_bytes) / NUM_VIEWERS / NUM_LOOKS, full_bytes)


def _load() -> WorkerLoad:
    return WorkerLoad(
        num_requests_running=random.randint(0, 50),
        num_requests_waiting=random.randint(0, 3),
        num_queued_prompt_tokens=random.randint(0, 9999),
        num_blocks=4000,
        num_free_blocks=random.randint(0, 2000),
        num_cached_blocks=random.randint(0, 2000),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 500])
    for num_workers in parser.parse_args().workers:
        cost = asyncio.run(measured(num_workers))
        print(
            f"{num_workers} workers, {NUM_VIEWERS} viewers: {cost.look_ms:.2f} ms of CPU a look, "
            f"{cost.look_ms / LOOK_S / 10:.2f} % of a core; {cost.look_bytes / 1000:.1f} kB a look to each viewer, "
            f"{cost.full_bytes / 1000:.0f} kB the whole state"
        )


if __name__ == "__main__":
    main()
