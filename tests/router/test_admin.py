"""`AdminService` of a router before fake workers: what its orders do, who may give them, and what is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.cli.main import main
from baton.client.admin import Admin, AsyncAdmin, Target
from baton.client.async_client import AsyncClient
from common.errors import (
    AbortedError,
    BatonError,
    ForbiddenError,
    IncompatibleError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from common.grpc.status import error_of_call
from protos.baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, router_pb2, worker_pb2
from router.api.audit_log import is_local
from tests.abuse.mutate import message_of, mutated
from tests.each_case import each_case
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, reaches, sample
from tests.support.fake_worker import ANSWER, FakeWorker

ALL_WORKERS = admin_pb2.Target(all_workers=True)
ROUTER = admin_pb2.Target(router=True)


def admin(router: RunningRouter) -> admin_pb2_grpc.AdminServiceAsyncStub:
    return admin_pb2_grpc.AdminServiceStub(router.channel)


def only(worker: FakeWorker) -> admin_pb2.Target:
    return admin_pb2.Target(worker=worker.address)


async def failure(call: Awaitable[object]) -> BatonError:
    """What the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    return error_of_call(error.code().name, error.details() or "", error.trailing_metadata())


async def texts(router: RunningRouter, **fields: Any) -> str:
    stream = router.inference.Generate(inference_pb2.GenerateRequest(prompt="a", **fields))
    return "".join([one.text async for one in stream])


@pytest.fixture
def log_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


Told = Callable[[int], Awaitable[list[dict[str, Any]]]]


