"""A sample of tests that takes only so long: `--at-most-seconds=120`, for a tier whose whole takes long.

The files' order follows from a seed, and so does the test of each file that comes first; else the end of a long file
would never have its turn. A test that has begun in time is finished, all later ones are skipped. How many of how many
had their turn is said at the end, with the seed: `--seed` runs the same order again. If none had, that is a failure.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

clock = time.monotonic
LEFT_OUT = "the sample's time is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample", "a sample of tests that takes only so long")
    group.addoption("--at-most-seconds", type=float, metavar="S", help="begin no test S seconds after the first could")
    group.addoption(
        "--seed", type=int, metavar="N", help="what decides the order then; chosen and printed if not given"
    )


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.at_most_seconds is None:
        if option.seed is not None:
            raise pytest.UsageError("--seed is for --at-most-seconds")
        return
    if hasattr(config, "workerinput"):  # one of xdist's processes
        seed = config.workerinput["seed"]
    else:
        seed = random.SystemRandom().randrange(10**6) if option.seed is None else option.seed
        option.loadscopereorder = False  # xdist would begin with the file that has most tests
    config.pluginmanager.register(Sample(seed, option.at_most_seconds))


class Sample:
    def __init__(self, seed: int, seconds: float) -> None:
        self._seed, self._seconds = seed, seconds
        self._ends = 0.0
        self._begun: set[str] = set()
        self._left_out: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["seed"] = self._seed

    def pytest_report_header(self) -> str:
        return f"sample: begun within {self._seconds:g} s, --seed={self._seed}"

    @pytest.hookimpl(trylast=True)  # after what is not asked for was left out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rng = random.Random(self._seed)
        by_path: dict[Path, list[pytest.Item]] = {}
        for item in items:
            by_path.setdefault(item.path, []).append(item)
        files = list(by_path.values())
        rng.shuffle(files)
        firsts = [rng.randrange(len(tests)) for tests in files]
        items[:] = [test for tests, first in zip(files, firsts, strict=True) for test in tests[first:] + tests[:first]]

    def pytest_collection_finish(self) -> None:
        self._ends = clock() + self._seconds  # to import what the tests need takes long on a busy machine

    @pytest.hookimpl(tryfirst=True)  # before its fixtures
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if clock() >= self._ends:
            pytest.skip(LEFT_OUT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_left_out = isinstance(report.longrepr, tuple) and report.longrepr[2] == f"Skipped: {LEFT_OUT}"
        (self._left_out if is_left_out else self._begun).add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._left_out and not self._begun - self._left_out:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        num, num_left_out = len(self._begun - self._left_out), len(self._left_out)
        terminalreporter.write_line(
            f"sample: {num} of {num + num_left_out} tests had their turn within {self._seconds:g} s; "
            f"the same order again: --seed={self._seed}"
        )
