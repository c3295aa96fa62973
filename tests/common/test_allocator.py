"""What `common.allocator` says of arenas holds for a process with threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from common.allocator import NUM_ARENAS

SCRIPT = """
import ctypes, sys, threading
from common.allocator import keep_few_arenas
if sys.argv[1] == "few":
    keep_few_arenas()
NUM_THREADS = 6
meet = threading.Barrier(NUM_THREADS + 1)
def work():
    kept = [bytearray(2_000) for _ in range(200)]
    meet.wait()
    meet.wait()
for _ in range(NUM_THREADS):
    threading.Thread(target=work, daemon=True).start()
meet.wait()
ctypes.CDLL(None).malloc_stats()
"""


def num_arenas(how: str) -> int:
    told = subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True).stderr
    return sum(line.startswith("Arena ") for line in told.splitlines())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own setting")
def test_threads_share_few_arenas() -> None:
    assert num_arenas("few") <= NUM_ARENAS < num_arenas("as by default")
