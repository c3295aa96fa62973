"""How long a context the KV cache has room for."""

from __future__ import annotations

import logging

from common.config import EngineSettings
from common.errors import StartupError

log = logging.getLogger(__name__)


def fit_context(max_model_len: int, num_blocks: int, settings: EngineSettings) -> int:
    """Limits the context so that one request of the full length fits into the cache: otherwise it could never
    finish."""
    capacity = num_blocks * settings.block_size
    if capacity >= max_model_len:
        return max_model_len
    if settings.max_model_len is not None:
        raise StartupError(
            f"a KV cache of {num_blocks} blocks holds {capacity} tokens, less than --max-model-len {max_model_len}; "
            "lower it or raise --num-blocks or --kv-cache-memory-gb"
        )
    log.warning(
        "the KV cache is smaller than the model's context, shortening the context",
        extra={"max_model_len": capacity, "model_positions": max_model_len},
    )
    return capacity
