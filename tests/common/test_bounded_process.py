"""Jobs that go beyond their limits end a process of their own, and the next job is done."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from common.bounded_process import BoundedProcess, ChildWords, JobDiedError, Limits
from common.errors import InternalError, UnavailableError
from tests.common.test_grammar_process import children

LIMITS = Limits(cpu_s=20, num_bytes=32 * 2**20, stack_bytes=2**20)
WORDS = ChildWords(subjects="jobs", work="do", waiting="others wait", broken="it is broken")


def process_of(*, opens_files: bool, limits: Limits = LIMITS) -> BoundedProcess:
    arguments = [json.dumps(asdict(limits)), "open" if opens_files else "sealed"]
    return BoundedProcess("tests.common.bounded_jobs", arguments, limits, WORDS)


@pytest.fixture(scope="module")
def sealed() -> Iterator[BoundedProcess]:
    process = process_of(opens_files=False)
    yield process
    process.close()


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"keep": 2**30}, "it costs more than 32 MiB to do"),
        (
            {"say": "\N{GRINNING FACE}" * 2_000_000},
            "it costs more than 32 MiB to do",
        ),  # its JSON has six times the bytes
        ({"signal": signal.SIGSEGV}, "it is broken"),
    ],
)
def test_what_breaks_a_limit_ends_alone(sealed: BoundedProcess, job: dict[str, object], words: str) -> None:
    sealed.ask({"keep": 1})
    keeper = sealed.pid
    with pytest.raises(JobDiedError, match=words):
        sealed.ask(job)
    assert sealed.ask({"keep": 1}) == {"kept": 1}
    assert sealed.pid == keeper


def test_what_takes_too_long_ends_alone() -> None:
    process = process_of(opens_files=False, limits=replace(LIMITS, cpu_s=0.2))
    try:
        with pytest.raises(JobDiedError, match=r"it costs more than 0\.2 s to do"):
            process.ask({"compute": True})
        keeper = process.pid
        assert keeper is not None
        with pytest.raises(JobDiedError, match=r"it costs more than 0\.2 s to do"):
            process.ask({"compute": True})
        assert process.pid == keeper
    finally:
        process.close()


def test_who_ended_it_from_outside_is_not_the_job(sealed: BoundedProcess) -> None:
    with pytest.raises(UnavailableError, match="the process that works on jobs ended"):
        sealed.ask({"signal": signal.SIGKILL})
    with pytest.raises(InternalError, match="no such job"):
        sealed.ask({"unknown": 1})
    assert sealed.ask({"keep": 1})


def test_the_next_answer_is_the_next_jobs_if_the_runner_is_ended_meanwhile(sealed: BoundedProcess) -> None:
    for number in range(3):
        assert sealed.ask({"say": f"{number}"}) == {"said": f"{number}"}
        assert sealed.pid is not None
        (runner,) = children(sealed.pid)
        os.kill(runner, signal.SIGKILL)
        while children(sealed.pid) in ([], [runner]):
            time.sleep(0.01)
    with pytest.raises(JobDiedError):
        sealed.ask({"signal": signal.SIGSEGV})
    assert sealed.ask({"say": "last"}) == {"said": "last"}


def test_memory_that_jobs_leave_behind_is_given_back(sealed: BoundedProcess) -> None:
    """Each keeps less than one job may take, and all of them together do not grow without end."""
    kept = [sealed.ask({"keep": 20 * 2**20})["kept"] for _ in range(8)]
    assert max(map(int, map(str, kept))) <= 3


def test_a_sealed_child_opens_nothing(sealed: BoundedProcess, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        jobs: list[dict[str, object]] = [{"open": str(file)}, {"connect": server.getsockname()[1]}]
        assert [sealed.ask(job)["is_open"] for job in jobs] == [os.strerror(24)] * 2  # EMFILE
        process = process_of(opens_files=True)
        assert [process.ask(job)["is_open"] for job in jobs] == ["yes"] * 2
        process.close()
