"""Several routers on the same workers: none knows of the others, and what workers report spreads the load.

Real registries and real workers' reports; the requests only stand there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from common.types import WorkerRole, WorkerState
from router.fleet.patience import Patience
from router.fleet.registry import Registry
from router.policy.base import RoutingRequest
from router.policy.registry import create_policy
from tests.support.fake_worker import FakeWorker

NUM_ROUTERS = 3
REQUEST = RoutingRequest(num_prompt_tokens=10, fingerprint="f1")
PATIENT = Patience(silence_s=600.0)  # a worker that does not report is there all the same


@dataclass(slots=True)
class Router:
    registry: Registry
    policy: object = field(default_factory=lambda: create_policy("least_load"))


@dataclass(slots=True)
class Fleet:
    workers: dict[str, FakeWorker]
    routers: list[Router]
    are_told: bool  # of the workers' load
    running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def send(self, router: Router, num: int) -> None:
        """So many requests at once."""
        for _ in range(num):
            decision = router.policy.pick(REQUEST, router.registry.endpoints())  # type: ignore[attr-defined]
            self.running.enter_context(router.registry.sending({decision.decode.address: REQUEST.num_prompt_tokens}))
            worker = self.workers[decision.decode.address]
            worker.num_requests_running += 1
            self.running.callback(setattr, worker, "num_requests_running", 0)

    async def report(self) -> None:
        """Returns once every router has seen what runs now."""
        if self.are_told:
            for worker in self.workers.values():
                worker.change()
            async with asyncio.timeout(20):
                while not all(self._is_seen(router) for router in self.routers):  # noqa: ASYNC110 (it tells nobody)
                    await asyncio.sleep(0.002)

    def _is_seen(self, router: Router) -> bool:
        return all(
            endpoint.state is WorkerState.READY
            and endpoint.load.num_requests_running == self.workers[endpoint.address].num_requests_running
            for endpoint in router.registry.endpoints()
        )

    async def end_all(self) -> None:
        self.running.close()
        await self.report()

    def loads(self) -> list[int]:
        return sorted((worker.num_requests_running for worker in self.workers.values()), reverse=True)


@contextlib.asynccontextmanager
async def fleet(num_workers: int, *, are_told: bool) -> AsyncIterator[Fleet]:
    workers = [FakeWorker(WorkerRole.DECODE) for _ in range(num_workers)]
    addresses = [await worker.start() for worker in workers]
    routers = [Router(Registry([], addresses, patience=PATIENT)) for _ in range(NUM_ROUTERS)]
    found = Fleet(dict(zip(addresses, workers, strict=True)), routers, True)
    try:
        for router in routers:
            router.registry.start()
        await found.report()
        found.are_told = are_told
        for worker in workers:
            worker.silent = not are_told
        yield found
    finally:
        for router in routers:
            await router.registry.close()
        for worker in workers:
            await worker.stop()


@pytest.mark.parametrize(("are_told", "longest_queue"), [(True, 1), (False, 3)])
async def test_requests_of_different_routers_do_not_meet_on_one_worker(are_told: bool, longest_queue: int) -> None:
    """Three routers with two requests each, eight workers. Without reports each takes the worker that is first for it,
    which is the same one for all, while others have nothing to do."""
    async with fleet(8, are_told=are_told) as found:
        for _ in range(4):
            for router in found.routers:
                found.send(router, 2)
                await found.report()
            assert sum(found.loads()) == 2 * NUM_ROUTERS
            assert found.loads()[0] == longest_queue
            await found.end_all()


async def test_a_burst_at_all_routers_at_once_spreads_evenly() -> None:
    """No report comes in the middle of it: what each router has sent itself is enough."""
    async with fleet(4, are_told=True) as found:
        for router in found.routers:
            found.send(router, 40)
        assert found.loads() == [30, 30, 30, 30]


async def test_a_burst_at_one_router_goes_round_what_the_others_do() -> None:
    async with fleet(4, are_told=True) as found:
        found.send(found.routers[0], 2)  # to the first two workers
        await found.report()
        found.send(found.routers[1], 6)
        assert found.loads() == [2, 2, 2, 2]  # 3, 3, 1, 1 without reports
