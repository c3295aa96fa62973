"""A plugin of pytest for several test processes at a time: each begins with test files of its own.

Otherwise all of them would come to each file at the same moment, and each would rewrite its assertions and compile it.
When a process comes to the files of another one, their byte code is there.
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    given = getattr(session.config, "workerinput", None)  # by pytest-xdist
    if given is None:
        return
    ignored = [Path(path).resolve() for path in session.config.getoption("ignore") or ()]
    files = [
        path
        for argument in session.config.args
        for path in sorted(Path(argument).resolve().rglob("test_*.py"))
        if not any(path.is_relative_to(each) for each in ignored)
    ]
    number = int(given["workerid"].removeprefix("gw"))
    for path in files[number :: given["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the test itself will say so
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
