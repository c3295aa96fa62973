from __future__ import annotations

from pydantic import Field

from common.config import Settings


class LMCacheSettings(Settings):
    lmcache_address: str | None = Field(None, description="lmcache: gRPC address of the server, on the same machine")


class LMCacheServerSettings(Settings):
    """Settings of the server that `baton up` starts."""

    lmcache_size_gb: float = Field(
        1.0, gt=0, description="lmcache: memory in GiB of the server, which is started if --lmcache-address is unset"
    )
