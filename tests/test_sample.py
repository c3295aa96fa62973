"""`--at-most-seconds`: the order that a seed gives, and that it says what had no turn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = 4
TESTS = 5
ON_TIME = "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test(n): pass\n"
TIME_ENDS = (
    "import pytest, tests.sample\n@pytest.mark.parametrize('n', range(5))\n"
    "def test(n): tests.sample.clock = lambda: float('inf')\n"
)


def run(folder: Path, *flags: str, text: str = ON_TIME) -> tuple[int, str]:
    """The exit code and the output of a sample of four files with five tests each."""
    for name in "abcd":
        (folder / f"test_{name}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.sample",
        "-p",
        "no:cacheprovider",
        *flags,
        str(folder),
    ]
    # Plugins that are not needed take a second to load.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stdout


def order(output: str) -> list[tuple[str, int]]:
    return [(name, int(n)) for name, n in re.findall(r"test_(\w)\.py::test\[(\d)\] PASSED", output)]


def test_a_seed_decides_the_order_and_files_stay_whole(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--at-most-seconds=1000")
    assert status == 0
    assert "20 of 20 tests had their turn within 1000 s" in output
    (first,) = {*re.findall(r"--seed=(\d+)", output)}
    found = order(output)
    assert sorted(found) == [(name, n) for name in "abcd" for n in range(TESTS)]
    for start in range(0, FILES * TESTS, TESTS):
        part = found[start : start + TESTS]
        assert part == [(part[0][0], (part[0][1] + n) % TESTS) for n in range(TESTS)]
    assert order(run(tmp_path, "--at-most-seconds=1000", f"--seed={first}")[1]) == found


@pytest.mark.slow
def test_another_seed_gives_another_order(tmp_path: Path) -> None:
    one, other = (order(run(tmp_path, "--at-most-seconds=1000", f"--seed={seed}")[1]) for seed in (1, 2))
    assert sorted(one) == sorted(other)
    assert [name for name, _ in one] != [name for name, _ in other]  # of the files
    firsts = [dict(reversed(found)) for found in (one, other)]
    assert firsts[0] != firsts[1]  # and of the test in each that comes first


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="alone"),
        pytest.param(("-p", "xdist", "--numprocesses=1", "--dist=loadfile"), id="xdist", marks=pytest.mark.slow),
    ],
)
def test_what_has_no_turn_is_counted(tmp_path: Path, flags: tuple[str, ...]) -> None:
    status, output = run(tmp_path, "--at-most-seconds=1000", "--seed=7", *flags, text=TIME_ENDS)
    assert status == 0
    assert "1 of 20 tests had their turn within 1000 s; the same order again: --seed=7" in output
    assert "1 passed, 19 skipped" in output


def test_a_sample_of_nothing_fails(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--at-most-seconds=0")
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "0 of 20 tests had their turn" in output


def test_a_seed_alone_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "--seed=1")[0] == pytest.ExitCode.USAGE_ERROR
