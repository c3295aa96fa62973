"""A router before workers of both roles that take work of one of them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from baton.client.fleet import fleet_worker
from common.errors import IncompatibleError, InvalidArgumentError
from common.types import WorkerRole
from protos.baton.v1 import admin_pb2, inference_pb2, router_pb2, types_pb2, worker_pb2
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, reaches
from tests.router.test_admin import admin, failure
from tests.support.fake_worker import ANSWER, FakeWorker

PREFILL, DECODE, BOTH = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_BOTH


@pytest.fixture
async def workers(start_worker: StartWorker) -> tuple[FakeWorker, FakeWorker]:
    first, second = await start_worker(WorkerRole.BOTH), await start_worker(WorkerRole.BOTH)
    first.take(BOTH)
    second.take(BOTH)
    return first, second


@pytest.fixture
async def router(workers: tuple[FakeWorker, FakeWorker], start_router: StartRouter) -> RunningRouter:
    return await start_router(*workers, prefill=workers)


async def take(worker: FakeWorker, role: worker_pb2.WorkerRole.ValueType, router: RunningRouter) -> None:
    """Returns once the router knows."""
    worker.take(role)
    async with asyncio.timeout(20):
        while {one.address: one.takes for one in (await state(router)).workers}[worker.address] != role:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def state(router: RunningRouter) -> admin_pb2.GetStateResponse:
    return await admin(router).GetState(admin_pb2.GetStateRequest())


async def ask(router: RunningRouter, prompt: str = "a " * 9) -> tuple[str, types_pb2.RequestReport]:
    stream = router.inference.Generate(inference_pb2.GenerateRequest(prompt=prompt))
    responses = [one async for one in stream]
    return "".join(one.text for one in responses), responses[-1].report


async def test_requests_go_to_workers_that_take_them_and_prompts_to_the_others(
    workers: tuple[FakeWorker, FakeWorker], router: RunningRouter
) -> None:
    first, second = workers
    for prefilling, decoding in ((first, second), (second, first)):
        await take(decoding, DECODE, router)
        await take(prefilling, PREFILL, router)
        for number in range(3):
            text, report = await ask(router, f"{prefilling.address} {number} " * 4)
            assert (text, report.decode_worker) == (ANSWER, decoding.address)
            assert list(decoding.requests[-1].prefill_addresses) == [prefilling.address]
    told = {one.address: one for one in (await state(router)).workers}
    assert {one.role for one in told.values()} == {BOTH}
    assert (told[first.address].takes, told[first.address].num_role_shifts) == (DECODE, 2)
    fleet = (await router.fleet.GetFleet(router_pb2.GetFleetRequest())).workers
    assert {one.address: fleet_worker(one).takes for one in fleet} == {
        first.address: WorkerRole.DECODE,
        second.address: WorkerRole.PREFILL,
    }


async def test_if_no_worker_is_left_that_takes_requests_others_serve_them(
    workers: tuple[FakeWorker, FakeWorker], router: RunningRouter
) -> None:
    first, second = workers
    await take(first, PREFILL, router)
    second.hang_after = 2
    stream = asyncio.create_task(ask(router))
    await second.asked.wait()
    await second.stop()
    text, report = await stream
    assert (text, report.decode_worker) == (ANSWER, first.address)
    assert report.num_migrations + report.num_retries == 1
    await reaches("baton_router_endpoints", 1, role="prefill", state="ready")  # it has not changed its role
    assert (await ask(router))[0] == ANSWER


async def test_a_request_may_come_back_to_a_worker_that_handed_it_over(
    workers: tuple[FakeWorker, FakeWorker], router: RunningRouter
) -> None:
    """One that takes prompts alone is well: unlike one that drains it may be asked again when the other is lost."""
    first, second = workers
    await take(second, PREFILL, router)
    first.hang_after, first.offer_after, second.hang_after = 2, 3, 2
    stream = asyncio.create_task(ask(router))
    await first.asked.wait()
    await take(second, DECODE, router)
    await take(first, PREFILL, router)
    first.hang_after = None
    await second.asked.wait()
    first.offer_after = None
    await second.stop()
    text, report = await stream
    assert text == ANSWER
    assert (report.num_handovers, report.num_migrations, report.decode_worker) == (1, 2, first.address)
    assert len(first.requests) == 2


async def test_an_answer_is_not_handed_over_to_a_worker_without_room(
    workers: tuple[FakeWorker, FakeWorker], router: RunningRouter
) -> None:
    """As long as nobody has room, the worker that took its prompt goes on decoding."""
    first, second = workers
    await take(second, PREFILL, router)
    first.hang_after, first.offer_after = 2, 3
    stream = asyncio.create_task(ask(router))
    await first.asked.wait()
    second.change(load={**second.load, "room_after": [500]})
    await take(second, DECODE, router)
    await take(first, PREFILL, router)
    first.hang_after = None
    text, report = await stream
    assert (text, report.num_handovers, report.decode_worker) == (ANSWER, 0, first.address)


async def test_operators_pin_roles(workers: tuple[FakeWorker, FakeWorker], router: RunningRouter) -> None:
    first, second = workers
    only = admin_pb2.Target(worker=first.address)
    done = await admin(router).SetRole(admin_pb2.SetRoleRequest(target=only, role=PREFILL))
    assert [(one.address, one.error, one.num_running) for one in done.results] == [(first.address, "", 1)]
    assert first.orders == [
        worker_pb2.SetWorkerRoleRequest(
            role=PREFILL, pin=worker_pb2.SetWorkerRoleRequest.PIN_SET, reason="an operator's order"
        )
    ]
    await take(first, PREFILL, router)
    for target in (admin_pb2.Target(all_workers=True), admin_pb2.Target(worker=second.address)):
        error = await failure(admin(router).SetRole(admin_pb2.SetRoleRequest(target=target, role=PREFILL)))
        assert isinstance(error, IncompatibleError)  # nobody would take requests
    assert not second.orders
    await admin(router).SetRole(admin_pb2.SetRoleRequest(target=admin_pb2.Target(all_workers=True)))
    cleared = worker_pb2.SetWorkerRoleRequest.PIN_CLEARED
    orders = [order for one in workers if isinstance(order := one.orders[-1], worker_pb2.SetWorkerRoleRequest)]
    assert [(order.role, order.pin) for order in orders] == [(BOTH, cleared)] * 2
    for wrong, field in (
        (admin_pb2.SetRoleRequest(target=only, role=cast("worker_pb2.WorkerRole.ValueType", 9)), "role"),
        (admin_pb2.SetRoleRequest(role=DECODE), "target"),
        (admin_pb2.SetRoleRequest(target=admin_pb2.Target(router=True), role=DECODE), "target.router"),
    ):
        error = await failure(admin(router).SetRole(wrong))
        assert (type(error), error.field) == (InvalidArgumentError, field)
