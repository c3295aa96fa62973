"""Files that a router of several processes is told of: certificates, keys, and settings that change."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.grpc.transport import name_options
from common.tls import TlsFiles
from protos.baton.v1 import inference_pb2, inference_pb2_grpc
from tests.kube.certificates import make_ca, make_leaf
from tests.router.processes.running import REQUEST, RunningProcesses, running, running_with_file, start
from tests.router.processes.test_processes import until
from tests.support.fake_worker import ANSWER, FakeWorker

pytestmark = pytest.mark.slow

NAME = "fleet.test"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_tls_keys_and_probes(tmp_path: Path, unused_port: int) -> None:
    make_ca(tmp_path, "ca")
    make_leaf(tmp_path, "leaf", "ca", "/CN=baton", f"DNS:{NAME},IP:127.0.0.1")
    cert, key, ca = (str(tmp_path / name) for name in ("leaf.crt", "leaf.key", "ca.crt"))
    keys = tmp_path / "keys"
    keys.write_text("sk-alice name=alice tenant=lab\n")
    worker = FakeWorker()
    await worker.start(tls=TlsFiles(cert, key, ca))
    probes = f"127.0.0.1:{unused_port}"
    files = {"tls_cert": cert, "tls_key": key, "tls_ca": ca, "api_keys_file": str(keys)}
    try:
        async with running(decode=[worker.address], tls_server_name=NAME, health_listen=probes, **files) as router:
            assert router.url.startswith("https://")
            trust = ssl.create_default_context(cafile=ca)
            trust.load_cert_chain(cert, key)
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=router.url, verify=trust, limits=limits, timeout=30) as client:
                for _ in range(6):  # whichever process is reached
                    assert (await client.post("/v1/completions", json=REQUEST)).status_code == 401
                    headers = {"Authorization": "Bearer sk-alice"}
                    answer = await client.post("/v1/completions", json=REQUEST, headers=headers)
                    assert answer.json()["choices"][0]["text"] == ANSWER
                page = (await client.get("/metrics")).text
                assert 'baton_router_unauthenticated_total{interface="rest"} 6.0' in page
            pem = [Path(path).read_bytes() for path in (ca, key, cert)]  # noqa: ASYNC240 (they are small)
            own = ("grpc.use_local_subchannel_pool", 1)
            for _ in range(4):
                options = [*name_options(NAME), own]
                async with grpc.aio.secure_channel(
                    router.grpc_address, grpc.ssl_channel_credentials(*pem), options
                ) as channel:
                    stub = inference_pb2_grpc.InferenceServiceStub(channel)
                    responses = stub.Generate(
                        inference_pb2.GenerateRequest(prompt="x"), metadata=[("authorization", "Bearer sk-alice")]
                    )
                    assert "".join([response.text async for response in responses]) == ANSWER
                async with grpc.aio.insecure_channel(probes, [own]) as channel:
                    health = health_pb2_grpc.HealthStub(channel)
                    status = await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
                    assert status.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await worker.stop()


async def test_changed_settings_reach_all(worker: FakeWorker, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("{max_running: 1, max_queued: 1}")
    async with running_with_file(path, worker.address, processes=2) as router:
        worker.delay_s = 0.01

        async def served(num: int) -> int:
            async with router.client() as client:
                asked = [client.post("/v1/completions", json=REQUEST) for _ in range(num)]
                return sum(answer.status_code == 200 for answer in await asyncio.gather(*asked))

        assert await served(6) == 2
        path.write_text("{max_running: 2, max_queued: 2, log_level: debug}")
        router.process.send_signal(signal.SIGHUP)
        await router.said(b"settings changed settings=log_level, max_queued, max_running", 2)
        assert await served(8) == 4
        # A file of no use keeps nobody from taking the place of a process that ended.
        path.write_text("max_running: none")
        os.kill(router.pids()[0], signal.SIGKILL)
        await router.said(b"the settings file cannot be used: the old ones stay")
        await until(router, "baton_router_process_restarts_total", 1)
        assert await served(8) >= 2
        router.process.terminate()
        assert await router.ended() == 0, router.errors.decode()
        assert b"Traceback" not in router.errors


async def test_signals_wait_until_a_process_has_handlers(worker: FakeWorker) -> None:
    """One that comes while Python starts neither ends it badly nor is lost."""
    process = await start(decode=[worker.address])
    try:
        router = RunningProcesses(process, "", "")
        async with asyncio.timeout(60):
            while len(router.pids()) < 2:  # noqa: ASYNC110 (of other processes)
                await asyncio.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
