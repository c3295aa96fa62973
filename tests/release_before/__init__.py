"""Today's processes made into those of the release before, as far as calls between them go: no `DecodeMany`.

Python reads `sitecustomize` of PYTHONPATH as it starts, so a folder of these makes any process that is started with it
an older one, in a pod as well as here.
"""

from __future__ import annotations

from pathlib import Path

VARIABLE = "PYTHONPATH"
MODULE = "sitecustomize.py"


def folder(component: str) -> Path:
    """Of `decode` workers, or of a `router`."""
    return Path(__file__).parent / component
