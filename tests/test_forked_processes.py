"""`--forks`: each test runs once, in a process of its file, and what it does is told as pytest alone would tell it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    "test_a.py": """
import os, pytest

COLLECTED_BY = os.getpid()
RUN_BY = set()

@pytest.fixture(scope="module")
def of_file():
    yield os.getpid()

@pytest.mark.parametrize("n", range(3))
def test_of_one_file(of_file, n, tmp_path):
    RUN_BY.add(os.getpid())
    assert RUN_BY == {of_file} != {COLLECTED_BY}
    assert "fork" in str(tmp_path)

def test_fails():
    print("what it printed")
    assert 1 == 2

def test_is_skipped():
    pytest.skip("for a reason")

def test_ends_its_process():
    os._exit(3)

def test_after_that(tmp_path):
    assert "fork" in str(tmp_path)
""",
    "test_b.py": """
import os, signal, warnings

def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after_it(subtests):
    with subtests.test("one"):
        assert 3 == 4

def test_warns():
    warnings.warn("look here", DeprecationWarning)
""",
    "test_c.py": """
import os

THREADS = [os.environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")]

def test_c():
    assert THREADS == ["1", "1"]
""",
}
BAD_ENDS = {
    "conftest.py": """
import pytest

@pytest.fixture(scope="session")
def of_session():
    yield
    raise ValueError("the session's end")
""",
    "test_left.py": """
import multiprocessing, os, time
from pathlib import Path

def test_leaves_processes():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
    if not (pid := os.fork()):
        time.sleep(600)
        os._exit(0)
    (Path(__file__).parent / "left").write_text(str(pid))
""",
    "test_message.py": """
import os

def test_ends_as_it_sends(request):
    (messages,) = [one._messages for one in request.config.pluginmanager.get_plugins() if hasattr(one, "_messages")]
    os.write(messages.fileno(), bytes((0, 0, 3, 232)) + b"of a thousand bytes")
    os._exit(5)
""",
    "test_teardown.py": "def test_with_fixture(of_session): pass\n",
}
EXITS = {
    "test_early.py": """
import os, pytest

def test_exits():
    pytest.exit("enough")

def test_after(): pass
""",
    "test_other.py": "def test_other(): pass\n",
}
EARLY_FAILS = {
    "test_early.py": "def test_fails(): assert 1 == 2\ndef test_after(): pass\n",
}


def run(folder: Path, *flags: str, texts: dict[str, str], pass_fds: tuple[int, ...] = ()) -> tuple[int, str]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    plugins = ("-p", "tests.forked_processes", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-rA", *plugins, *flags, str(folder)]
    # Plugins that are not needed take a second to load.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "2"}
    output = folder / "output"  # a pipe would be kept open by what a test leaves
    with output.open("w") as file:
        done = subprocess.run(
            command, cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT, pass_fds=pass_fds, timeout=120
        )
    return done.returncode, output.read_text()


def test_every_test_has_its_outcome(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--forks=2", "--early=test_b.py", texts=FILES)
    assert status == 1, output
    outcomes = re.findall(r"^([A-Z]+)(?:\[one\])? test_\w\.py::(\S+)", output, re.MULTILINE)
    assert sorted(outcomes) == [
        ("FAILED", "test_ends_its_process"),
        ("FAILED", "test_fails"),
        ("FAILED", "test_is_killed"),
        ("PASSED", "test_after_it"),
        ("PASSED", "test_after_that"),
        ("PASSED", "test_c"),
        *[("PASSED", f"test_of_one_file[{n}]") for n in range(3)],
        ("PASSED", "test_warns"),
        ("SUBFAILED", "test_after_it"),
    ]
    assert "4 failed, 7 passed, 1 skipped, 1 warning" in output
    for code in (3, -9):
        assert f"exit code {code} of the process that ran this test" in output
    assert "what it printed" in output
    assert "DeprecationWarning: look here" in output


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--forks=1", "-x", texts=FILES)
    assert status == 1, output
    assert "stopping after 1 failures" in output
    assert "1 failed, 3 passed" in output


def test_threads_would_be_missing(tmp_path: Path) -> None:
    text = """
import _thread, threading

threading.Thread(target=threading.Event().wait, daemon=True, name="mine").start()
_thread.start_new_thread(threading.Event().wait, ())  # `threading` does not know it

def test_a(): pass
"""
    status, output = run(tmp_path, "--forks=1", texts={"test_a.py": text})
    assert status == 4
    assert re.search(r"modules of tests start 2 threads, which forks lack: \['mine', '\w", output), output


def test_bad_ends_are_told_and_hold_up_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        status, output = run(tmp_path, "--forks=3", texts=BAD_ENDS, pass_fds=(write,))
    finally:
        os.close(write)
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert status == 1, output
    assert "1 failed, 2 passed, 1 error" in output
    assert "exit code 5 of the process that ran this test" in output
    assert "ERROR test_teardown.py::test_with_fixture - ValueError: the session's end" in output
    # The last process that had the other end was multiprocessing's.
    assert select.select([read], [], [], 60)[0]
    os.close(read)


def test_a_test_ends_all(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--forks=1", texts=EXITS)
    assert status == 2, output
    assert "Interrupted: a test has called pytest.exit: enough" in output
    assert "no tests ran" in output


def test_the_first_failure_ends_the_early_process(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--forks=1", "--early=test_early.py", "-x", texts=EARLY_FAILS)
    assert status == 1, output
    assert "1 failed in" in output


def test_nothing_is_early_in_a_sample(tmp_path: Path) -> None:
    text = "def test_it(tmp_path): print(tmp_path)\n"
    flags = ("--forks=1", "--early=test_a.py", "-p", "tests.sample", "--at-most-seconds=600")
    status, output = run(tmp_path, *flags, texts={"test_a.py": text, "test_b.py": text})
    assert status == 0, output
    assert output.count("/fork0/") == 2  # one process ran both
