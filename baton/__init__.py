"""What a user imports: `from baton import Client`. Nothing is loaded before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from baton.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
