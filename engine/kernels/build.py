"""Compiles the kernels, once for each instruction set: `python -m engine.kernels.build` (`make install` does).

A compiler that lacks an instruction set leaves that one out; without any compiler nothing is built, and Baton computes
with torch. Imports neither torch nor the rest of Baton: setup.py runs this in an environment that has neither.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).parent
SOURCE = PACKAGE / "source"
FEATURES = "features"  # the library that says what the CPU has
EXCHANGE = "exchange"  # the one that ranks of a host meet in; needs none of the other sources
X86_64, ARM64 = ("x86_64", "amd64"), ("aarch64", "arm64")

# In the order in which they are preferred, the last first.
VARIANTS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": ("-march=x86-64-v4",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "amx": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "neon": ("-march=armv8.2-a",),
    "neon_bf16": ("-march=armv8.2-a+bf16",),
}
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)
_TIMEOUT_S = 300


@functools.cache  # an engine that starts asks for each variant
def source_hash(name: str = "") -> str:
    """Names the sources of library `name`, so that libraries of other sources are never loaded. All have the same, but
    for `EXCHANGE`."""
    own = SOURCE / f"{EXCHANGE}.cpp"
    digest = hashlib.blake2b(digest_size=6)
    for file in [own] if name == EXCHANGE else sorted(set(SOURCE.glob("*.*")) - {own}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    digest.update(repr((VARIANTS, _FLAGS)).encode())
    return digest.hexdigest()


def library_file(name: str, folder: Path = PACKAGE) -> Path:
    """Where the library of variant `name` lies if it was built from the sources of today."""
    return folder / "lib" / f"{name}-{source_hash(EXCHANGE if name == EXCHANGE else '')}.so"


def build(folder: Path = PACKAGE) -> dict[str, str]:
    """Builds what is missing into `folder`/lib. Returns what could not be built, each with the compiler's reason."""
    machine = platform.machine().lower()
    names = [name for name in VARIANTS if machine in (ARM64 if name.startswith("neon") else X86_64)]
    missing = [name for name in [FEATURES, EXCHANGE, *names] if not library_file(name, folder).exists()]
    if not missing or not names:
        return {} if names else {"any": f"there are no kernels for {machine}"}
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        return dict.fromkeys(missing, "there is no C++ compiler (g++, clang++ or CXX)")
    library_file(FEATURES, folder).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = pool.map(lambda name: _compile(compiler, name, folder), missing)
    kept = {library_file(name, folder) for name in [FEATURES, EXCHANGE, *VARIANTS]}
    for file in set(library_file(FEATURES, folder).parent.glob("*.so")) - kept:
        file.unlink()
    return {name: reason for name, reason in zip(missing, reasons, strict=True) if reason}


def _compile(compiler: str, name: str, folder: Path) -> str:
    """Returns why it failed, if it did. A library appears whole or not at all."""
    target = library_file(name, folder)
    source = SOURCE / (f"{name}.cpp" if name in (FEATURES, EXCHANGE) else "kernels.cpp")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [*compiler.split(), *_FLAGS, *VARIANTS.get(name, ()), str(source), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit status {done.returncode}"]
            return lines[0]
        output.replace(target)
    return ""


def main() -> None:
    failed = build()
    for name, reason in failed.items():
        print(f"kernels: {name} not built: {reason}", file=sys.stderr)  # noqa: T201
    if failed:
        print("kernels: Baton works without them, on torch, and slower", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
