from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.stack import lmcache_server, stack_plan
from common.config import UpSettings
from common.errors import StartupError


def address_of(argv: Sequence[str]) -> str:
    return next(flag for flag in argv if flag.startswith("--lmcache-address=")).partition("=")[2]


def test_a_stack_starts_one_server_for_all_its_workers() -> None:
    commands = stack_plan.plan(UpSettings(connector="lmcache", lmcache_size_gb=0.5), Path("/kv")).commands
    assert list(commands) == ["lmcache", "prefill-1", "decode-1", "router"]
    _, *server = commands["lmcache"]
    address = server[server.index("--listen") + 1]
    assert server == ["-m", "baton.stack.lmcache_server", "--listen", address, "--size-gb", "0.5"]
    assert [address_of(commands[name]) for name in ("prefill-1", "decode-1")] == [address] * 2


def test_a_given_directory_is_where_the_server_keeps_files() -> None:
    settings = UpSettings(connector="lmcache", kv_dir="/kv")
    assert stack_plan.plan(settings, Path("/kv")).commands["lmcache"][-2:] == ["--kv-dir", "/kv"]


def test_a_server_that_runs_already_is_used() -> None:
    settings = UpSettings(connector="lmcache", lmcache_address="127.0.0.1:5555")
    commands = stack_plan.plan(settings, Path("/kv")).commands
    assert "lmcache" not in commands
    assert address_of(commands["decode-1"]) == "127.0.0.1:5555"


def test_a_server_may_be_the_store_beside_another_connector() -> None:
    commands = stack_plan.plan(UpSettings(connector="nixl", store="lmcache"), Path("/kv")).commands
    assert address_of(commands["decode-1"]) in commands["lmcache"]


def test_other_connectors_need_no_server() -> None:
    assert "lmcache" not in stack_plan.plan(UpSettings(), Path("/kv")).commands


def test_without_lmcache_a_stack_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lmcache_server, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(StartupError, match="run `make lmcache`"):
        stack_plan.check(UpSettings(connector="lmcache"))
    stack_plan.check(UpSettings(connector="lmcache", lmcache_address="127.0.0.1:5555"))


def test_memory_of_killed_servers_is_freed(tmp_path: Path) -> None:
    """A lock says which servers live; what has no lock file is somebody else's."""
    names = {"dead": "baton-lmcache-1", "alive": "baton-lmcache-2", "other": "vllm"}
    pools = {state: lmcache_server.pool_path(name, tmp_path) for state, name in names.items()}
    for state, pool in pools.items():
        pool.touch()
        if state != "other":
            (tmp_path / f"{names[state]}.lock").touch()
    lock = os.open(tmp_path / "baton-lmcache-2.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    lmcache_server.remove_abandoned(tmp_path)
    os.close(lock)
    assert {state for state, pool in pools.items() if pool.exists()} == {"alive", "other"}
    assert sorted(path.name for path in tmp_path.glob("*.lock")) == ["baton-lmcache-2.lock"]


def test_memory_of_a_killed_server_is_freed_while_workers_map_it() -> None:
    """Or the next server might find no room for its own. Needs a real tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pool, num_bytes = lmcache_server.pool_path("baton-lmcache-1", Path(folder)), 1 << 20
        pool.write_bytes(b"x" * num_bytes)
        (Path(folder) / "baton-lmcache-1.lock").touch()
        with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            lmcache_server.remove_abandoned(Path(folder))
            assert not pool.exists()
            assert os.fstat(file.fileno()).st_blocks == 0
            assert memory[:] == bytes(num_bytes)