@pytest.fixture
def orders(caplog: pytest.LogCaptureFixture, log_level: None) -> Told:
    """Lines of the audit log, as soon as there are so many. Other lines of a router are not shown."""
    logging.getLogger().setLevel(logging.ERROR)

    async def told(number: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(20):
            while True:  # a line comes after the answer
                found = [vars(one) for one in caplog.records if one.getMessage().startswith("order")]
                if len(found) >= number:
                    return found
                await asyncio.sleep(0.005)

    return told


# ------------------------------------------------------------------------------------------------------- workers


async def test_workers_are_paused_and_resumed(start_worker: StartWorker, start_router: StartRouter) -> None:
    """One or all. A router sends them nothing meanwhile, and says what each of them is."""
    one, other = await start_worker(), await start_worker()
    router = await start_router(one, other)
    done = await admin(router).Pause(admin_pb2.PauseRequest(target=only(one)))
    assert [(it.address, it.error, it.num_running) for it in done.results] == [(one.address, "", 2)]
    await reaches("baton_router_endpoints", 1, role="decode", state="paused")
    for _ in range(4):
        assert await texts(router) == ANSWER
    assert (len(one.requests), len(other.requests)) == (0, 4)
    state = await admin(router).GetState(admin_pb2.GetStateRequest())
    told = {it.address: (it.role, it.state) for it in state.workers}
    assert told == {
        one.address: (worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_STATE_PAUSED),
        other.address: (worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_STATE_READY),
    }
    await admin(router).Pause(admin_pb2.PauseRequest(target=ALL_WORKERS))
    await reaches("baton_router_endpoints", 2, role="decode", state="paused")
    assert "paused" in (await failure(texts(router))).message
    done = await admin(router).Resume(admin_pb2.ResumeRequest(target=ALL_WORKERS))
    assert {it.address for it in done.results} == {one.address, other.address}
    await reaches("baton_router_endpoints", 2, role="decode", state="ready")
    assert await texts(router) == ANSWER


async def test_orders_by_the_async_client(router: RunningRouter, worker: FakeWorker) -> None:
    async with AsyncClient(router.grpc_address) as client:
        orders = client.admin
        (paused,) = await orders.pause(Target(worker=worker.address))
        assert (paused.address, paused.error) == (worker.address, "")
        await orders.resume(Target(all_workers=True))
        (flushed,) = await orders.flush_cache(Target(all_workers=True))
        assert (flushed.num_device_blocks, flushed.num_host_blocks) == (5, 3)
        assert [one.error for one in await orders.set_log_level("info", Target(router=True))] == [""]
        assert (await orders.state()).router.log_level == "info"
        assert await orders.reload() == ()
        with pytest.raises(NotFoundError):
            await orders.abort("nobody")
        assert (await orders.profile_worker(worker.address, num_steps=3)).num_steps == 3
        with pytest.raises(NotFoundError):
            await orders.profile_worker("127.0.0.1:1")
        await orders.drain(worker.address, 2.5)
    assert worker.orders[-1] == worker_pb2.DrainRequest(timeout_s=2.5)


def test_both_clients_have_the_same_orders() -> None:
    sync, asynchronous = (
        {name: list(inspect.signature(method).parameters) for name, method in vars(one).items() if name[0] != "_"}
        for one in (Admin, AsyncAdmin)
    )
    assert sync == asynchronous


async def test_a_worker_drains(router: RunningRouter, worker: FakeWorker) -> None:
    await admin(router).DrainWorker(admin_pb2.DrainWorkerRequest(worker=worker.address, timeout_s=2.5))
    assert worker.orders == [worker_pb2.DrainRequest(timeout_s=2.5)]
    await reaches("baton_router_endpoints", 1, role="decode", state="draining")


async def test_caches_are_flushed_and_blocks_counted(start_worker: StartWorker, start_router: StartRouter) -> None:
    one, other = await start_worker(), await start_worker()
    router = await start_router(one, other)
    done = await admin(router).FlushCache(admin_pb2.FlushCacheRequest(target=ALL_WORKERS))
    assert [(it.num_device_blocks, it.num_host_blocks) for it in done.results] == [(5, 3)] * 2
    await admin(router).FlushCache(admin_pb2.FlushCacheRequest(target=only(one)))
    assert (len(one.orders), len(other.orders)) == (2, 1)


async def test_one_that_fails_leaves_others_alone(start_worker: StartWorker, start_router: StartRouter) -> None:
    """Orders for several say which failed. One for it alone fails with its own words and fields."""
    old, good = await start_worker(), await start_worker()
    router = await start_router(old, good)
    old.is_older = True
    done = await admin(router).Pause(admin_pb2.PauseRequest(target=admin_pb2.Target(all=True)))
    told = {it.address: it.error for it in done.results}
    assert told == {old.address: f"{old.address} is of a version that takes no such order", good.address: "", "": ""}
    error = await failure(admin(router).Pause(admin_pb2.PauseRequest(target=only(old))))
    assert isinstance(error, IncompatibleError)
    old.is_older, old.refuse = False, InvalidArgumentError("timeout_s", "is odd")
    error = await failure(admin(router).DrainWorker(admin_pb2.DrainWorkerRequest(worker=old.address, timeout_s=1)))
    assert (type(error), error.field) == (InvalidArgumentError, "timeout_s")
    assert error.reason == f"{old.address}: is odd"
    old.refuse = OverloadedError("no", 7.0)
    error = await failure(admin(router).FlushCache(admin_pb2.FlushCacheRequest(target=only(old))))
    assert (type(error), error.retry_after_s) == (OverloadedError, 7.0)
    await old.stop()
    error = await failure(admin(router).FlushCache(admin_pb2.FlushCacheRequest(target=only(old))))
    assert isinstance(error, UnavailableError)
    await admin(router).Resume(admin_pb2.ResumeRequest(target=ROUTER))


async def test_a_profile(router: RunningRouter, worker: FakeWorker) -> None:
    request = router_pb2.ProfileWorkerRequest(address=worker.address, profile=worker_pb2.ProfileRequest(num_steps=3))
    parts = [part async for part in admin(router).ProfileWorker(request)]
    assert b"".join(part.content for part in parts if part.file == "trace.json.gz") == b"a trace"
    assert parts[-1].num_steps == 3


# -------------------------------------------------------------------------------------------------------- router


async def test_a_paused_router_takes_nothing_and_what_runs_goes_on(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = 3
    running = asyncio.create_task(texts(router))
    await worker.asked.wait()
    done = await admin(router).Pause(admin_pb2.PauseRequest(target=ROUTER))
    assert [(it.address, it.error, it.num_running) for it in done.results] == [("", "", 1)]
    error = await failure(texts(router))
    assert (type(error), error.retry_after_s) == (UnavailableError, 5.0)
    assert "paused" in error.message
    assert sample("baton_router_paused") == 1
    assert (await admin(router).GetState(admin_pb2.GetStateRequest())).router.paused
    health = health_pb2_grpc.HealthStub(router.channel)
    for service, is_serving in (("", False), ("baton.v1.InferenceService", False), ("baton.v1.AdminService", True)):
        found = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert (found.status == health_pb2.HealthCheckResponse.SERVING) == is_serving, service
    async with httpx.AsyncClient(base_url=router.url) as client:
        told = await client.get("/health")
        assert told.status_code == 503
        assert "paused" in told.text
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    worker.hang_after = None
    assert await running == ANSWER
    await admin(router).Resume(admin_pb2.ResumeRequest(target=ROUTER))
    assert await texts(router) == ANSWER
    assert sample("baton_router_paused") == 0


async def test_log_levels(router: RunningRouter, worker: FakeWorker, log_level: None) -> None:
    target = admin_pb2.Target(all=True)
    for level, number in (("debug", logging.DEBUG), ("error", logging.ERROR)):
        done = await admin(router).SetLogLevel(admin_pb2.SetLogLevelRequest(target=target, level=level))
        assert [it.error for it in done.results] == ["", ""]
        assert logging.getLogger().level == number
        assert (await admin(router).GetState(admin_pb2.GetStateRequest())).router.log_level == level
    assert worker.orders[-1] == worker_pb2.SetWorkerLogLevelRequest(level="error")
    await admin(router).SetLogLevel(admin_pb2.SetLogLevelRequest(target=ROUTER, level="info"))
    assert len(worker.orders) == 2


async def test_files_are_read_again(worker: FakeWorker, start_router: StartRouter, tmp_path: Path) -> None:
    limits, keys = tmp_path / "limits.yaml", tmp_path / "keys"
    limits.write_text("default: {}")
    keys.write_text("sk-o name=o operator=true\n")
    router = await start_router(worker, limits_file=str(limits), api_keys_file=str(keys))

    async def reload() -> dict[str, admin_pb2.ReloadedFile]:
        metadata = (("authorization", "Bearer sk-o"),)
        done = await admin(router).Reload(admin_pb2.ReloadRequest(), metadata=metadata)
        return {one.what: one for one in done.files}

    first = await reload()
    assert {(one.what, one.path, one.error) for one in first.values()} == {
        ("limits", str(limits), ""),
        ("api_keys", str(keys), ""),
    }
    limits.write_text("default: {streams: none}")
    broken = await reload()
    assert "default.streams" in broken["limits"].error
    assert broken["limits"].read_at == first["limits"].read_at
    limits.unlink()
    assert (await reload())["limits"].error
    limits.write_text("default: {streams: 3}")
    mended = await reload()
    assert mended["limits"].error == ""
    assert mended["limits"].read_at > first["limits"].read_at
    assert mended["api_keys"] == first["api_keys"]


# -------------------------------------------------------------------------------------------------------- aborts


async def abort(router: RunningRouter, request_id: str) -> admin_pb2.AbortRequestResponse:
    return await admin(router).AbortRequest(admin_pb2.AbortRequestRequest(request_id=request_id))


@each_case("n", [1, 2])
async def test_an_answer_is_aborted(router: RunningRouter, worker: FakeWorker, n: int) -> None:
    """Its client gets the reason, and its worker is told. Nobody tries it again."""
    before = sample("baton_router_aborted_total")
    worker.hang_after, worker.asked = 2, asyncio.Event()
    worker.cancelled.clear()
    num_before = len(worker.requests)
    running = asyncio.create_task(texts(router, request_id="mine", choices=inference_pb2.Choices(n=n)))
    async with asyncio.timeout(20):
        while len(worker.requests) < num_before + n:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (await abort(router, "mine")).num_requests == 1
    error = await failure(running)
    assert (type(error), error.reason) == (AbortedError, "an operator ended this request")
    await asyncio.wait_for(worker.cancelled.wait(), 20)
    assert len(worker.requests) == num_before + n
    assert sample("baton_router_aborted_total") == before + 1
    assert isinstance(await failure(abort(router, "mine")), NotFoundError)
    worker.hang_after = None


async def test_aborted_requests_over_rest(router: RunningRouter, worker: FakeWorker) -> None:
    worker.hang_after = 2
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        body = {"prompt": "x", "request_id": "whole"}
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        await worker.asked.wait()
        assert (await abort(router, "whole")).num_requests == 1
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["param"]) == (499, "request_id")
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
            lines = streamed.aiter_lines()
            await anext(lines)
            assert (await abort(router, "whole")).num_requests == 1
            assert "an operator ended this request" in "".join([line async for line in lines])
        told = (await client.get("/requests/whole")).json()
        assert (told["status"], told["reason"]) == ("aborted", "request_id: an operator ended this request")


async def test_what_waits_is_aborted_too(worker: FakeWorker, start_router: StartRouter) -> None:
    """A request in the queue, whose worker never hears of it, and embeddings."""
    router = await start_router(worker, max_running=1)
    worker.hang_after = 2
    running = asyncio.create_task(texts(router, request_id="first"))
    await worker.asked.wait()
    waiting = asyncio.create_task(texts(router, request_id="second"))
    await reaches("baton_router_requests_queued", 1)
    assert (await abort(router, "second")).num_requests == 1
    assert isinstance(await failure(waiting), AbortedError)
    assert (await abort(router, "first")).num_requests == 1
    assert isinstance(await failure(running), AbortedError)
    worker.delay_s = 60.0
    embed = inference_pb2.EmbedRequest(request_id="third", inputs=[inference_pb2.EmbedInput(text="x")])
    embedding = asyncio.ensure_future(router.inference.Embed(embed))
    async with asyncio.timeout(20):
        while not worker.embedded:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (await abort(router, "third")).num_requests == 1
    assert isinstance(await failure(embedding), AbortedError)
    async with asyncio.timeout(20):
        while sample("baton_router_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_requests_of_other_routers_are_aborted_on_their_workers(
    start_worker: StartWorker, start_router: StartRouter
) -> None:
    one, other = await start_worker(), await start_worker()
    router = await start_router(one, other)
    one.num_abortable = 1
    done = await abort(router, "of-another")
    assert (done.num_requests, list(done.workers)) == (1, [one.address])
    assert other.orders == [worker_pb2.AbortWorkRequest(request_id="of-another")]
    one.num_abortable, other.is_older = 0, True
    error = await failure(abort(router, "of-nobody"))
    assert (type(error).__mro__[1], error.field) == (NotFoundError, "request_id")
    assert "1 did not" in error.reason


async def test_an_abort_by_another_router_is_not_tried_again(router: RunningRouter, worker: FakeWorker) -> None:
    worker.refuse = AbortedError("an operator ended this request")
    assert isinstance(await failure(texts(router)), AbortedError)
    assert len(worker.requests) == 1


# ------------------------------------------------------------------------------------------ who may, and what is told


async def test_operators_alone_and_all_is_told(
    worker: FakeWorker,
    start_router: StartRouter,
    tmp_path: Path,
    orders: Told,
) -> None:
    (tmp_path / "keys").write_text("sk-a name=alice\nsk-o name=ops operator=true\n")
    router = await start_router(worker, api_keys_file=str(tmp_path / "keys"))
    pause = admin_pb2.PauseRequest(target=only(worker))

    def call(key: str, request: admin_pb2.PauseRequest = pause, **more: str) -> grpc.aio.UnaryUnaryCall[Any, Any]:
        metadata = [("authorization", f"Bearer {key}"), *more.items()]
        return admin(router).Pause(request, metadata=[(name.replace("_", "-"), value) for name, value in metadata])

    assert isinstance(await failure(call("sk-a")), ForbiddenError)
    assert isinstance(await failure(call("sk-none")), UnauthenticatedError)
    assert worker.orders == []
    good = call("sk-o", x_request_id="my-order")
    await good
    assert dict(await good.trailing_metadata())["x-request-id"] == "my-order"
    bad = await failure(call("sk-o", admin_pb2.PauseRequest()))
    odd = await failure(call("sk-o", x_request_id="no spaces"))
    assert (bad.field, odd.field) == ("target", "x-request-id")
    forbidden, stranger, paused, wrong, refused = (await orders(5))[:5]
    assert (forbidden["client"], forbidden["status"], forbidden["call"]) == (
        "alice",
        "PERMISSION_DENIED",
        "baton.v1.AdminService.Pause",
    )
    assert "operator's key" in forbidden["reason"]
    assert forbidden["peer"].startswith("ipv4:127.0.0.1:")
    assert (stranger["msg"], stranger["status"]) == ("order refused: no known API key", "UNAUTHENTICATED")
    assert (paused["client"], paused["status"], paused["target"]) == ("ops", "OK", worker.address)
    assert paused["request_id"] == "my-order"
    assert (wrong["status"], len(wrong["request_id"])) == ("INVALID_ARGUMENT", 32)
    assert refused["status"] == "INVALID_ARGUMENT"


async def test_what_is_not_a_message_is_told_too(router: RunningRouter, orders: Told) -> None:
    call = router.channel.unary_unary("/baton.v1.AdminService/AbortRequest", bytes, bytes)
    assert isinstance(await failure(call(b"\xff\xff")), InvalidArgumentError)
    assert (await failure(call(b"\x0a\x01\xff"))).field == "request_id"
    first, second = await orders(2)
    assert (first["status"], second["status"]) == ("INVALID_ARGUMENT",) * 2


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("ipv4:127.0.0.1:4", True),
        ("ipv6:%5B::1%5D:4", True),
        ("ipv6:[::1]:4", True),
        ("unix:", True),
        ("ipv4:10.0.0.1:4", False),
        ("ipv4:12.7.0.1:4", False),
        ("ipv6:%5B::2%5D:4", False),
        ("", False),
    ],
)
def test_without_keys_this_machine_alone(peer: str, is_here: bool) -> None:
    assert is_local(peer) == is_here


