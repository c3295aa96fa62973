"""Clients as people have them, in an environment of their own (`make clients`), against a real stack."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import DEFAULT_MODEL, default_cache_dir
from engine.embedded_model import ensure_model, package_is_installed
from tests.integration.stack import Stack, running
from tests.router.chat_templates import HERMES

pytestmark = pytest.mark.clients
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("use_*.py"))
TIMEOUT_S = 280
MODEL = "with-tools"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded model, which knows no tools, with a chat template that writes them out."""
    if not PYTHON.exists():
        pytest.skip("there is no .venv-clients: `make clients` installs it")
    if not package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    folder = tmp_path_factory.mktemp("clients")
    model = folder / MODEL
    model.mkdir()
    for file in ensure_model(DEFAULT_MODEL, default_cache_dir(), print).iterdir():
        if file.name != "chat_template.jinja":
            (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(HERMES)
    one = Stack(folder, f"--model={model}")
    with running(one):
        yield one


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_stock_client(stack: Stack, script: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-W", "ignore", script, f"{stack.http}/v1", MODEL],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stack.settle()
