"""The wheel, which the image is made of too, carries the kernels, and they run from where it is installed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.build import ARM64, EXCHANGE, FEATURES, VARIANTS, library_file
from tests.engine.kernels.variants import VARIANTS as RUNNABLE

ROOT = Path(__file__).parents[3]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")

PRODUCT = """
import torch
from engine.kernels import build
from engine.kernels.choice import choose
from engine.kernels.library import Kernels
x, weight = torch.randn(3, 40), torch.randn(50, 40)
torch.testing.assert_close(Kernels(choose(), 1).pack(weight, None)(x), x @ weight.T, atol=1e-4, rtol=0)
print(build.__file__)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(COMPILER is None or not RUNNABLE, reason="needs a C++ compiler, and a CPU that kernels run on")
def test_the_wheel_carries_the_kernels(tmp_path: Path) -> None:
    source, wheels, installed = (tmp_path / name for name in ("source", "wheels", "installed"))
    # From a copy, since setuptools keeps a build folder; without the libraries that this checkout has already.
    ignored = shutil.ignore_patterns(".*", "build", "lib", "tests", "docs", "node_modules", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignored)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')  # the last -O counts, and this test needs no speed
    compiler.chmod(0o755)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    make = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(make, check=True, timeout=800, env={**os.environ, "CXX": str(compiler)})
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith(f"{platform.machine()}.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)
    libraries = {str(path.relative_to(installed)) for path in installed.rglob("*.so")}
    is_arm = platform.machine().lower() in ARM64
    expected = [FEATURES, EXCHANGE, *(name for name in VARIANTS if name.startswith("neon") == is_arm)]
    assert libraries == {f"engine/kernels/lib/{library_file(name).name}" for name in expected}
    page = Path("router", "api", "ui", "static")
    assert {one.name for one in (installed / page).iterdir()} == {one.name for one in (ROOT / page).iterdir()}
    command = [sys.executable, "-c", PRODUCT]
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == str(installed / "engine" / "kernels" / "build.py")
