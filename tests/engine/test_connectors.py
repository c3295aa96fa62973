"""Connectors that a worker's settings name."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.settings import WORKER_SETTINGS
from common.config import WorkerSettings
from engine.connectors import create_connectors


@pytest.mark.parametrize("of_command", [True, False])
def test_settings_of_single_connectors_are_found(of_command: bool, tmp_path: Path) -> None:
    """In the settings of a command, and in those that its engine's process gets."""
    given = WORKER_SETTINGS.model_validate(
        {"model": "m", "connector": "shared_storage", "kv_dir": str(tmp_path / "kv"), "kv_dir_size_gb": 1}
    )
    settings = given if of_command else WorkerSettings.model_validate_json(given.model_dump_json())
    connector, store = create_connectors(settings, epoch="e", worker_id="w")
    assert (connector.name, store) == ("shared_storage", None)
    assert (tmp_path / "kv").is_dir()
