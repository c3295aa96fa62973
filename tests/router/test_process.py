"""`baton router` as a process: its ready line, its signals, its exit status."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc
import pytest

from common.grpc.options import LOSS_NOTICED_S
from protos.baton.v1 import inference_pb2, inference_pb2_grpc
from tests.router.processes.running import running
from tests.support.fake_worker import ANSWER, FakeWorker

PATIENT = """
import functools
import router.server
from router.fleet.patience import Patience
patience = Patience(reconnect_wait_s=30.0)  # the machine may be slow
router.server.serve = functools.partial(router.server.serve, patience=patience)
"""
NO_TORCH = """
import sys
import router.run
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(worker: FakeWorker, number: signal.Signals) -> None:
    async with running(processes=1, decode=[worker.address]) as router:
        assert router.url.startswith("http://127.0.0.1:")
        worker.delay_s = 0.03
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            responses = aiter(stub.Generate(inference_pb2.GenerateRequest(prompt="x")))
            text = (await anext(responses)).text
            router.process.send_signal(number)
            async for response in responses:
                text += response.text
        assert text == ANSWER
        assert await router.ended() == 0, router.errors.decode()
        assert b"Traceback" not in router.errors


@pytest.mark.slow
async def test_a_router_that_was_stopped_serves_at_once(worker: FakeWorker) -> None:
    """It has lost its workers meanwhile, and finds out when it goes on; a request that comes then waits for them."""
    async with running(PATIENT, processes=1, decode=[worker.address]) as router:
        router.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LOSS_NOTICED_S + 1.0)
        router.process.send_signal(signal.SIGCONT)
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            responses = stub.Generate(inference_pb2.GenerateRequest(prompt="x"), timeout=60, wait_for_ready=True)
            assert "".join([response.text async for response in responses]) == ANSWER
        router.process.kill()
        await router.ended()
        assert b"unreachable" in router.errors  # else the test tells nothing


@pytest.mark.slow
async def test_a_router_needs_no_torch() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", NO_TORCH)
    assert await process.wait() == 0
