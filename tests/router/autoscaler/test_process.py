"""The whole process on real sockets: workers and a router report, KEDA and people ask."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.config import AutoscalerSettings
from common.errors import InternalError
from common.tls import TlsFiles
from common.types import WorkerRole
from protos.baton.v1 import inference_pb2, worker_pb2
from protos.keda import externalscaler_pb2 as keda_pb2
from protos.keda import externalscaler_pb2_grpc as keda_grpc
from router.autoscaler.server import serve
from tests.kube.certificates import make_ca, make_leaf
from tests.router.conftest import StartRouter, StartWorker
from tests.support.calls import received
from tests.support.fake_worker import FakeWorker

WAIT_S = 30.0
FAST = {"http_listen": "127.0.0.1:0", "keda_listen": "127.0.0.1:0", "scale_up_delay": 0, "scale_down_delay": 0}


class Running:
    def __init__(self, addresses: dict[str, str], channel: grpc.aio.Channel) -> None:
        self.addresses = addresses
        self.keda = keda_grpc.ExternalScalerStub(channel)

    async def get(self, path: str) -> tuple[int, str]:
        def ask() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(self.addresses["http"] + path, timeout=WAIT_S) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        return await asyncio.to_thread(ask)

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first decisions that are `wanted`."""
        async with asyncio.timeout(WAIT_S):
            while True:
                code, text = await self.get("/decisions")
                if code == 200 and wanted(json.loads(text)):
                    found: dict[str, Any] = json.loads(text)
                    return found
                await asyncio.sleep(0.1)


@asynccontextmanager
async def autoscaler(**settings: object) -> AsyncIterator[Running]:
    ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(AutoscalerSettings.model_validate({**FAST, **settings}), ready.set_result, stop))
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)  # type: ignore[type-var]
    if task.done():
        task.result()
    addresses = await ready
    async with grpc.aio.insecure_channel(addresses["keda"]) as channel:
        try:
            yield Running(addresses, channel)
        finally:
            stop.set()
            await task


StartLoaded = Callable[[WorkerRole], Awaitable[FakeWorker]]


@pytest.fixture
async def start_loaded() -> AsyncIterator[StartLoaded]:
    async with AsyncExitStack() as stack:

        async def start(role: WorkerRole) -> FakeWorker:
            worker = FakeWorker(role)
            await worker.start()
            stack.push_async_callback(worker.stop)
            return worker

        yield start


def trigger(role: str, **metadata: str) -> keda_pb2.ScaledObjectRef:
    return keda_pb2.ScaledObjectRef(name="x", namespace="prod", scalerMetadata={"role": role, **metadata})


async def test_a_signal_shows_debug_lines(start_loaded: StartLoaded) -> None:
    before = logging.getLogger().level
    async with autoscaler(decode=((await start_loaded(WorkerRole.DECODE)).address,)):
        for level in (logging.DEBUG, before):
            os.kill(os.getpid(), signal.SIGUSR1)
            async with asyncio.timeout(WAIT_S):
                while logging.getLogger().level != level:  # noqa: ASYNC110 (a signal's effect cannot be awaited)
                    await asyncio.sleep(0.005)


async def test_each_role_follows_its_own_load(start_loaded: StartLoaded) -> None:
    prefill, decode = await start_loaded(WorkerRole.PREFILL), await start_loaded(WorkerRole.DECODE)
    async with autoscaler(prefill=(prefill.address,), decode=(decode.address,), target_queued_tokens=100) as running:
        await running.until(lambda d: d["decisions"]["decode"]["workers"] == 1)
        prefill.report(num_queued_prompt_tokens=450, num_free_blocks=100)
        found = await running.until(lambda d: d["decisions"]["prefill"]["desired"] == 5)
        assert found["decisions"]["decode"]["desired"] == 1
        assert found["signals"]["baton_prefill_queued_tokens"] == 450
        assert "450 queued prompt tokens" in found["decisions"]["prefill"]["reasons"][0]

        prefill.report(num_free_blocks=100)
        # Cached blocks belong to nobody; the other 70 are in use.
        decode.report(num_requests_running=100, num_requests_waiting=30, num_free_blocks=20, num_cached_blocks=10)
        found = await running.until(lambda d: d["decisions"]["decode"]["desired"] == 5)
        assert found["decisions"]["prefill"]["desired"] == 1
        assert found["signals"]["baton_decode_kv_usage"] == pytest.approx(0.7)

        request = keda_pb2.GetMetricsRequest(scaledObjectRef=trigger("decode"), metricName="requests")
        (value,) = (await running.keda.GetMetrics(request)).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == ("requests", 130, 130.0)
        code, text = await running.get("/metrics")
        assert code == 200
        assert 'baton_desired_replicas{role="decode"} 5.0' in text
        assert (await running.get("/healthz"))[0] == 200
        assert (await running.get("/readyz"))[0] == 200
        assert (await running.get("/nothing"))[0] == 404


