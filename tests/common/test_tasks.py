from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine

import pytest
from prometheus_client import REGISTRY

from common.errors import BatonError, InternalError, StartupError
from common.process.tasks import VitalTasks, count_tasks


async def returns() -> None:
    await asyncio.sleep(0)


async def raises() -> None:
    raise ValueError("a defect")


async def refuses() -> None:
    raise StartupError("decode: cannot be looked up")


async def fails_in_a_group() -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuses())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def is_let_down() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize(
    ("work", "failure", "words"),
    [
        (returns, InternalError, "the task 'watch' ended: without an error"),
        (raises, InternalError, "the task 'watch' ended: ValueError: a defect"),
        (refuses, StartupError, "decode: cannot be looked up"),
        (fails_in_a_group, StartupError, "decode: cannot be looked up"),
        (is_let_down, InternalError, "the task 'watch' ended: CancelledError: it was cancelled by nobody"),
    ],
)
async def test_a_vital_task_that_ends_is_logged_and_ends_the_process(
    work: Callable[[], Coroutine[None, None, None]],
    failure: type[BatonError],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[BatonError] = []
    tasks = VitalTasks(seen.append)
    tasks.start(asyncio.Event().wait(), name="other")  # type: ignore[arg-type] # its bool is nobody's
    tasks.start(work(), name="watch")
    await asyncio.wait_for(tasks.failed_or(asyncio.Event()), 60)
    with pytest.raises(failure) as raised:
        tasks.raise_failure()
    assert raised.value.message == words
    assert seen == [raised.value]
    assert [record.levelno >= logging.ERROR for record in caplog.records] == [True]
    await tasks.close()
    assert seen == [raised.value]


async def test_a_vital_task_that_was_cancelled_ends_nothing() -> None:
    tasks, stop = VitalTasks(), asyncio.Event()
    tasks.start(asyncio.Event().wait(), name="one").cancel()  # type: ignore[arg-type]
    tasks.start(asyncio.Event().wait(), name="two")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await tasks.close()
    stop.set()
    await tasks.failed_or(stop)
    tasks.raise_failure()


def test_a_thread_that_ends_by_an_exception_ends_its_process() -> None:
    program = """
import threading, time
from common.process.tasks import end_with_threads
end_with_threads()
threading.Thread(target=lambda: 1 / 0, daemon=True).start()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


async def test_tasks_are_counted() -> None:
    counting = asyncio.create_task(count_tasks(0.0))
    waiting = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
    for tasks, number in ((waiting, 5), ([], 2)):  # with the test and the one that counts
        for task in waiting[len(tasks) :]:
            task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert REGISTRY.get_sample_value("baton_process_tasks") == number
    counting.cancel()
