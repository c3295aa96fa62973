"""How a stack ends: SIGTERM lets streams finish, SIGKILL leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import BatonError, UnavailableError
from common.types import FinishReason
from tests.integration.stack import Stack, alive, wait_for

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def stack(model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, "--num-blocks=128", "--drain-timeout=200")
    try:
        yield stack
    finally:
        stack.process.kill()


def test_sigterm_in_mid_stream(stack: Stack) -> None:
    with stack.client() as client, ThreadPoolExecutor(1) as pool:
        answer = client.generate("Once upon a time", temperature=0.0, max_tokens=48, ignore_eos=True)
        next(iter(answer))
        ending = pool.submit(stack.process.popen.wait, 250)
        stack.process.popen.send_signal(signal.SIGTERM)
        result = answer.result()
        assert (len(result.token_ids), result.finish_reason) == (48, FinishReason.LENGTH)
        assert ending.result() == 0, stack.logs()
    wait_for("every process is gone", lambda: not alive(stack.family))  # their children notice it, and end
    with stack.client() as client, pytest.raises(UnavailableError):
        client.generate("x").result()


def test_sigkill(stack: Stack) -> None:
    assert len(stack.family) >= 5  # two workers with an engine each, and the router
    with stack.client() as client:
        answer = client.generate("Once upon a time", max_tokens=1000, ignore_eos=True)
        next(iter(answer))
        os.kill(stack.process.popen.pid, signal.SIGKILL)
        stack.process.popen.wait()
        with pytest.raises(BatonError):
            answer.result()
    wait_for("every process is gone", lambda: not alive(stack.family))