async def test_a_worker_that_drains_counts_no_more(start_loaded: StartLoaded) -> None:
    first, second = await start_loaded(WorkerRole.DECODE), await start_loaded(WorkerRole.DECODE)
    first.report(num_requests_running=40, num_free_blocks=100)
    second.report(num_requests_running=10, num_free_blocks=100)
    async with autoscaler(decode=(first.address, second.address)) as running:
        await running.until(lambda d: d["signals"]["baton_decode_requests"] == 50)
        first.change(state=worker_pb2.WORKER_STATE_DRAINING)
        found = await running.until(lambda d: d["signals"]["baton_decode_requests"] == 10)
        assert found["decisions"]["decode"]["workers"] == 1


async def test_a_worker_that_falls_silent_changes_nothing(start_loaded: StartLoaded) -> None:
    worker = await start_loaded(WorkerRole.DECODE)
    worker.report(num_requests_running=100, num_free_blocks=100)
    async with autoscaler(decode=(worker.address,), target_requests=100) as running:
        await running.until(lambda d: d["signals"]["baton_decode_requests"] == 100)
        worker.change(silent=True)
        found = await running.until(lambda d: d["signals"]["baton_decode_requests"] == 0)
        assert found["decisions"]["decode"]["desired"] == 1
        assert any("silent" in reason for reason in found["decisions"]["decode"]["reasons"])


async def test_from_zero_when_a_request_waits_at_a_router(
    start_router: StartRouter, start_loaded: StartLoaded, start_worker: StartWorker
) -> None:
    later = FakeWorker(WorkerRole.DECODE)
    address = await later.start()
    await later.stop()  # its port is free again: nobody is there yet
    router = await start_router(worker_wait=WAIT_S, decode=(address,))
    zero = {"prefill_min": 0, "decode_min": 0, "idle_timeout": 0.5, "arrival_window": 1}
    async with autoscaler(routers=(router.grpc_address,), **zero) as running:
        await running.until(lambda d: d["decisions"]["decode"]["desired"] == 0)
        stream = running.keda.StreamIsActive(trigger("decode"))
        assert (await asyncio.wait_for(received(stream), WAIT_S)).result is False

        async def ask() -> str:
            params = {"max_tokens": 3, "temperature": 0}
            request = inference_pb2.GenerateRequest(prompt="Hello", sampling_params=params)  # type: ignore[arg-type]
            return "".join([response.text async for response in router.inference.Generate(request)])

        asking = asyncio.create_task(ask())
        assert (await asyncio.wait_for(received(stream), WAIT_S)).result is True
        assert (await running.keda.IsActive(trigger("prefill"))).result is True
        assert not asking.done()
        await later.start(address)  # what the cluster does about it
        try:
            assert await asyncio.wait_for(asking, WAIT_S)
            await running.until(lambda d: d["decisions"]["decode"]["desired"] == 0)
            assert (await asyncio.wait_for(received(stream), WAIT_S)).result is False
        finally:
            stream.cancel()
            await later.stop()


