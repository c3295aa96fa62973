"""Child processes of a stack: how they start, end, and are started again. They are small real Python processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from baton.stack.local_stack import Addresses, Stack, run
from baton.stack.processes import Child, OwnProcess, tethered
from baton.stack.stack_plan import usable_cores
from common.errors import InternalError, StartupError, UnavailableError

# A child that says it is ready, writes its pid (and that it was drained) to files, and ends on SIGTERM.
GOOD = """
import os, pathlib, signal, sys, time
folder, name, ready = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def drain(*_):
    with open(folder / "order", "a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
helper = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)  # as a worker has its engine
(folder / f"{name}.tmp").write_text(f"{os.getpid()} {helper}")
(folder / f"{name}.tmp").rename(folder / f"{name}.pid")
print("a line of no importance", flush=True)
print("ready " + ready, flush=True)
while True:
    time.sleep(60)
"""
STUBBORN = GOOD.replace("    sys.exit(0)\n", "")


PYTHON = [sys.executable, "-I", "-S"]  # no packages: they take longer to find than all else


def child(folder: Path, name: str, ready: str = "grpc=h:1 role=prefill", script: str = GOOD) -> list[str]:
    return [*PYTHON, "-c", script, str(folder), name, ready]


def failing(message: str, code: int = 1) -> list[str]:
    return [*PYTHON, "-c", f"import sys; print({message!r}, file=sys.stderr); sys.exit({code})"]


def stack_of(
    folder: Path,
    extra: Mapping[str, list[str]] | None = None,
    *,
    drain_timeout: float = 60,
    start_timeout: float = 60,
    max_restarts: int = 0,
    **times: Any,
) -> Stack:
    commands = {
        "prefill-1": child(folder, "prefill-1"),
        "decode-1": child(folder, "decode-1"),
        "router": child(folder, "router", "http=http://h:2 grpc=h:3"),
        **(extra or {}),
    }
    return Stack(commands, drain_timeout, start_timeout, max_restarts=max_restarts, **times)


def pids(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("*.pid") for pid in path.read_text().split()]


def alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest-timeout ends it if it never comes true
        time.sleep(0.01)


def all_gone(folder: Path) -> None:
    """Every child and what it started has ended, or is about to: a killed grandchild is not ours to wait for."""
    wait_until(lambda: not any(map(alive, pids(folder))))


def test_work_runs_beside_the_stack_which_then_drains_router_first(tmp_path: Path) -> None:
    seen: list[Addresses] = []

    def work(addresses: Addresses) -> int:
        seen.append(addresses)
        assert len(pids(tmp_path)) == 6
        assert all(map(alive, pids(tmp_path)))
        return 7

    assert run(stack_of(tmp_path), work=work) == 7
    assert seen == [Addresses("http://h:2", "h:3")]
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "router"
    assert sorted(order[1:]) == ["decode-1", "prefill-1"]
    all_gone(tmp_path)


def test_a_child_that_cannot_start_ends_all_and_its_reason_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = failing("baton decode: error: listen: cannot bind 127.0.0.1:1")
    with pytest.raises(StartupError, match=r"^decode-2 could not start: listen: cannot bind 127\.0\.0\.1:1$"):
        run(stack_of(tmp_path, {"decode-2": bad}), work=lambda _: 0)
    all_gone(tmp_path)
    assert "baton decode: error: listen: cannot bind" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (failing("Killed by nobody", 3), "ended with exit code 3: Killed by nobody"),
        ([*PYTHON, "-c", "import os; os.kill(os.getpid(), 9)"], "ended by SIGKILL"),
        ([*PYTHON, "-c", ""], "ended with exit code 0"),
    ],
)
def test_reasons_of_children_that_gave_none(argv: list[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"^odd could not start: {reason}$"):
        run(stack_of(tmp_path, {"odd": argv}), work=lambda _: 0)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^odd could not start: cannot run /no/such/command: No such file"):
        run(stack_of(tmp_path, {"odd": ["/no/such/command"]}), work=lambda _: 0)
    all_gone(tmp_path)


FIRST_CORE = min(usable_cores())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for cores")
@pytest.mark.parametrize(
    ("wanted", "code", "out", "err"),
    [
        ((FIRST_CORE,), 0, f"[{FIRST_CORE}]", ""),
        ((99_999,), 1, "", "baton: error: --cpu-cores: none of 99999 is for this process"),
        ((99_998, 99_999), 1, "", "baton: error: --cpu-cores: none of 99998,99999 is for this process"),
    ],
)
def test_cores_of_a_command(wanted: tuple[int, ...], code: int, out: str, err: str) -> None:
    show = [*PYTHON, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    done = subprocess.run(tethered(show, wanted), check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (code, out, err)


def test_a_child_that_dies_later_ends_all(tmp_path: Path) -> None:
    def work(_: Addresses) -> int:
        kill(tmp_path, "prefill-1")
        time.sleep(600)
        return 0

    with pytest.raises(StartupError, match=r"^prefill-1 went away: ended by SIGKILL$"):
        run(stack_of(tmp_path), work=work)
    all_gone(tmp_path)


def kill(folder: Path, name: str) -> tuple[int, int]:
    """Kills a child; its pid, and that of its helper."""
    victim, helper = map(int, (folder / f"{name}.pid").read_text().split())
    os.kill(victim, signal.SIGKILL)
    return victim, helper


def kill_and_await_the_next(folder: Path, name: str) -> None:
    before = kill(folder, name)
    wait_until(lambda: not any(map(alive, before)))
    wait_until(lambda: int((folder / f"{name}.pid").read_text().split()[0]) not in before)


def test_a_worker_that_ends_is_started_again_until_it_does_so_too_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives: list[str] = []

    def work(_: Addresses) -> int:
        router = (tmp_path / "router.pid").read_text()
        for name in ("prefill-1", "decode-1", "prefill-1"):
            kill_and_await_the_next(tmp_path, name)
            lives.append(name)
        assert (tmp_path / "router.pid").read_text() == router
        kill(tmp_path, "prefill-1")
        time.sleep(600)
        return 0

    with pytest.raises(StartupError, match=r"^prefill-1 went away 3 times in 10 minutes: ended by SIGKILL$"):
        run(stack_of(tmp_path, max_restarts=2), work=work)
    assert lives == ["prefill-1", "decode-1", "prefill-1"]
    delays = [(one["worker"], one["delay_s"]) for one in map(vars, caplog.records) if "delay_s" in one]
    assert delays == [("prefill-1", 0.5), ("decode-1", 0.5), ("prefill-1", 1.0)]
    all_gone(tmp_path)


def test_an_lmcache_server_that_ends_is_started_again_as_workers_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same command, so at the same address; workers and router go on."""
    command = child(tmp_path, "lmcache", "lmcache=127.0.0.1:5555")
    caplog.set_level(logging.INFO, "baton.stack.local_stack")

    def work(_: Addresses) -> int:
        others = {name: (tmp_path / f"{name}.pid").read_text() for name in ("prefill-1", "decode-1", "router")}
        kill_and_await_the_next(tmp_path, "lmcache")
        wait_until(lambda: "a server is back" in caplog.messages)
        assert {name: (tmp_path / f"{name}.pid").read_text() for name in others} == others
        kill(tmp_path, "lmcache")
        time.sleep(600)
        return 0

    with pytest.raises(StartupError, match=r"^lmcache went away 2 times in 10 minutes: ended by SIGKILL$"):
        run(stack_of(tmp_path, {"lmcache": command}, max_restarts=1), work=work)
    delays = [(one["message"], one["server"], one["delay_s"]) for one in map(vars, caplog.records) if "delay_s" in one]
    assert delays == [("a server went away, starting it again", "lmcache", 0.5)]
    all_gone(tmp_path)


