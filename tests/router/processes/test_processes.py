"""A router of two processes behind one port, with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from protos.baton.v1 import admin_pb2, admin_pb2_grpc, demand_pb2, demand_pb2_grpc, router_pb2, router_pb2_grpc
from tests.router.envoy import Envoy
from tests.router.processes.running import REQUEST, RunningProcesses, running, sockets, start
from tests.router.test_live_page import Page, events_of
from tests.support.fake_worker import FakeWorker

COMPLETIONS = "/v1/completions"


async def ask(client: httpx.AsyncClient) -> int:
    return (await client.post(COMPLETIONS, json=REQUEST)).status_code


async def stream(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """The status of an answer that has begun, and then the whole of what came."""
    async with client.stream("POST", COMPLETIONS, json={**REQUEST, "stream": True}) as response:
        yield str(response.status_code)
        yield (await response.aread()).decode()


async def begin(client: httpx.AsyncClient, num: int) -> tuple[list[AsyncIterator[str]], list[str]]:
    streams = [stream(client) for _ in range(num)]
    return streams, await asyncio.gather(*(anext(one) for one in streams))


async def until(router: RunningProcesses, name: str, value: float, **labels: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with suppress(httpx.TransportError):  # a process that was just killed had accepted the connection
                if await router.metric(name, **labels) == value:
                    return
            await asyncio.sleep(0.05)


THIS_ROUTER = admin_pb2.Target(router=True)


@contextlib.asynccontextmanager
async def admin_of(router: RunningProcesses) -> AsyncIterator[admin_pb2_grpc.AdminServiceAsyncStub]:
    """Over a connection of its own, which reaches either process."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(router.grpc_address, options) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def pause(router: RunningProcesses, *, is_paused: bool) -> None:
    async with admin_of(router) as admin:
        if is_paused:
            done = await admin.Pause(admin_pb2.PauseRequest(target=THIS_ROUTER))
        else:
            done = await admin.Resume(admin_pb2.ResumeRequest(target=THIS_ROUTER))
    assert [one.error for one in done.results] == [""]


async def orders_reach_both(router: RunningProcesses, worker: FakeWorker, client: httpx.AsyncClient) -> None:
    for is_paused in (True, False):
        await pause(router, is_paused=is_paused)
        assert {await ask(client) for _ in range(8)} == {503 if is_paused else 200}
        assert await router.metric("baton_router_paused") == is_paused
    for level in ("warning", "info"):
        async with admin_of(router) as admin:
            await admin.SetLogLevel(admin_pb2.SetLogLevelRequest(target=THIS_ROUTER, level=level))
        async with admin_of(router) as admin:
            state = (await admin.GetState(admin_pb2.GetStateRequest())).router
        assert (state.num_processes, state.log_level, state.paused) == (2, level, False)
    async with admin_of(router) as admin:
        (limits,) = (await admin.Reload(admin_pb2.ReloadRequest())).files
        assert (limits.what, limits.error) == ("limits", "")
    worker.hang_after = 1
    ids = [f"held-{number}" for number in range(6)]
    held = [asyncio.create_task(client.post(COMPLETIONS, json={**REQUEST, "request_id": one})) for one in ids]
    await until(router, "baton_router_endpoint_requests", len(ids))
    for one in ids:  # whichever process has it, and whichever is asked
        async with admin_of(router) as admin:
            done = await admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id=one))
            assert done.num_requests == 1
    assert {one.status_code for one in await asyncio.gather(*held)} == {499}
    worker.hang_after = None


async def choices_hold_in_both(router: RunningProcesses, address: str, client: httpx.AsyncClient) -> None:
    """What the endpoint picker of one process chooses, whichever gets the request."""
    body = json.dumps(REQUEST).encode()
    for _ in range(6):
        channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        envoy = Envoy(address, channel)
        told, response = await envoy.http(COMPLETIONS, body, client=client)
        assert response is not None
        assert response.status_code == 200
        assert told.endpoints == [f"127.0.0.1:{router.port}"]
        await envoy.close()
    assert await router.metric("baton_router_picked_requests_total", outcome="followed") == 6
    assert await router.metric("baton_router_picks_served_total", by="first") == 6


