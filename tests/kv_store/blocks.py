"""Blocks of the tests of connectors. Loads nothing heavy: processes that a test starts and kills import it."""

from __future__ import annotations

from common.types import KVCacheSpec

SPEC = KVCacheSpec(
    model_id="conformance", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16"
)  # 768 bytes per block
PATIENCE_S = 60.0  # until a test gives up; nothing is expected to take that long


def name_of(number: int) -> bytes:
    """A block hash."""
    return number.to_bytes(16, "big")
