"""What every test may rely on, and the tier that it belongs to."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Before anything is imported: a developer's own settings are no part of a test, and nothing is fetched from a hub.
for _name in [name for name in os.environ if name.startswith("BATON_")]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
# Several test processes share the cores, and threads that share busy cores spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("hypothesis"):  # the bare machine of `make test-gpu` may lack it
    import hypothesis

    hypothesis.settings.register_profile("baton", deadline=None)  # no test depends on how fast the machine is
    hypothesis.settings.load_profile("baton")

TIERS = ("abuse", "clients", "gpu", "integration", "kube")
"""Folders whose tests carry the folder's name as a marker. `make test` leaves them out.

`tests/faults` is none of them: it marks single cells of its matrix, since a few cells run in `make test-slow`.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(tests).parts[0]
        if tier in TIERS:
            item.add_marker(tier)
