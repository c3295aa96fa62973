"""`--forks`: each test runs once, in a process of its file, and what it does is told as pytest alone would tell it."""

from __future__ import annotations

import os
import re
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
    "test_c.py": "def test_c(): pass\n",
}


def run(folder: Path, *flags: str, **texts: str) -> tuple[int, str]:
    for name, text in (texts or FILES).items():
        (folder / name).write_text(text)
    plugins = ("-p", "tests.forked_processes", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-rA", *plugins, *flags, str(folder)]
    # Plugins that are not needed take a second to load.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    return done.returncode, done.stdout


def test_every_test_has_its_outcome(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--forks=2", "--early=test_b.py")
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
    status, output = run(tmp_path, "--forks=1", "-x")
    assert status == 1, output
    assert "stopping after 1 failures" in output
    assert "1 failed, 3 passed" in output


def test_threads_would_be_missing(tmp_path: Path) -> None:
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='mine').start()\n"
    status, output = run(tmp_path, "--forks=1", **{"test_a.py": text + "def test_a(): pass\n"})
    assert status == 4
    assert "modules of tests start 1 threads, which forks lack: ['mine']" in output
