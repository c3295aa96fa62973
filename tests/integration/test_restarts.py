"""`baton up` starts a worker again that dies."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.types import WorkerState
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.stack import (
    CALL_TIMEOUT_S,
    START_TIMEOUT_S,
    Stack,
    alive,
    command,
    descendants,
    engines,
    wait_for,
)

pytestmark = pytest.mark.timeout(600)

PROMPT = random_prompt(random.Random(1), 100)
BACK = "a worker is back worker=decode-1"


def answer(stack: Stack) -> tuple[int, ...]:
    with stack.client() as client:
        return client.generate(PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True).result().token_ids


def all_ready(stack: Stack) -> bool:
    return all(worker.state is WorkerState.READY for worker in stack.workers())


def count(stack: Stack, words: str) -> int:
    """How often its log has them."""
    return stack.process.log.read_text().count(words)


def wait_for_end(pids: set[int]) -> None:
    wait_for("the worker has ended", lambda: not alive(pids), CALL_TIMEOUT_S)


def wait_for_return(stack: Stack, number: int) -> None:
    """Until a decode worker has come back so many times."""
    wait_for("the worker is back", lambda: count(stack, BACK) == number, START_TIMEOUT_S)


def decode_worker(stack: Stack) -> int:
    """Pid of its front."""
    children = descendants(stack.process.popen.pid)
    return next(pid for pid in children if b"decode" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[list[Stack]]:
    write_tiny_model(tmp_path / "model")
    started: list[Stack] = []
    yield started
    for stack in started:
        stack.process.kill()


def test_a_decode_worker_that_is_killed_comes_back(start: list[Stack], tmp_path: Path) -> None:
    """Whether its front was killed or its engine."""
    stack = Stack(tmp_path, f"--model={tmp_path / 'model'}")
    start.append(stack)
    expected = answer(stack)
    for number, part in enumerate(("front", "engine"), start=1):
        front = decode_worker(stack)
        (engine,) = engines(front)
        os.kill(front if part == "front" else engine, signal.SIGKILL)
        wait_for_end({front, engine})
        wait_for_return(stack, number)
        wait_for("the router uses it", lambda: all_ready(stack), START_TIMEOUT_S)
        assert answer(stack) == expected
        assert decode_worker(stack) != front
        stack.settle()
    family = descendants(stack.process.popen.pid)
    checkers = {pid for pid in family if b"grammar_child" in command(pid)}
    assert len(family - checkers) == 5  # two workers with an engine each, and the router
    assert count(stack, "a worker went away, starting it again worker=decode-1") == 2
    assert stack.stop() == 0
    assert alive(family) == set()


def test_a_worker_that_dies_too_often_ends_its_stack(start: list[Stack], tmp_path: Path) -> None:
    stack = Stack(tmp_path, f"--model={tmp_path / 'model'}", "--max-restarts=1")
    start.append(stack)
    first = decode_worker(stack)
    os.kill(first, signal.SIGKILL)
    wait_for_return(stack, 1)
    family = descendants(stack.process.popen.pid)
    os.kill(decode_worker(stack), signal.SIGKILL)
    assert stack.process.popen.wait(60) == 1
    last = stack.process.log.read_text().splitlines()[-1]
    assert last == "baton up: error: decode-1 went away 2 times in 10 minutes: ended by SIGKILL"
    assert alive(family) == set()
