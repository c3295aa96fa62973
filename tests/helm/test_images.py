"""The Dockerfiles: linted, and kept to what the chart relies on."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helm.chart import render

IMAGES = Path(__file__).parents[2] / "images"
NAMES = ("router", "cpu", "cuda", "lmcache")
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def stages(name: str) -> list[list[str]]:
    """Instructions of each build stage, a line each."""
    text = re.sub(r"\\\n(\s*#.*\n)*", " ", (IMAGES / f"Dockerfile.{name}").read_text())
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("FROM "):
            found.append([])
        if found and line and not line.startswith("#"):
            found[-1].append(line)
    return found


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_lint(name: str) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(IMAGES / f"Dockerfile.{name}")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_from_a_network(name: str) -> None:
    for line in itertools.chain(*stages(name)):
        assert not re.search(r"\b(apt|apt-get|curl|wget|git)\b", line), line
        if "pip --python" in line:
            assert "--no-index" in line
            assert "source=wheels" in line


@pytest.mark.parametrize("name", NAMES)
def test_last_stage_runs_as_the_charts_user_without_build_tools(name: str) -> None:
    last = stages(name)[-1]
    users = {
        one["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
        for one in render()
        if one["kind"] == "Deployment"
    }
    assert [line for line in last if line.startswith("USER ")] == [f"USER {users.pop()}:65532"]
    (removal,) = (line for line in last if line.startswith("RUN "))
    assert removal.startswith("RUN rm -rf ")
    assert "pip" in removal


@pytest.mark.parametrize("name", NAMES)
def test_code_is_compiled_for_a_root_that_cannot_be_written(name: str) -> None:
    assert "compileall -q -j 0 --invalidation-mode unchecked-hash" in " ".join(itertools.chain(*stages(name)))


def test_build_refuses_an_image_that_is_not_there() -> None:
    done = subprocess.run([str(IMAGES / "build"), "rocm"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no image rocm" in done.stderr


@pytest.mark.parametrize(
    ("name", "tag", "warns"), [("cpu", "any", True), ("cpu", "linux_x86_64", False), ("router", "any", False)]
)
def test_build_warns_if_the_wheel_has_no_kernels(name: str, tag: str, warns: bool, tmp_path: Path) -> None:
    build = tmp_path / "images" / "build"
    build.parent.mkdir()
    shutil.copy(IMAGES / "build", build)
    python, builder = tmp_path / "python", tmp_path / "builder"
    python.write_text(  # pip of the one wheel that counts; anything else it is asked for is the version
        f'#!/bin/sh\n[ "$2" = pip ] || {{ echo 3.12; exit; }}\ntouch "$6/baton_serve-1.0-py3-none-{tag}.whl"\n'
    )
    builder.write_text("#!/bin/sh\n")
    for one in (python, builder):
        one.chmod(0o755)
    done = subprocess.run(
        [str(build), name],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHON": str(python), "BUILDER": str(builder), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob(f"build/images/{name}/wheels/baton_serve-*-{tag}.whl"))
    assert ("no CPU kernels were compiled" in done.stderr) == warns


def test_build_says_when_nothing_can_build() -> None:
    done = subprocess.run(
        [str(IMAGES / "build"), "router"],
        capture_output=True,
        text=True,
        check=False,
        env={"BUILDER": "no-such-builder", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert "no-such-builder" in done.stderr