def test_a_router_that_ends_is_started_again_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the ports that it found first; workers go on; not for ever."""
    caplog.set_level(logging.INFO, "baton.stack.local_stack")
    listens = ["--http-listen=h:0", "--grpc-listen=h:0", "--prefill=h:0"]
    command = [*child(tmp_path, "router", "http=http://h:2 grpc=h:3"), *listens]
    commands: list[Sequence[str]] = []
    stack = stack_of(tmp_path, {"router": command}, max_restarts=1)

    def work(_: Addresses) -> int:
        others = {name: (tmp_path / f"{name}.pid").read_text() for name in ("prefill-1", "decode-1")}
        kill_and_await_the_next(tmp_path, "router")
        wait_until(lambda: "a router is back" in caplog.messages)
        assert {name: (tmp_path / f"{name}.pid").read_text() for name in others} == others
        commands.append(next(vars(one.process)["args"] for one in stack.children if one.name == "router"))
        kill(tmp_path, "router")
        time.sleep(600)
        return 0

    with pytest.raises(StartupError, match=r"^router went away 2 times in 10 minutes: ended by SIGKILL$"):
        run(stack, work=work)
    assert list(commands[0][-3:]) == ["--http-listen=h:2", "--grpc-listen=h:3", "--prefill=h:0"]
    all_gone(tmp_path)


def test_a_signal_drains_while_a_worker_waits_for_its_start(tmp_path: Path) -> None:
    stack = stack_of(tmp_path, max_restarts=1, first_delay_s=600.0)

    def work(_: Addresses) -> int:
        kill(tmp_path, "prefill-1")
        wait_until(lambda: bool(stack._starts))
        return 3

    assert run(stack, work=work) == 3
    assert (tmp_path / "order").read_text().split() == ["router", "decode-1"]
    all_gone(tmp_path)


def test_a_child_that_never_gets_ready(tmp_path: Path) -> None:
    silent = [*PYTHON, "-c", "import time; time.sleep(600)"]
    with pytest.raises(StartupError, match=r"^not ready after 0\.5 s \(--start-timeout\): waiting for .*silent"):
        run(stack_of(tmp_path, {"silent": silent}, start_timeout=0.5), work=lambda _: 0)
    all_gone(tmp_path)


def test_a_whole_that_is_asked_until_it_answers(tmp_path: Path) -> None:
    answers = ["one worker is missing", "one worker is missing", ""]
    stack = stack_of(tmp_path)
    stack.not_ready = lambda _: answers.pop(0)
    assert run(stack, work=lambda _: 0) == 0
    assert answers == []


def test_an_error_of_the_work_is_the_error_of_the_run(tmp_path: Path) -> None:
    def work(_: Addresses) -> int:
        raise UnavailableError("no")

    with pytest.raises(UnavailableError):
        run(stack_of(tmp_path), work=work)
    all_gone(tmp_path)


def test_a_child_that_does_not_drain_in_time_is_killed(tmp_path: Path) -> None:
    stubborn = child(tmp_path, "router", "http=u grpc=a", STUBBORN)
    assert run(stack_of(tmp_path, {"router": stubborn}, drain_timeout=0.0, kill_grace_s=0.3), work=lambda _: 0) == 0
    all_gone(tmp_path)


def test_a_thread_that_watches_a_child_ends_the_run_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it nobody would hear of the child's end."""
    told: list[Child] = []
    reap = Child.reap

    def broken(one: Child) -> int:
        if one.name != "decode-1":
            return reap(one)
        told.append(one)
        raise OSError("no such process")

    monkeypatch.setattr(Child, "reap", broken)
    with pytest.raises(InternalError, match="decode-1 is not watched any more"):
        run(stack_of(tmp_path, drain_timeout=0.0, kill_grace_s=0.3))
    (child_process,) = told
    child_process.process.wait()
    all_gone(tmp_path)


