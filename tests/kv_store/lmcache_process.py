"""A real LMCache server, as tests start, kill, stop and restart it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.stack import lmcache_server
from common.errors import StartupError
from kv_store.lmcache.client import LMCacheClient


def executable() -> Path:
    """Skips the test if LMCache is not installed."""
    try:
        return lmcache_server.executable()
    except StartupError:
        pytest.skip("LMCache is not installed (`make lmcache`)")


class LMCacheProcess:
    """Listens on the same port in all its lives."""

    def __init__(self, kv_dir: Path | None = None) -> None:
        self._kv_dir = kv_dir
        self._lmcache = executable()
        self._port, self._http_port = free_ports(2)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._num_starts = 0
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        self._num_starts += 1
        settings = lmcache_server.ServerSettings(
            host="127.0.0.1",
            port=self._port,
            size_gb=0.25,
            shm_name=f"baton-test-{os.getpid()}-{self._port}-{self._num_starts}",
            http_port=self._http_port,
            kv_dir=str(self._kv_dir) if self._kv_dir is not None else None,
        )
        self.pool = lmcache_server.pool_path(settings.shm_name)
        self.process = subprocess.Popen(
            lmcache_server.command(self._lmcache, settings),
            env={**os.environ, **lmcache_server.ENVIRON},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        client = LMCacheClient(self.address)
        try:
            client.wait_until_up(120.0)
        except StartupError as error:
            self.kill()
            self._log.seek(0)
            raise AssertionError(f"{error}\n{self._log.read().decode(errors='replace')[-5000:]}") from error
        finally:
            client.close(0.0)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def clear(self) -> None:
        client = LMCacheClient(self.address)
        client.clear(30.0)
        client.close(0.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pool.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs: its connections stay, and nobody answers on them."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._log.close()


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
