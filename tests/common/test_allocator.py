"""What `common.process.allocator` says holds for a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from common.process.allocator import NUM_ARENAS

SCRIPT = """
import ctypes, sys, threading
from common.process.allocator import keep_few_arenas
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


FREEING = """
import sys
from contextlib import nullcontext
from common.process.allocator import freeing_at_once

def resident():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024

def work():
    \"\"\"MiB that stay, of 256 in pieces of 2, each with a small one behind it that is kept.\"\"\"
    pieces, kept = [], []
    for _ in range(128):
        pieces.append(bytearray(2 << 20))
        pieces[-1][::4096] = b"x" * 512
        kept.append(bytearray(20_000))
    pieces.clear()
    return resident() - before

bytearray(30 << 20)  # gone at once: from now on glibc keeps pieces up to this size
before = resident()
with freeing_at_once() if sys.argv[1] == "at once" else nullcontext():
    print(work())
"""


def stays(how: str) -> float:
    told = subprocess.run([sys.executable, "-c", FREEING, how], check=True, capture_output=True, text=True).stdout
    return float(told)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own setting")
def test_pieces_between_those_that_stay_are_given_back() -> None:
    assert stays("at once") < 16 < 128 < stays("as by default")
