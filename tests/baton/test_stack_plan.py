"""From settings to the commands of a stack: roles, addresses, cores."""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

import pytest

from baton.cli.serve import prepare_model
from baton.stack import stack_plan
from common.config import UpSettings
from common.errors import ConfigError, StartupError
from engine.local.device_choice import choose_device


def test_plan_of_two_prefill_one_decode_and_one_of_both_roles() -> None:
    settings = UpSettings(
        prefill=2,
        decode=1,
        both=1,
        dtype="float32",
        cpu_cores=(0, 1, 2, 3),
        http_port=0,
        num_blocks=9,
        min_remote_tokens=64,
        router_processes=2,
    )
    commands = stack_plan.plan(settings, Path("/kv")).commands
    assert list(commands) == ["prefill-1", "prefill-2", "decode-1", "worker-1", "router"]
    addresses = {}
    for number, name in enumerate(["prefill-1", "prefill-2", "decode-1", "worker-1"]):
        command = list(commands[name])
        assert command[1:4] == ["-m", "baton", name.partition("-")[0]]
        assert {"--dtype=float32", "--kv-dir=/kv", "--num-blocks=9", f"--cpu-cores={number}"} <= set(command)
        addresses[name] = next(flag.partition("=")[2] for flag in command if flag.startswith("--listen="))
    assert len(set(addresses.values())) == 4
    both = addresses["worker-1"]
    assert f"--prefill={addresses['prefill-1']},{addresses['prefill-2']},{both}" in commands["router"]
    assert f"--decode={addresses['decode-1']},{both}" in commands["router"]
    assert {"--http-listen=127.0.0.1:0", "--min-remote-tokens=64", "--processes=2"} <= set(commands["router"])


def write_model(folder: Path) -> None:
    """What is asked of a model before any worker starts."""
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


