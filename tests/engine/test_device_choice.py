"""What `--device auto` takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.local.device_choice import DeviceChoice, choose_device, num_driver_devices


def no_torch() -> str:
    raise AssertionError("nobody should have asked torch")


def test_a_device_that_is_named_is_taken() -> None:
    missing = "as set; auto would be cpu: there is no CUDA device"
    assert choose_device("cuda:1", lambda: 0, no_torch) == DeviceChoice("cuda:1", missing)


def test_the_cpu_is_taken_without_a_look_at_cuda_devices() -> None:
    def no_count() -> int:
        raise AssertionError("nobody should have initialised CUDA")

    assert choose_device("cpu", no_count, no_torch, lambda: True) == DeviceChoice("cpu", "as set")
    missing = DeviceChoice("cpu", "there is no CUDA device")
    assert choose_device("cpu", no_count, no_torch, lambda: False) == missing


@pytest.mark.parametrize("count", [0, 1])
def test_what_one_process_chose_for_others_keeps_its_reason(count: int) -> None:
    auto = choose_device("auto", lambda: count, str)
    assert choose_device(auto.device, lambda: count, str, lambda: count > 0) == auto


def test_without_a_cuda_device_the_cpu_computes() -> None:
    assert choose_device("auto", lambda: 0, no_torch) == DeviceChoice("cpu", "there is no CUDA device")


def test_a_cuda_device_is_taken() -> None:
    assert choose_device("auto", lambda: 2, str).device == "cuda"


def test_a_device_that_torch_cannot_use_is_named(caplog: pytest.LogCaptureFixture) -> None:
    choice = choose_device("auto", lambda: 1, lambda: "torch was built without CUDA")
    assert choice == DeviceChoice(
        "cpu", "there is a CUDA device, but torch was built without CUDA", is_cuda_unusable=True
    )
    assert [vars(record)["reason"] for record in caplog.records] == ["torch was built without CUDA"]


@pytest.mark.skipif(num_driver_devices() > 0, reason="this machine has a CUDA device")
def test_a_machine_without_one_does_not_load_torch() -> None:
    """So `baton up` decides in a moment."""
    script = (
        "import sys; from engine.local.device_choice import choose_device; "
        "print(choose_device('auto').device, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "False"]