async def test_arrivals_at_routers_drive_prefill(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(await start_worker())
    async with autoscaler(
        routers=(router.grpc_address,), target_prefill_rate=1, arrival_window=3, decode_max=5
    ) as running:
        await running.until(lambda d: d["signals"].get("baton_prefill_arrival_tokens_per_second") == 0)
        params = {"max_tokens": 1}
        request = inference_pb2.GenerateRequest(prompt_token_ids=list(range(5, 55)), sampling_params=params)  # type: ignore[arg-type]
        async for _ in router.inference.Generate(request):
            pass
        found = await running.until(lambda d: d["decisions"]["prefill"]["desired"] > 5)
        assert "prompt tokens/s arrive" in found["decisions"]["prefill"]["reasons"][0]
        await running.until(lambda d: d["decisions"]["prefill"]["desired"] == 1)


async def test_advice_is_told_beside_what_is_decided(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(await start_worker())
    targets = {"planner": "advisory", "target_ttft_ms": 1000, "target_tpot_ms": 50, "prefill_min": 2}
    async with autoscaler(routers=(router.grpc_address,), **targets) as running:
        found = await running.until(lambda d: d["decisions"]["prefill"]["desired"] == 2)
        assert found["advice"]["prefill"]["desired"] == 2
        assert found["advice"]["decode"]["reasons"]
        _, text = await running.get("/metrics")
        assert 'baton_advised_replicas{role="prefill"} 2.0' in text


async def test_metric_specs_and_bad_triggers() -> None:
    async with autoscaler(target_kv_usage=0.6, target_requests=20) as running:
        specs = (await running.keda.GetMetricSpec(trigger("decode"))).metricSpecs
        assert [(one.metricName, one.targetSize, one.targetSizeFloat) for one in specs] == [
            ("kv_usage", 1, 0.6),
            ("requests", 20, 20.0),
        ]
        (spec,) = (await running.keda.GetMetricSpec(trigger("prefill", target="12.5"))).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("queued_tokens", 13, 12.5)
        (spec,) = (await running.keda.GetMetricSpec(trigger("prefill", metric="desired_replicas"))).metricSpecs
        assert (spec.metricName, spec.targetSizeFloat) == ("desired_replicas", 1.0)
        stream = running.keda.StreamMetricSpec(trigger("decode"))
        assert len((await asyncio.wait_for(received(stream), WAIT_S)).metricSpecs) == 2
        stream.cancel()
        for bad, field in (
            (trigger("neither"), "role"),
            (trigger("both", metric="requests"), "metric"),
            (trigger("decode", metric="speed"), "metric"),
            (trigger("decode", target="1"), "target"),
            (trigger("prefill", target="-1"), "target"),
            (trigger("prefill", target="many"), "target"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=field) as raised:
                await running.keda.GetMetricSpec(bad)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_while_nobody_knows_who_is_there_nothing_is_said() -> None:
    async with autoscaler(decode=("dns:///name.invalid:1",), routers=("127.0.0.1:1",)) as running:
        # A name that does not exist is an answer; one that nobody can resolve is none. Either is no reason to fail.
        code, _ = await running.get("/readyz")
        assert code in (200, 503)
        assert (await running.get("/healthz"))[0] == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_keda_needs_a_certificate_if_the_fleet_has_them(tmp_path: Path) -> None:
    """As its operator connects with what a TriggerAuthentication gives it; a worker is read with the same files."""
    make_ca(tmp_path, "ca")
    make_leaf(tmp_path, "tls", "ca", "/CN=baton", "DNS:fleet.test")
    names = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}
    files = {field: str(tmp_path / name) for field, name in names.items()}
    ca, cert, key = ((tmp_path / names[name]).read_bytes() for name in ("tls_ca", "tls_cert", "tls_key"))
    worker = FakeWorker(WorkerRole.DECODE)
    await worker.start(tls=TlsFiles(*files.values()))
    try:
        worker.report(num_free_blocks=60, num_requests_running=7)
        async with autoscaler(decode=(worker.address,), **files, tls_server_name="fleet.test") as running:
            await running.until(lambda d: d["signals"]["baton_decode_requests"] == 7)
            scaled = keda_pb2.ScaledObjectRef(name="d", namespace="n", scalerMetadata={"role": "decode"})
            for credentials, is_let_in in (
                (grpc.ssl_channel_credentials(ca, key, cert), True),
                (grpc.ssl_channel_credentials(ca), False),
            ):
                options = [("grpc.ssl_target_name_override", "fleet.test"), ("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.secure_channel(running.addresses["keda"], credentials, options) as channel:
                    ask = keda_grpc.ExternalScalerStub(channel).IsActive(scaled, timeout=WAIT_S)
                    if is_let_in:
                        assert (await ask).result
                    else:
                        with pytest.raises(grpc.aio.AioRpcError):
                            await ask
    finally:
        await worker.stop()


@pytest.mark.parametrize(
    ("broken_task", "name"),
    [
        ("server._decide", "decisions"),
        ("server.http.Server.run", "status page"),
        ("fleet_load._Followers.run", "follow the fleet"),
        ("fleet_load._keep_reading", "follow 127.0.0.1:1"),  # one worker, which would count as absent ever after
    ],
)
async def test_it_ends_with_a_task_that_it_stands_on(
    monkeypatch: pytest.MonkeyPatch, broken_task: str, name: str
) -> None:

    async def broken(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(f"router.autoscaler.{broken_task}", broken)
    settings = AutoscalerSettings.model_validate({**FAST, "decode": "127.0.0.1:1"})
    with pytest.raises(InternalError, match=f"the task '{name}' ended: ValueError: a defect"):
        await asyncio.wait_for(serve(settings), WAIT_S)
