"""The live page in a browser, against a real stack."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.test_clients import PYTHON, TIMEOUT_S
from tests.integration.stack import Stack

SCRIPT = Path(__file__).parent / "scripts" / "watch_page.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def test_the_page_in_a_browser(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        pytest.skip("there is no Chromium: Debian's package is `chromium`")
    if not PYTHON.exists():
        pytest.skip("there is no .venv-clients: `make clients` installs it")
    stack: Stack = request.getfixturevalue("stack")
    done = subprocess.run(
        [PYTHON, SCRIPT, stack.http, chromium, tmp_path], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stack.settle()
