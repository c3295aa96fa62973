"""Clients as people have them, in an environment of their own (`make clients`), against a real stack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.integration.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("use_*.py"))
RUNS = {
    **{script.stem: (PYTHON, script) for script in SCRIPTS},
    "newest_openai": (Path(sys.executable), Path(__file__).parent / "scripts" / "use_openai.py"),
}
"""Frameworks ask for an older `openai` than the one that Baton is developed with."""
TIMEOUT_S = 280
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
}
"""Clients fetch nothing, and tell nobody of what they do."""


@pytest.mark.parametrize("name", RUNS)
def test_a_stock_client(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("there is no .venv-clients: `make clients` installs it")
    stack: Stack = request.getfixturevalue("stack")
    python, script = RUNS[name]
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "LANGCHAIN_", "LANGSMITH_", "HF_"))
    }
    done = subprocess.run(
        [python, "-W", "ignore", script, f"{stack.http}/v1", MODEL, stack.grpc],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=script.parent,
        env={**own, **OFFLINE, "HF_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stack.settle()
