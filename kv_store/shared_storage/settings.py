from __future__ import annotations

from pydantic import Field

from common.config import Settings


class SharedStorageSettings(Settings):
    kv_dir: str | None = Field(
        None, description="shared_storage: directory that all workers share; lmcache: where `baton up` keeps files"
    )
    kv_dir_size_gb: float | None = Field(
        None, gt=0, description="shared_storage: GiB that --kv-dir may hold; oldest use goes first; unset: no limit"
    )
