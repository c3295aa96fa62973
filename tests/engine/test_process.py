"""What an engine's process stands on: its end is the process's."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from engine.process import Bootstrap

LOSES_A_THREAD = """
import sys, threading, time
from engine import process

def serve(*_):
    threading.Thread(target=lambda: 1 / 0).start()
    time.sleep(60)

process._serve = serve
sys.exit(process.main())
"""


def test_an_engine_ends_with_a_thread_of_its() -> None:
    """A connector's thread that is gone would leave transfers under way for ever."""
    bootstrap = Bootstrap(address="ipc:///nobody", name="engine", model_dir="", worker_id="", epoch="", settings="{}")
    command = [sys.executable, "-c", LOSES_A_THREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.json.encode(bootstrap) + b"\n")
        process.stdin.flush()  # and stays open: its end would end the engine, too
        assert b"ZeroDivisionError" in process.stderr.read()
        assert process.wait(60) == 1