@pytest.mark.slow
async def test_two_processes_are_one_router(worker: FakeWorker, tmp_path: Path, unused_port: int) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {streams: 8}")
    picker = f"127.0.0.1:{unused_port}"
    settings: dict[str, Any] = {
        "decode": [worker.address],
        "limits_file": str(limits),
        "endpoint_picker_listen": picker,
    }
    async with running(**settings) as router, router.client() as client:
        pids = router.pids()
        assert len(pids) == 2
        # Connections reach both.
        before = [sockets(pid) for pid in pids]
        opened = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(40)]
        async with asyncio.timeout(20):
            while sum(sockets(pid) for pid in pids) < sum(before) + 40:  # noqa: ASYNC110 (of other processes)
                await asyncio.sleep(0.01)
        assert min(sockets(pid) - was for pid, was in zip(pids, before, strict=True)) > 4
        for _, writer in opened:
            writer.close()
        # Metrics, demand, decisions and the fleet are told as one's.
        assert [await ask(client) for _ in range(24)] == [200] * 24
        assert await router.metric("baton_router_requests_total", interface="rest", outcome="ok") == 24
        assert await router.metric("baton_router_request_seconds_count") == 24
        assert await router.metric("baton_router_request_seconds_bucket", le="+Inf") == 24
        assert await router.metric("baton_router_endpoints", state="ready") == 1
        assert await router.metric("process_cpu_seconds_total") > 0
        decisions = (await client.get("/decisions?limit=100")).json()["decisions"]
        assert len(decisions) == 24
        assert [one["time"] for one in decisions] == sorted((one["time"] for one in decisions), reverse=True)
        ended = (await client.get("/requests?limit=100")).json()["requests"]
        assert len(ended) == 24
        for one in (ended[0], ended[-1]):  # whichever process had it, and whichever is asked
            assert (await client.get(f"/requests/{one['request_id']}")).json() == one
        epochs = set()
        for _ in range(4):  # whichever process is reached
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(router.grpc_address, options=options) as channel:
                async with asyncio.timeout(10):
                    async for demand in demand_pb2_grpc.DemandServiceStub(channel).WatchDemand(
                        demand_pb2.WatchDemandRequest()
                    ):
                        epochs.add(demand.epoch)
                        if (demand.num_requests_total, demand.num_requests_running) == (24, 0):
                            break
                fleet = await router_pb2_grpc.RouterServiceStub(channel).GetFleet(router_pb2.GetFleetRequest())
                assert [(one.address, one.breaker) for one in fleet.workers] == [(worker.address, "closed")]
                assert fleet.workers[0].tokens_per_second > 0
        assert len(epochs) == 1
        await orders_reach_both(router, worker, client)
        await choices_hold_in_both(router, picker, client)
        # A limit is one for both.
        worker.delay_s = 0.05
        streams, statuses = await begin(client, 20)
        assert sorted(statuses) == ["200"] * 8 + ["429"] * 12
        assert await router.metric("baton_router_requests_running") == 8
        # The live page of either has the requests of both.
        async with client.stream("GET", "/ui/events") as answer:
            page = Page(events_of(answer))
            await page.until(
                lambda: (
                    len(page.running) == 8
                    and page.samples
                    and page.samples[-1]["requests"] >= 24  # the first samples are older
                    and page.workers[worker.address]["tokens_per_s"] > 0
                )
            )
        assert page.about["processes"] == 2
        # Both drain.
        router.process.send_signal(signal.SIGTERM)
        texts = await asyncio.gather(*(anext(one) for one in streams))
        assert sum("[DONE]" in text for text in texts) == 8
        assert await router.ended() == 0, router.errors.decode()
        assert b"Traceback" not in router.errors


