"""Stock command-line tools for gRPC, found by $KUBEBUILDER_ASSETS. Tests of one that is not there are skipped."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest


def tool(name: str) -> str:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"$KUBEBUILDER_ASSETS has no {name}")
    return str(Path(folder) / name)


def output(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def grpcurl(address: str, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of the answer, with the names that fields have in .proto files."""
    text = output(tool("grpcurl"), "-plaintext", "-d", json.dumps(request), address, method)
    messages, position = [], 0
    while (start := text.find("{", position)) >= 0:
        message, position = json.JSONDecoder().raw_decode(text, start)
        messages.append(message)
    return messages
