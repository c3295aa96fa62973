"""`baton router` as a process: its ready line, its signals, its exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

import grpc
import pytest

from common.grpc_options import LOSS_NOTICED_S
from protos.baton.v1 import inference_pb2, inference_pb2_grpc
from tests.router.fake_worker import ANSWER, FakeWorker

CODE = """
import sys
from common.config import RouterSettings
from router.server import main
sys.exit(main(RouterSettings(decode=sys.argv[1], http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0")))
"""
PATIENT = """
import router.fleet.registry
router.fleet.registry.RECONNECT_WAIT_S = 30.0  # the machine may be slow
"""
NO_TORCH = """
import sys
import router.server
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(worker: FakeWorker, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, worker.address, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        ready = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        assert ready[0] == "ready"
        fields = dict(word.split("=", 1) for word in ready[1:])
        assert fields["http"].startswith("http://127.0.0.1:")
        worker.delay_s = 0.03
        async with grpc.aio.insecure_channel(fields["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            responses = aiter(stub.Generate(inference_pb2.GenerateRequest(prompt="x")))
            text = (await anext(responses)).text
            process.send_signal(number)
            async for response in responses:
                text += response.text
        assert text == ANSWER
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_a_router_that_was_stopped_serves_at_once(worker: FakeWorker) -> None:
    """It has lost its workers meanwhile, and finds out when it goes on; a request that comes then waits for them."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PATIENT + CODE, worker.address, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        ready = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        address = dict(word.split("=", 1) for word in ready[1:])["grpc"]
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LOSS_NOTICED_S + 1.0)
        process.send_signal(signal.SIGCONT)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            responses = stub.Generate(inference_pb2.GenerateRequest(prompt="x"), timeout=60, wait_for_ready=True)
            assert "".join([response.text async for response in responses]) == ANSWER
    finally:
        process.kill()
        _, errors = await process.communicate()
    assert b"unreachable" in errors  # else the test tells nothing


async def test_a_router_needs_no_torch() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", NO_TORCH)
    assert await process.wait() == 0
