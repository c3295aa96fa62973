"""What cannot start says why in one line, exits with an error, and takes the rest of its stack with it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.stack.stack_plan import free_ports
from tests.integration.stack import alive, baton, descendants

pytestmark = pytest.mark.timeout(600)

UP = ("up", "--http-port=0", "--grpc-port=0", "--num-threads=1", "--log-level=error")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def fails(*arguments: str, preexec_fn: Callable[[], None] | None = None) -> str:
    """Runs a command that cannot start, and leaves nothing behind. Returns its one line of error."""
    process = subprocess.Popen(
        baton(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=preexec_fn
    )
    family: set[int] = set()
    while process.poll() is None:
        family |= descendants(process.pid)
        time.sleep(0.02)
    out, err = process.communicate()
    assert process.returncode not in (0, None), err
    assert "ready" not in out
    assert "Traceback" not in err
    lines = re.findall(rf"^baton {arguments[0]}: error: (.*)$", err, re.MULTILINE)
    assert len(lines) == 1, err
    assert alive(family) == set()
    return str(lines[0])


def test_worker_port_taken(model_dir: Path, tmp_path: Path, taken: int) -> None:
    line = fails("decode", f"--listen=127.0.0.1:{taken}", f"--kv-dir={tmp_path}", "--num-blocks=64")
    assert f"127.0.0.1:{taken}" in line


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_router_port_taken(model_dir: Path, taken: int, flag: str) -> None:
    line = fails(*UP, f"{flag}={taken}", "--num-blocks=64")
    assert "router" in line
    assert f"127.0.0.1:{taken}" in line


def test_model_missing() -> None:
    line = fails(*UP, "--model=/no/such/model")
    assert "/no/such/model" in line
    assert "smollm2-135m-instruct" in line


def test_not_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model")
    line = fails(*UP, f"--model={tmp_path}")
    assert str(tmp_path) in line
    assert "config.json" in line


@pytest.mark.parametrize("role", ["prefill", "decode", "worker"])
def test_worker_says_so_too(tmp_path: Path, role: str) -> None:
    line = fails(role, "--listen=127.0.0.1:0", "--model=/no/such/model", f"--kv-dir={tmp_path}")
    assert "/no/such/model" in line


def test_kv_directory_that_cannot_be_written(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(0o555)
    if os.access(folder, os.W_OK):  # root writes everywhere, but not into a file
        folder.rmdir()
        folder.write_text("")
    line = fails(*UP, f"--kv-dir={folder}", "--num-blocks=64")
    assert str(folder) in line


def test_kv_cache_larger_than_memory(model_dir: Path) -> None:
    line = fails(*UP, "--num-blocks=100000000")
    assert "KV cache" in line
    assert "GiB" in line
    assert "--num-blocks" in line


def test_unknown_connector() -> None:
    assert "--connector" in fails(*UP, "--connector=pigeon")


def test_a_router_alone_does_not_need_its_workers(tmp_path: Path) -> None:
    """It comes up, says that it is not ready, and ends when told to."""
    (port,) = free_ports(1)
    command = baton("router", f"--decode=127.0.0.1:{port}", "--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "router listens" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
