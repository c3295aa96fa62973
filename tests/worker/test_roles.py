"""A worker of both roles, and of which it takes work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.config import WorkerSettings
from common.errors import BatonError, ConfigError, IncompatibleError, InvalidArgumentError
from common.grpc.status import error_of_call
from common.types import WorkerRole
from protos.baton.v1 import worker_pb2
from tests.support.calls import received
from tests.support.fake_engine import Script, answer_to
from tests.worker.fronts import Front, front, read, request_of, until
from worker.role import RoleShifts

PROMPT = list(range(40))
PREFILL, DECODE, BOTH = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_BOTH
Order = worker_pb2.SetWorkerRoleRequest


@pytest.fixture
async def both(tmp_path: Path, fake_engines: None) -> AsyncIterator[Front]:
    async with front(WorkerRole.BOTH, tmp_path / "both", role_handover=0.0) as one:
        yield one


async def refusal(front: Front, **fields: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.worker.SetRole(Order(**fields))
    error = caught.value
    return error_of_call(error.code().name, error.details() or "", error.trailing_metadata())


async def test_what_it_takes_is_reported_at_once_and_nothing_is_refused_for_it(both: Front) -> None:
    load = await both.load()
    assert (load.role, load.num_role_shifts, load.role_pinned) == (BOTH, 0, False)
    reports = both.worker.WatchLoad(worker_pb2.WatchLoadRequest())
    await received(reports)
    done = await both.worker.SetRole(Order(role=PREFILL, epoch=load.epoch, num_role_shifts=0))
    assert (done.num_streams, done.num_role_shifts) == (0, 1)
    while (await received(reports)).role != PREFILL:
        pass
    reports.cancel()
    done = await both.worker.SetRole(Order(role=PREFILL))  # again changes nothing
    assert done.num_role_shifts == 1
    assert (await read(both.decode.Decode(request_of(PROMPT)))).token_ids == answer_to(PROMPT, 5)


async def test_answers_are_offered_elsewhere_while_it_takes_prompts_alone(both: Front) -> None:
    call = both.decode.Decode(request_of(PROMPT, script=Script(on_status=True)))
    await until(lambda: both.told("AddRequest"), "the engine has it")
    await both.load()  # which lets a token come
    await read(call, num_tokens=1)
    assert (await both.worker.SetRole(Order(role=PREFILL))).num_streams == 1
    async for event in call:
        if event.offers_handover:
            break
    await both.worker.SetRole(Order(role=BOTH))
    for _ in range(4):
        await both.load()
    assert (await read(call)).finish_reason  # nobody took it, so it ended here


async def test_an_operator_s_role_is_pinned(both: Front) -> None:
    await both.worker.SetRole(Order(role=DECODE, pin=Order.PIN_SET))
    load = await both.load()
    assert (load.role, load.role_pinned) == (DECODE, True)
    error = await refusal(both, role=PREFILL)
    assert isinstance(error, IncompatibleError)
    assert "pinned" in error.message
    await both.worker.SetRole(Order(role=BOTH, pin=Order.PIN_CLEARED))
    await both.worker.SetRole(Order(role=PREFILL))
    load = await both.load()
    assert (load.role, load.num_role_shifts, load.role_pinned) == (PREFILL, 3, False)


async def test_orders_that_were_decided_by_old_reports_are_refused(both: Front) -> None:
    epoch = (await both.load()).epoch
    await both.worker.SetRole(Order(role=PREFILL, epoch=epoch, num_role_shifts=0))
    for stale in ({"epoch": epoch, "num_role_shifts": 0}, {"epoch": "another", "num_role_shifts": 1}):
        assert isinstance(await refusal(both, role=DECODE, **stale), IncompatibleError)
    assert (await both.load()).role == PREFILL
    for wrong, field in (
        ({"role": 0}, "role"),
        ({"role": 9}, "role"),
        ({"role": DECODE, "pin": 9}, "pin"),
        ({"role": DECODE, "reason": "x" * 2000}, "reason"),
        ({"role": DECODE, "reason": "two\nlines"}, "reason"),
    ):
        error = await refusal(both, **wrong)
        assert (type(error), error.field) == (InvalidArgumentError, field)


async def test_a_worker_of_one_role_keeps_it(decode: Front) -> None:
    assert (await decode.load()).role == worker_pb2.WORKER_ROLE_UNSPECIFIED
    assert isinstance(await refusal(decode, role=PREFILL), IncompatibleError)
    await decode.worker.SetRole(Order(role=DECODE, pin=Order.PIN_SET))  # which it has
    assert not (await decode.load()).role_pinned


def test_settings_of_roles_are_for_workers_of_both() -> None:
    chosen = WorkerSettings(start_role="decode", pin_role=True)
    begun = RoleShifts(WorkerRole.BOTH, chosen, lambda: None)
    assert (begun.role, begun.is_pinned) == (WorkerRole.DECODE, True)
    with pytest.raises(ConfigError) as raised:
        RoleShifts(WorkerRole.PREFILL, chosen, lambda: None)
    assert raised.value.message.startswith("start_role")
