"""A plugin of pytest that makes importing the tests cheaper, which each of several test processes does.

Each process begins with test files of its own. Otherwise all of them would come to each file at the same moment, and
each would rewrite its assertions and compile it. When a process comes to the files of another one, their byte code is
there.

What is imported, more than a million objects, stays until the end, so the garbage collector looks at none of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    gc.disable()
    try:
        _import_own_share(session)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_own_share(session: pytest.Session) -> None:
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