@pytest.mark.slow
async def test_a_killed_process_is_replaced(worker: FakeWorker, tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {streams: 8}")
    async with running(decode=[worker.address], limits_file=str(limits)) as router, router.client() as client:
        assert [await ask(client) for _ in range(8)] == [200] * 8
        worker.delay_s = 0.2
        streams, statuses = await begin(client, 8)
        assert statuses == ["200"] * 8
        pids = router.pids()
        router.process.send_signal(signal.SIGUSR1)
        await router.said(b"least_severe=debug", 3)
        os.kill(pids[0], signal.SIGKILL)
        results = await asyncio.gather(*(anext(one) for one in streams), return_exceptions=True)
        num_cut = sum(isinstance(one, Exception) for one in results)
        assert num_cut < 8  # those of the other one ended well
        worker.delay_s = 0
        answered = 0
        for _ in range(20):  # the other one answers meanwhile
            answered += await ask(client) == 200
        assert answered == 20
        await until(router, "baton_router_process_restarts_total", 1)
        assert len(router.pids()) == 2
        assert pids[1] in router.pids()
        await router.said(b"a process of the router went away, starting another one")
        await router.said(b"least_severe=debug")  # of the new one
        router.process.send_signal(signal.SIGUSR1)
        await router.said(b"least_severe=info", 3)
        # What the dead one counted stays, and what it had in flight is free.
        assert await router.metric("baton_router_requests_total", outcome="ok") == 8 + (8 - num_cut) + 20
        assert await router.metric("baton_router_requests_running") == 0
        worker.delay_s = 0.02
        streams, statuses = await begin(client, 9)
        assert sorted(statuses) == ["200"] * 8 + ["429"]
        await asyncio.gather(*(anext(one) for one in streams))
        router.process.send_signal(signal.SIGTERM)
        assert await router.ended() == 0


@pytest.mark.slow
async def test_one_that_takes_the_place_of_another_keeps_what_was_ordered(worker: FakeWorker) -> None:
    async with running(decode=[worker.address]) as router, router.client() as client:
        await pause(router, is_paused=True)
        async with admin_of(router) as admin:
            await admin.SetLogLevel(admin_pb2.SetLogLevelRequest(target=THIS_ROUTER, level="debug"))
        await router.said(b"least_severe=debug", 3)
        os.kill(router.pids()[0], signal.SIGKILL)
        await until(router, "baton_router_process_restarts_total", 1)
        await router.said(b"least_severe=debug")  # of the new one
        assert {await ask(client) for _ in range(12)} == {503}
        await pause(router, is_paused=False)
        assert {await ask(client) for _ in range(12)} == {200}
        assert await router.metric("baton_router_paused") == 0


@pytest.mark.slow
async def test_a_process_that_ends_too_often_ends_the_router(worker: FakeWorker) -> None:
    rarely = "router.processes.parent.MAX_RESTARTS = 1; common.process.restarts.FIRST_DELAY_S = 0.01"
    async with running(rarely, decode=[worker.address]) as router:
        os.kill(router.pids()[-1], signal.SIGKILL)
        await until(router, "baton_router_process_restarts_total", 1)
        os.kill(router.pids()[-1], signal.SIGKILL)  # the one that took its place
        assert await router.ended() == 1
        assert b"StartupError: process " in router.errors
        assert b"of the router went away 2 times in 10 minutes: ended by SIGKILL" in router.errors


@pytest.mark.slow
async def test_a_taken_port_is_an_error(worker: FakeWorker) -> None:
    async with running(decode=[worker.address]) as router:
        for field, address in (("http_listen", f"127.0.0.1:{router.port}"), ("grpc_listen", router.grpc_address)):
            for processes in (1, 2):
                process = await start(decode=[worker.address], processes=processes, **{field: address})
                _, errors = await asyncio.wait_for(process.communicate(), 60)
                assert process.returncode == 1
                assert b"StartupError" in errors
                assert f"cannot listen on {address}".encode() in errors


@pytest.mark.slow
async def test_what_no_process_can_start_with_ends_the_router(worker: FakeWorker) -> None:
    process = await start(decode=[worker.address], limits_file="/nowhere")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"StartupError: limits_file: cannot read /nowhere" in errors


@pytest.mark.slow
async def test_the_queue_is_one(worker: FakeWorker) -> None:
    worker.delay_s = 0.03
    async with running(decode=[worker.address], max_running=3, max_queued=4) as router, router.client() as client:
        streams = [asyncio.create_task(ask(client)) for _ in range(12)]
        statuses = await asyncio.gather(*streams)
        assert sorted(statuses) == [200] * 7 + [429] * 5
        assert await router.metric("baton_router_refused_total", limit="queue") == 5
        assert await router.metric("baton_router_requests_queued") == 0


@pytest.mark.slow
async def test_a_process_that_hangs_is_killed_and_replaced(worker: FakeWorker) -> None:
    async with running(decode=[worker.address]) as router:
        stopped, other = router.pids()
        os.kill(stopped, signal.SIGSTOP)
        async with asyncio.timeout(60):
            while len(pids := router.pids()) != 2 or stopped in pids:  # noqa: ASYNC110 (of other processes)
                await asyncio.sleep(0.1)
        assert other in pids
        await until(router, "baton_router_process_restarts_total", 1)
        router.process.terminate()
        assert await router.ended() == 0
        assert b"gave no sign of life for 20 s" in router.errors


@pytest.mark.slow
async def test_a_process_that_hangs_before_it_listens_is_replaced(worker: FakeWorker) -> None:
    process = await start("router.processes.parent.START_BEATS = 15", decode=[worker.address])
    try:
        router = RunningProcesses(process, "", "")
        async with asyncio.timeout(60):
            while len(pids := router.pids()) < 2:  # noqa: ASYNC110 (of other processes)
                await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGSTOP)
        assert process.stdout is not None
        assert b"http=" in await asyncio.wait_for(process.stdout.readline(), 120), "all listen"
        assert pids[0] not in router.pids()
        process.terminate()
        assert await router.ended() == 0
        assert b"gave no sign of life for 15 s" in router.errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.slow
async def test_processes_end_with_their_parent(worker: FakeWorker) -> None:
    async with running(decode=[worker.address]) as router:
        pids = router.pids()
        router.process.kill()
        async with asyncio.timeout(20):
            while any(_lives(pid) for pid in pids):  # noqa: ASYNC110 (of other processes)
                await asyncio.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
