"""What every test may rely on."""

from __future__ import annotations

import os

# Before anything is imported: a developer's own settings are no part of a test, and nothing is fetched from a hub.
for _name in [name for name in os.environ if name.startswith("BATON_")]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
