"""An LMCache server as a child of a local stack: `python -m baton.stack.lmcache_server --listen 127.0.0.1:5555`.

LMCache lives in an environment of its own (`make lmcache`), because its pinned versions and Baton's exclude each
other. This module finds it, becomes it (`exec`, so that signals and the end of the parent reach it), and leaves a
helper behind that prints the `ready` line of a stack's child once the server answers.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import mmap
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError
from kv_store import registry

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-lmcache"
# Not INFO, which is a line for each transfer. And nobody is told that somebody uses LMCache.
ENVIRON = {"LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
START_TIMEOUT_S = 120.0
_MEMORY = Path("/dev/shm")  # noqa: S108 - names in it are random, and a lock says whose they are
_NAME = "baton-lmcache-"
# A writer that dies between reserving a group and filling it keeps others from writing it for this long.
_WRITE_LOCK_S = 30
_NUM_THREADS = 4  # with one, a group that comes from a file holds up all others


@dataclass(slots=True, frozen=True)
class ServerSettings:
    host: str
    port: int
    size_gb: float  # GiB of shared memory
    shm_name: str
    http_port: int  # of the server's own status pages
    kv_dir: str | None = None  # files that outlive the server; memory only if None


def executable() -> Path:
    """Where LMCache is. Raises `StartupError` if it is not installed."""
    own = ENVIRONMENT / "bin" / "lmcache"
    found = str(own) if own.exists() else shutil.which("lmcache")
    if found is None:
        raise StartupError("--connector lmcache: LMCache is not installed here; run `make lmcache`")
    return Path(found)


def command(lmcache: Path, settings: ServerSettings) -> list[str]:
    argv = [
        str(lmcache), "server",
        "--transport", "grpc", "--host", settings.host, "--port", str(settings.port),
        "--http-host", "127.0.0.1", "--http-port", str(settings.http_port),
        "--supported-transfer-mode", "engine_driven",
        "--shm-name", settings.shm_name, "--no-l1-use-lazy", "--l1-size-gb", f"{settings.size_gb:g}",
        "--l1-write-ttl-seconds", str(_WRITE_LOCK_S),
        "--eviction-policy", "LRU",
        "--max-workers", str(_NUM_THREADS),
    ]  # fmt: skip
    if settings.kv_dir is not None:
        argv += ["--l2-adapter", json.dumps({"type": "fs", "base_path": settings.kv_dir})]
    return argv


def wrapper(address: str, size_gb: float, kv_dir: Path | None) -> list[str]:
    """The command line of this module: a child that prints `ready`."""
    argv = [sys.executable, "-m", "baton.stack.lmcache_server", "--listen", address, "--size-gb", f"{size_gb:g}"]
    return argv if kv_dir is None else [*argv, "--kv-dir", str(kv_dir)]


def pool_path(shm_name: str, memory: Path = _MEMORY) -> Path:
    """The server's shared memory, seen as a file. A killed server leaves it behind."""
    return memory / f"lmcache_l1_pool_{shm_name}"


def remove_abandoned(memory: Path = _MEMORY) -> None:
    """Frees the shared memory of servers that were killed, even if workers have yet to unmap it."""
    for lock_path in memory.glob(f"{_NAME}*.lock"):
        with contextlib.suppress(OSError):  # another user's, in use (BlockingIOError), or removed just now
            fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _free(pool_path(lock_path.stem, memory))
                lock_path.unlink()
            finally:
                os.close(fd)


def _free(pool: Path) -> None:
    """Removes shared memory. Its pages go at once: mappings, which would keep them, see zeros from now on."""
    with (
        contextlib.suppress(OSError, ValueError),  # ValueError: it is empty
        pool.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as memory,
    ):
        memory.madvise(mmap.MADV_REMOVE)
    pool.unlink(missing_ok=True)


def _claim_name() -> str:
    """A name for shared memory, locked for as long as this process, or what it becomes, lives."""
    name = f"{_NAME}{secrets.token_hex(8)}"
    hidden = _MEMORY / f".{name}"
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.set_inheritable(fd, True)
    hidden.rename(_MEMORY / f"{name}.lock")  # seen by others only now that it is locked
    return name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _report_when_ready(address: str) -> None:
    """Runs in a process of its own, which ends with the session's leader at the latest."""
    registry.wait_for_lmcache(address, START_TIMEOUT_S)
    print(f"ready lmcache={address}", flush=True)  # noqa: T201 - what the stack waits for


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Start an LMCache server for a local stack.")
    parser.add_argument("--listen", default="127.0.0.1:5555", help="gRPC address")
    parser.add_argument("--size-gb", type=float, default=1.0, help="shared memory, GiB")
    parser.add_argument("--kv-dir", help="directory of files that outlive the server")
    options = parser.parse_args(arguments)
    host, _, port = options.listen.rpartition(":")
    try:
        lmcache = executable()
        remove_abandoned()
        settings = ServerSettings(host, int(port), options.size_gb, _claim_name(), _free_port(), options.kv_dir)
    except (StartupError, OSError, ValueError) as error:
        sys.exit(f"baton lmcache: error: {error}")
    if os.fork() == 0:
        try:
            _report_when_ready(options.listen)
        except StartupError as error:
            sys.exit(f"baton lmcache: error: {error}")
        return
    argv = command(lmcache, settings)
    os.execve(argv[0], argv, {**os.environ, **ENVIRON})  # noqa: S606 - our own command line


if __name__ == "__main__":
    main()