@pytest.mark.parametrize(("variable", "value"), [("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")])
def test_the_dtype_is_chosen_once_for_all_workers(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    write_model(tmp_path)
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        settings = prepare_model(UpSettings(model=str(tmp_path), device=device, prefill=2, kernels="torch"))
        commands = stack_plan.plan(settings, Path("/kv")).commands
        for name in ("prefill-1", "prefill-2", "decode-1"):
            assert f"--dtype={dtype}" in commands[name]


@pytest.mark.parametrize("num_devices", [0, 1])
def test_the_device_is_chosen_once_for_all_workers(
    num_devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.serve.choose_device", lambda asked: choose_device(asked, lambda: num_devices, str))
    write_model(tmp_path)
    settings = prepare_model(UpSettings(model=str(tmp_path), memory_utilization=0.8))
    commands = stack_plan.plan(settings, Path("/kv")).commands
    for name in ("prefill-1", "decode-1"):
        device, share = ("cuda", 0.4) if num_devices else ("cpu", 0.8)
        assert f"--device={device}" in commands[name]
        assert [flag for flag in commands[name] if "memory-util" in flag] == [f"--memory-utilization={share}"]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_workers_on_one_gpu_share_its_memory(device: str) -> None:
    settings = UpSettings(prefill=1, decode=2, device=device, memory_utilization=0.9)
    commands = stack_plan.plan(settings, Path("/kv")).commands
    shares = [float(flag.partition("=")[2]) for argv in commands.values() for flag in argv if "memory-util" in flag]
    assert shares == pytest.approx([0.3, 0.3, 0.3])


@pytest.mark.parametrize(
    ("cores", "num_workers", "expected"),
    [
        ((0, 1), 2, [(0,), (1,)]),
        ((4, 5, 6, 7, 8), 2, [(4, 5), (6, 7, 8)]),
        ((0, 1), 3, [(0,), (1,), (0,)]),
        ((3,), 1, [(3,)]),
        ((), 2, [(), ()]),
    ],
)
def test_cores_are_divided(cores: tuple[int, ...], num_workers: int, expected: list[tuple[int, ...]]) -> None:
    assert stack_plan.divide_cores(cores, num_workers) == expected


@pytest.mark.parametrize(
    ("roles", "cores", "expected"),
    [
        (["prefill", "decode"], [(0, 1), (2, 3)], (0, 1)),
        (["prefill", "prefill", "decode", "worker"], [(0,), (1,), (2,), (3,)], (0, 1)),
        (["prefill", "decode", "decode"], [(0,), (1,), (0,)], ()),
        (["worker"], [(0, 1)], ()),
        (["prefill", "decode"], [(), ()], ()),
    ],
)
def test_fronts_leave_the_cores_of_decode_engines_alone(
    roles: list[str], cores: list[tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    assert stack_plan.front_cores(roles, cores) == expected


def test_ports_that_are_taken_are_not_chosen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match="fewer than 1 free ports"):
            stack_plan.free_ports(1, range(port, port + 1))


def test_as_many_ports_as_there_are() -> None:
    ports = stack_plan.free_ports(3, range(21000, 21200))
    assert len(set(ports)) == 3
    assert set(ports) <= set(range(21000, 21200))


@pytest.mark.parametrize(("host", "listen"), [("0.0.0.0", "0.0.0.0:8000"), ("::1", "[::1]:8000")])
def test_only_the_router_listens_on_the_host_given(host: str, listen: str) -> None:
    commands = stack_plan.plan(UpSettings(host=host), Path("/kv")).commands
    assert f"--http-listen={listen}" in commands["router"]
    assert any(flag.startswith("--listen=127.0.0.1:") for flag in commands["decode-1"])


def test_what_makes_no_stack() -> None:
    with pytest.raises(ConfigError, match=r"^--decode: "):
        stack_plan.check(UpSettings(prefill=1, decode=0))
    with pytest.raises(ConfigError, match=r"^--connector: 'postal' is not one of "):
        stack_plan.check(UpSettings(connector="postal"))
    with pytest.raises(ConfigError, match=r"^--store: 'nixl' is not one of lmcache, shared_storage$"):
        stack_plan.check(UpSettings(connector="nixl", store="nixl"))
    with pytest.raises(ConfigError, match=r"^--store: connector shared_storage is a store itself"):
        stack_plan.check(UpSettings(store="lmcache", lmcache_address="127.0.0.1:1"))
    stack_plan.check(UpSettings(prefill=0, decode=0, both=1))
    stack_plan.check(UpSettings(connector="nixl", store="shared_storage"))
    stack_plan.check(UpSettings(store="shared_storage"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each worker is a process that is started anew")
def test_simulated_workers_are_forks_and_run_on_any_core() -> None:
    stack = stack_plan.plan(UpSettings(device="simulated", prefill=60, decode=40), Path("/kv"))
    assert stack.forks is not None
    assert stack.forks.names == set(stack.commands) - {"router"}
    assert len(stack.forks.names) == 100
    assert not stack.front_cores
    for name in stack.forks.names:
        flags = stack.commands[name]
        assert not [flag for flag in flags if flag.startswith("--cpu-cores")]
        assert "--log-level=warning" in flags  # a thousand lines otherwise
    assert "--log-level=warning" not in stack.commands["router"]


def test_simulated_workers_and_their_router_run_on_the_cores_that_are_given() -> None:
    stack = stack_plan.plan(UpSettings(device="simulated", prefill=1, decode=2, cpu_cores=(0, 1)), Path("/kv"))
    assert stack.front_cores == (0, 1)
    assert all("--cpu-cores=0,1" in stack.commands[name] for name in ("prefill-1", "decode-1", "decode-2"))


def test_a_log_level_that_was_given_is_that_of_simulated_workers_too() -> None:
    settings = UpSettings(device="simulated", prefill=60, decode=40, log_level="debug")
    assert "--log-level=debug" in stack_plan.plan(settings, Path("/kv")).commands["decode-40"]


def test_real_workers_are_no_forks() -> None:
    assert stack_plan.plan(UpSettings(), Path("/kv")).forks is None
