"""The kernels under the address and undefined-behaviour sanitizers, on their own driver without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.build import SOURCE, VARIANTS
from tests.engine.kernels.variants import VARIANTS as RUNNABLE

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


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
