"""The kernels on their own driver without Python: under the address and undefined-behaviour sanitizers, and, for NEON
on x86, under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.build import SOURCE, VARIANTS
from tests.engine.kernels.variants import VARIANTS as RUNNABLE

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
ARM_COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("variant", RUNNABLE)
def test_sanitizers_find_nothing(variant: str, tmp_path: Path) -> None:
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-Wno-psabi", "-ffp-contract=fast", "-fno-math-errno"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = Path(__file__).with_name("driver.cpp")
    command = [str(COMPILER), *flags, *sanitizers, *VARIANTS[variant], f"-I{SOURCE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=500)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing found"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(ARM_COMPILER is None or EMULATOR is None, reason="needs g++-aarch64-linux-gnu and qemu-user")
def test_neon_under_an_emulator(tmp_path: Path) -> None:
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O2", "-static", "-pthread", "-Wno-psabi", "-ffp-contract=fast", "-fno-math-errno"]
    source = Path(__file__).with_name("driver.cpp")
    command = [str(ARM_COMPILER), *flags, *VARIANTS["neon"], f"-I{SOURCE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    done = subprocess.run([str(EMULATOR), program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing found"), done.stderr[-3000:]
