"""Processes that a benchmark starts end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bench.processes import ready_client
from common.errors import StartupError

CHILD = "import time; print('ready'); time.sleep(100)"
PARENT = f"""
import sys, time
from bench.processes import running
with running([sys.executable, "-uc", {CHILD!r}], "a child") as fields:
    print(fields["pid"], flush=True)
    time.sleep(100)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_leaves_no_child_behind() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.terminate()
        assert parent.wait(30) == 128 + signal.SIGTERM
        give_up_at = time.monotonic() + 30
        while is_alive(child) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        assert not is_alive(child)
    finally:
        parent.kill()
        parent.stdout.close()
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_client_that_does_not_start_is_named() -> None:
    with pytest.raises(StartupError, match=r"bench\.nobody did not start"):
        ready_client("bench.nobody", api_key="")
