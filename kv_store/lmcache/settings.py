from __future__ import annotations

from pydantic import Field

from common.config import Settings


class LMCacheSettings(Settings):
    lmcache_address: str | None = Field(None, description="lmcache: gRPC address of the server, on the same machine")
