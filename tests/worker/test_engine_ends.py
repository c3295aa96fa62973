"""An engine that dies, hangs or never starts, as its worker's clients see it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest

from common.errors import StartupError
from common.types import WorkerRole
from tests.integration.stack import alive
from tests.support.fake_engine import Script, answer_to
from tests.worker.fronts import Front, front, read, request_of

pytestmark = pytest.mark.usefixtures("fake_engines_on_their_own")

PROMPT = list(range(20))


async def test_a_dead_engine_ends_its_requests_and_its_worker(decode: Front) -> None:
    call = decode.decode.Decode(request_of(PROMPT, script=Script(stall_at=2)))
    assert (await read(call, num_tokens=2)).token_ids == answer_to(PROMPT, 2)
    os.kill(decode.engine_pid, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read(call)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "killed by signal 9" in (failed.value.details() or "")
    assert await decode.task == 1


async def test_an_engine_that_hangs_is_killed(tmp_path: Path) -> None:
    async with front(WorkerRole.DECODE, tmp_path, engine_timeout=3.0) as decode:
        call = decode.decode.Decode(request_of(PROMPT, script=Script(stall_at=2)))
        await read(call, num_tokens=2)
        os.kill(decode.engine_pid, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await read(call)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no sign of life for 3 s" in (failed.value.details() or "")
        assert await decode.task == 1
        assert not alive({decode.engine_pid})


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "fails").write_text("no such model")
    with pytest.raises(StartupError, match="no such model"):
        async with front(WorkerRole.DECODE, tmp_path):
            pass
