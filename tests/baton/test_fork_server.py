"""A stack's side of a worker that is a fork."""

from __future__ import annotations

import io
from typing import cast

from baton.stack.fork_server import ForkedProcess, ForkServer


class Reaped:
    """Notes which processes it is asked to reap."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def reap(self, pid: int) -> None:
        self.pids.append(pid)


def test_a_process_is_reaped_once_however_often_its_code_is_asked_for() -> None:
    """Its pid may be another process's after that."""
    server = Reaped()
    process = ForkedProcess(cast("ForkServer", server), 7, io.BytesIO(), io.BytesIO())
    assert process.poll() is None
    process.ended(3)
    assert [process.poll(), process.poll(), process.wait()] == [3, 3, 3]
    assert server.pids == [7]