PARENT = """
import sys
from pathlib import Path
from typing import Any, cast
from tests.baton.test_processes import STUBBORN, child, stack_of
from baton.stack.local_stack import run
folder = Path(sys.argv[1])
extra = {"decode-1": child(folder, "decode-1", script=STUBBORN)} if "stubborn" in sys.argv else {}
sys.exit(run(stack_of(folder, extra), on_ready=lambda a: print("ready", a.http, a.grpc, flush=True)))
"""


def parent(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs a stack, up and ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(folder), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready http://h:2 h:3\n"
    return process


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_drains(signum: signal.Signals, tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        process.send_signal(signum)
        assert process.wait() == 0
    assert (tmp_path / "order").read_text().split()[0] == "router"
    all_gone(tmp_path)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with parent(tmp_path, "stubborn") as process:
        process.send_signal(signal.SIGINT)
        wait_until(lambda: (tmp_path / "order").exists() and "decode-1" in (tmp_path / "order").read_text())
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    all_gone(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
def test_sigkill_leaves_no_child(tmp_path: Path) -> None:
    with parent(tmp_path) as process:
        children = [int(path.read_text().split()[0]) for path in tmp_path.glob("*.pid")]
        helpers = [int(path.read_text().split()[1]) for path in tmp_path.glob("*.pid")]
        assert len(children) == 3
        process.kill()
        process.wait()
    try:
        wait_until(lambda: not any(map(alive, children)))
    finally:
        for pid in helpers:  # a real worker ties its engine to itself in the same way
            os.kill(pid, signal.SIGKILL)


def test_children_do_not_inherit_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NUM_BLOCKS", "1")
    code = "import os, sys; sys.exit(f'baton x: error: {sorted(k for k in os.environ if k.startswith(\"BATON_\"))}')"
    with pytest.raises(StartupError, match=r"^odd could not start: \[\]$"):
        run(stack_of(tmp_path, {"odd": [*PYTHON, "-c", code]}), work=lambda _: 0)


def test_reason_is_the_last_error_line(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        one = Child("x", cast("OwnProcess", process), code=1)
        one.tail.extend(["baton prefill: error: first", "baton prefill: error: second", "a log line after it"])
        assert one.reason() == "second"


def test_a_fork_that_leads_no_group_yet_is_killed() -> None:
    process = OwnProcess(["sleep", "600"])  # in this process's group
    try:
        Child("decode-1", process).kill()
        assert process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
