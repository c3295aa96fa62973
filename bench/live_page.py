"""What the live page costs a router: CPU time of one look at a fleet whose workers have all changed, for ten viewers.
And when a browser shows it.

    python -m bench.live_page --workers 100 500
    python -m bench.live_page --workers 100 500 --chromium chromium

The workers are made, not connected: what it takes to hear of their loads is not part of it. The second command loads
the page from a router's REST server into Chromium, with nothing in its cache, and asks it for its first contentful
paint and for when every worker was in the picture (wall clock, from the begin of the navigation).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.browser import Browser, browser
from common.config import RouterSettings
from common.types import WorkerLoad, WorkerState
from protos.baton.v1 import worker_pb2
from router.api.rest.app import make_app
from router.api.rest.http.listener import listen
from router.api.rest.http.protocol import Connections
from router.api.rest.http.web_server import WebServer
from router.api.ui.live import LOOK_S, Live
from router.api.ui.pages import PageFiles
from router.api.worker_views import WorkerViews
from router.fleet.registry import Registry
from router.fleet.worker import WorkerRecord
from router.limits.quotas import Quotas
from router.make_gateway import make_gateway
from router.processes.router_process import RouterProcess
from router.running.threads import TextThreads
from router.serving.gateway import Gateway

NUM_VIEWERS = 10
NUM_LOOKS = 40
NUM_LOADS = 7  # of the page
SHOWN = """new Promise((done) => {
  const look = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    if (paint && document.querySelectorAll("#picture .w").length === NUMBER) done([paint.startTime, performance.now()]);
    else requestAnimationFrame(look);
  };
  look();
})"""


@dataclass(slots=True)
class Cost:
    look_ms: float  # CPU time
    look_bytes: float  # to each viewer
    full_bytes: int


@dataclass(slots=True)
class Made:
    """A router's page of workers that are not there."""

    live: Live
    gateway: Gateway
    workers: list[WorkerRecord]

    def change(self) -> None:
        for worker in self.workers:
            worker.load = _load()


@asynccontextmanager
async def made(num_workers: int) -> AsyncIterator[Made]:
    settings = RouterSettings()
    process = RouterProcess(settings)
    addresses = [f"10.0.{number // 200}.{number % 200}:50052" for number in range(num_workers)]
    registry = Registry(addresses[: num_workers // 2], addresses[num_workers // 2 :])
    workers = list(registry._workers.values())
    for number, worker in enumerate(workers):
        worker.info = worker_pb2.WorkerInfo(worker_id=f"worker-{number}", epoch="e", model="m", device="cuda")
        worker.state = WorkerState.READY
    gateway = make_gateway(settings, registry, process, Quotas(None), TextThreads(), TextThreads(1))
    try:
        yield Made(Live(gateway, registry, WorkerViews(registry, process)), gateway, workers)
    finally:
        await registry.close()


async def cost_of(page: Made) -> Cost:
    live = page.live
    num_bytes = []

    async def view() -> None:
        async for part in live.parts():
            num_bytes.append(len(part))

    viewers = [asyncio.create_task(view()) for _ in range(NUM_VIEWERS)]
    await asyncio.sleep(0)
    spent_s = 0.0
    for number in range(NUM_LOOKS + 1):
        page.change()
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


async def first_pictures(page: Made, chromium: Browser) -> list[tuple[float, float]]:
    """Of each load of the page, milliseconds to the first contentful paint and until all workers are in the picture."""
    with contextlib.closing(listen("127.0.0.1:0")) as listener:
        app = PageFiles(make_app(page.gateway, "", page.live))
        web = WebServer(listener, app, Connections(100, 30.0))
        tasks = [asyncio.create_task(one) for one in (web.run(), page.live.run(), _change_often(page))]
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/ui/"
        times = []
        for _ in range(NUM_LOADS):
            async with chromium.tab() as session:
                await chromium.call("Page.navigate", {"url": url}, session)
                found = await chromium.value(SHOWN.replace("NUMBER", json.dumps(len(page.workers))), session)
                assert isinstance(found, list)
                times.append((float(found[0]), float(found[1])))
        web.stop()
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return times


async def _change_often(page: Made) -> None:
    while True:
        page.change()
        await asyncio.sleep(LOOK_S)


async def told(num_workers: int, chromium: str | None) -> str:
    async with made(num_workers) as page:
        if chromium is not None:
            async with browser(chromium) as opened:
                paints, pictures = zip(*await first_pictures(page, opened), strict=True)
            return (
                f"{num_workers} workers: first contentful paint after {_spread(paints)}, all workers in the picture "
                f"after {_spread(pictures)}; medians of {NUM_LOADS} loads, the least and the most"
            )
        cost = await cost_of(page)
    return (
        f"{num_workers} workers, {NUM_VIEWERS} viewers: {cost.look_ms:.2f} ms of CPU a look, "
        f"{cost.look_ms / LOOK_S / 10:.2f} % of a core; {cost.look_bytes / 1000:.1f} kB a look to each viewer, "
        f"{cost.full_bytes / 1000:.0f} kB the whole state"
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ms ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--chromium", metavar="COMMAND", help="measure when it shows the page, instead of the cost")
    given = parser.parse_args()
    for num_workers in given.workers:
        print(asyncio.run(told(num_workers, given.chromium)))


if __name__ == "__main__":
    main()
