"""The kernels on their own driver without Python: under the address and undefined-behaviour sanitizers, and, for Arm
on x86, under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.build import SOURCE, VARIANTS
from engine.kernels.choice import INSTRUCTION_SETS
from tests.engine.kernels.variants import VARIANTS as RUNNABLE

# The plain code in place of AMX's instructions says where a tile reads; sanitizers do not see what the instructions do.
FLAGS = {**VARIANTS, "plain tiles": ("-DBATON_PLAIN_TILES",)}
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
ARM_COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("variant", [*(name for name in RUNNABLE if name != "amx"), "plain tiles"])
def test_sanitizers_find_nothing(variant: str, tmp_path: Path) -> None:
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-Wno-psabi", "-ffp-contract=fast", "-fno-math-errno"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = Path(__file__).with_name("driver.cpp")
    command = [str(COMPILER), *flags, *sanitizers, *FLAGS[variant], f"-I{SOURCE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=500)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing found"), done.stderr[-3000:]


# What is emulated: a core without bfloat16 instructions, and one with all that the emulator knows.
ARM_CORES = {"neon": "cortex-a76", "neon_bf16": "max"}
needs_arm = pytest.mark.skipif(
    ARM_COMPILER is None or EMULATOR is None, reason="needs g++-aarch64-linux-gnu and qemu-user"
)


def compiled_for_arm(source: Path, program: Path, *flags: str) -> Path:
    always = ["-std=c++17", "-O2", "-static", "-pthread", "-Wno-psabi", "-ffp-contract=fast", "-fno-math-errno"]
    command = [str(ARM_COMPILER), *always, *flags, f"-I{SOURCE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=500)
    return program


def emulated(core: str, program: Path) -> subprocess.CompletedProcess[str]:
    command = [str(EMULATOR), "-cpu", core, str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_arm
@pytest.mark.parametrize("variant", ARM_CORES)
def test_arm_under_an_emulator(variant: str, tmp_path: Path) -> None:
    program = compiled_for_arm(Path(__file__).with_name("driver.cpp"), tmp_path / "driver", *VARIANTS[variant])
    done = emulated(ARM_CORES[variant], program)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing found"), done.stderr[-3000:]


@pytest.mark.slow
@needs_arm
def test_what_an_arm_core_is_said_to_have(tmp_path: Path) -> None:
    source = tmp_path / "main.cpp"
    source.write_text(
        f'#include "features.cpp"\n#include <cstdio>\n'
        f'int main() {{ for (int i = 0; i < {len(INSTRUCTION_SETS)}; i++) std::printf("%d", baton_cpu_has(i)); }}\n'
    )
    program = compiled_for_arm(source, tmp_path / "main")
    found = {
        core: [name for name, has in zip(INSTRUCTION_SETS, emulated(core, program).stdout, strict=True) if has == "1"]
        for core in ("cortex-a72", *ARM_CORES.values())
    }
    assert found == {"cortex-a72": [], "cortex-a76": ["neon"], "max": ["neon", "neon_bf16"]}
