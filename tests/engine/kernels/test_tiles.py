"""Products of AMX's tiles: the plain code in place of the instruction has its bits, so whatever multiplies in tiles is
tested on every CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.kernels.build import SOURCE, VARIANTS
from tests.engine.kernels.test_sanitizers import COMPILER
from tests.engine.kernels.variants import VARIANTS as RUNNABLE

PLAIN = "-DBATON_PLAIN_TILES"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def printed(folder: Path, *flags: str) -> list[str]:
    program, source = folder / "tiles", Path(__file__).with_name("tiles_driver.cpp")
    always = ["-std=c++17", "-O1", "-Wno-psabi", f"-I{SOURCE}"]
    subprocess.run([str(COMPILER), *always, *flags, str(source), "-o", str(program)], check=True, timeout=100)
    done = subprocess.run([program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@needs_compiler
@pytest.mark.skipif("amx" not in RUNNABLE, reason="needs AMX")
def test_plain_tiles_have_the_bits_of_the_instruction(tmp_path: Path) -> None:
    """Sizes of one to all rows, pairs and columns, numbers from normal to denormal."""
    with_instruction = printed(tmp_path, *VARIANTS["amx"])
    assert len(with_instruction) == 54
    assert printed(tmp_path, PLAIN) == with_instruction


@needs_compiler
def test_tiles_touch_no_memory_beside_their_rows(tmp_path: Path) -> None:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    assert len(printed(tmp_path, PLAIN, "-g", *sanitizers)) == 54
