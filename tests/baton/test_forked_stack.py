"""A stack whose workers are forks, while the process that forks them imports, and if it cannot fork."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator

import pytest

from baton.stack.fork_messages import Imported, encode
from baton.stack.local_stack import Addresses, Forks, Stack
from baton.stack.processes import Signalled
from common.errors import StartupError

READY = "print('ready http=http://h:2 grpc=h:3', flush=True); import time; time.sleep(600)"
SLOW = "import time; time.sleep(600)"
UNABLE = f"import socket, sys; socket.socket(fileno=int(sys.argv[1])).send({encode(Imported('no forks today'))!r})"
ENDS = ""


@pytest.fixture
def stacks() -> Iterator[list[Stack]]:
    made: list[Stack] = []
    yield made
    for one in made:
        one.kill()


def stack_of(fork_server: str, stacks: list[Stack], start_timeout: float = 60.0) -> Stack:
    commands = {name: [sys.executable, "-c", READY] for name in ("decode-1", "decode-2", "router")}
    forks = Forks(frozenset({"decode-1", "decode-2"}), [sys.executable, "-c", fork_server])
    stacks.append(Stack(commands, 5.0, start_timeout, forks=forks))
    return stacks[-1]


def test_a_signal_ends_the_wait_for_imports(stacks: list[Stack]) -> None:
    stack = stack_of(SLOW, stacks)
    stack.events.put(Signalled(signal.SIGINT))
    assert stack.start() == Signalled(signal.SIGINT)


def test_the_wait_for_imports_ends_with_the_start_timeout(stacks: list[Stack]) -> None:
    stack = stack_of(SLOW, stacks, start_timeout=0.1)
    with pytest.raises(
        StartupError, match=r"^not ready after 0.1 s \(--start-timeout\): waiting for decode-1, decode-2"
    ):
        stack.start()


@pytest.mark.parametrize(("fork_server", "reason"), [(UNABLE, "no forks today"), (ENDS, "it ended")])
def test_workers_that_cannot_be_forked_are_started(
    fork_server: str, reason: str, stacks: list[Stack], caplog: pytest.LogCaptureFixture
) -> None:
    stack = stack_of(fork_server, stacks)
    assert stack.start() == Addresses("http://h:2", "h:3")
    assert {child.name for child in stack.children if child.running} == set(stack.commands)
    (told,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert reason in vars(told)["reason"]