async def test_others_are_refused_without_keys(
    router: RunningRouter, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.audit_log.is_local", lambda _peer: False)
    error = await failure(admin(router).Pause(admin_pb2.PauseRequest(target=only(worker))))
    assert isinstance(error, ForbiddenError)
    assert "api_keys_file" in error.message


@each_case(
    ("method", "request_", "field"),
    [
        ("Pause", admin_pb2.PauseRequest(), "target"),
        ("Pause", admin_pb2.PauseRequest(target=admin_pb2.Target(worker="")), "target.worker"),
        ("Pause", admin_pb2.PauseRequest(target=admin_pb2.Target(worker="10.0.0.1:1")), "target.worker"),
        ("Resume", admin_pb2.ResumeRequest(target=admin_pb2.Target(all=False)), "target.all"),
        ("FlushCache", admin_pb2.FlushCacheRequest(target=ROUTER), "target.router"),
        ("SetLogLevel", admin_pb2.SetLogLevelRequest(target=ROUTER, level="loud"), "level"),
        ("SetLogLevel", admin_pb2.SetLogLevelRequest(level="info"), "target"),
        ("DrainWorker", admin_pb2.DrainWorkerRequest(), "worker"),
        ("AbortRequest", admin_pb2.AbortRequestRequest(), "request_id"),
        ("AbortRequest", admin_pb2.AbortRequestRequest(request_id="x" * 10_000), "request_id"),
    ],
)
async def test_errors_name_the_field(router: RunningRouter, method: str, request_: Any, field: str) -> None:
    assert (await failure(getattr(admin(router), method)(request_))).field == field


async def test_nothing_that_is_sent_is_a_fault_here(router: RunningRouter, worker: FakeWorker) -> None:
    """Any fields, and bytes that are changed or cut."""
    rng, codes = random.Random(40), Counter[grpc.StatusCode]()
    service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    for method in service.methods:
        call = router.channel.unary_stream(f"/{service.full_name}/{method.name}", bytes, bytes)
        for _ in range(12):
            answers = call(mutated(rng, message_of(rng, method.input_type).SerializeToString()))
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in answers:
                    pass
            codes[await answers.code()] += 1
    ours = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
    assert not ours & codes.keys(), codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 10, codes
    await admin(router).Resume(admin_pb2.ResumeRequest(target=admin_pb2.Target(all=True)))
    await reaches("baton_router_endpoints", 1, role="decode", state="ready")
    assert await texts(router) == ANSWER


async def test_reflection_has_it(router: RunningRouter) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    answers = [one async for one in stub.ServerReflectionInfo(iter(asked))]
    names = {one.name for one in answers[0].list_services_response.service}
    assert "baton.v1.AdminService" in names


# --------------------------------------------------------------------------------------------------- command line


async def test_the_command(
    router: RunningRouter, worker: FakeWorker, capsys: pytest.CaptureFixture[str], log_level: None
) -> None:
    async def run(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["admin", *arguments, f"--router={router.grpc_address}"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    here = f"--worker={worker.address}"
    assert await run("pause", here) == (0, f"{worker.address}: paused, 2 go on\n", "")
    assert await run("resume", "--all") == (0, f"{worker.address}: takes work again\nrouter: takes work again\n", "")
    code, told, _ = await run("flush", "--all-workers", "--json")
    assert (code, '"num_device_blocks": 5' in told) == (0, True)
    assert (await run("log-level", "info", "--this-router"))[:2] == (0, "router: log level info\n")
    assert (await run("reload"))[:2] == (0, "the router has no files to read again\n")
    worker.num_abortable = 1
    assert (await run("abort", "some"))[:2] == (0, f"some: 1 ended on {worker.address}\n")
    code, told, _ = await run("state")
    assert (code, told.splitlines()[0]) == (0, "router: takes requests, 0 run, 1 process, log level info")
    assert told.splitlines()[1].startswith(f"{worker.address}: decode, ")
    worker.is_older = True
    code, told, errors = await run("pause", "--all-workers")
    assert (code, told) == (1, "")
    assert "takes no such order" in errors
    worker.is_older = False
    assert (await run("drain", here, "--seconds=3"))[0] == 0
    assert worker.orders[-1] == worker_pb2.DrainRequest(timeout_s=3)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pause"], "whom pause is for"),
        (["pause", "--all", "--this-router"], "only one of them"),
        (["drain", "--all-workers"], "--all-workers: is not for drain"),
        (["flush", "--this-router"], "--this-router: is not for flush"),
        (["abort"], "WHAT: is missing"),
        (["pause", "x", "--all"], "WHAT: is for"),
        (["reload", "--all"], "--all: is not for reload"),
        (["pause", "--all", "--seconds=2"], "--seconds: is for"),
        (["pause", "--all", "--steps=2"], "--steps: is for profile"),
        (["dance"], "dance"),
    ],
)
def test_the_command_asked_wrongly(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", *arguments]) == 2
    assert line in capsys.readouterr().err
