from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config import Settings


class NixlSettings(Settings):
    nixl_staging: Literal["auto", "always", "never"] = Field(
        "auto", description="nixl: move KV through host memory; auto: if NIXL cannot register the device's memory"
    )
    nixl_staging_gb: float = Field(1.0, gt=0, description="nixl: GiB of host memory for KV that is staged to be read")
