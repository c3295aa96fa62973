"""What a user imports: `from baton import LLM, Client, AsyncClient`. Nothing is loaded before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.client.async_client import AsyncClient
    from baton.client.messages import Message, Tool
    from baton.client.sync_client import Client
    from baton.offline.llm import LLM
    from baton.offline.params import SamplingParams
    from common.beam_search import BeamSearchParams
    from common.cache_hints import Retain
    from common.targets import LatencyTargets

__all__ = [
    "LLM",
    "AsyncClient",
    "BeamSearchParams",
    "Client",
    "LatencyTargets",
    "Message",
    "Retain",
    "SamplingParams",
    "Tool",
]

_PLACES = {
    "AsyncClient": "baton.client.async_client",
    "BeamSearchParams": "common.beam_search",
    "Client": "baton.client.sync_client",
    "LLM": "baton.offline.llm",
    "LatencyTargets": "common.targets",
    "Message": "baton.client.messages",
    "Retain": "common.cache_hints",
    "SamplingParams": "baton.offline.params",
    "Tool": "baton.client.messages",
}


def __getattr__(name: str) -> object:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
