"""Compiles the CPU kernels into the wheel, or in place for an editable installation. All else is in pyproject.toml.

Without a compiler the wheel has none, is as portable as any, and Baton computes with torch.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("engine", "kernels")
build = runpy.run_path(str(KERNELS / "build.py"))["build"]


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        folder = KERNELS if self.editable_mode else Path(self.build_lib) / KERNELS
        for name, reason in build(folder).items():
            sys.stderr.write(f"kernels: {name} not built: {reason}\n")


class WheelWithKernels(bdist_wheel):
    """The libraries are bound to a platform, not to a version of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2] if list(Path().glob(f"build/lib*/{KERNELS}/lib/*.so")) else "any")


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
