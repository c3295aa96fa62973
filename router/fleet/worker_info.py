"""Checks what a worker says of itself. A router takes its limits from a worker. A worker that is broken or was taken
over must not be able to lift these limits, or to keep the router from serving.
"""

from __future__ import annotations

import functools
import logging

from common.batch_time import BatchTime
from common.batch_time_file import decode
from protos.baton.v1 import worker_pb2

log = logging.getLogger(__name__)

MAX_TOKENS = 2**24  # of a context, or of a vocabulary: beyond any model
MAX_BLOCK_SIZE = 2**16
MAX_EOS_TOKENS = 1024
MAX_NAME_CHARS = 1024
MAX_MODEL_BYTES = 2**20  # of a model of time, which has some ten thousand
SURE_SOURCES = ("file", "learned")  # a model of some quick steps at start is too rough to compare workers by
NAMES = (
    *("worker_id", "epoch", "model", "fingerprint", "fingerprint_but_dtype"),
    *("dtype", "dtype_reason", "device", "device_reason", "kernels", "kernels_reason"),
)


def batch_time_of(info: worker_pb2.WorkerInfo) -> BatchTime | None:
    """How long the worker's steps take, if it said that and is sure of it. A model of a newer schema is none."""
    said = info.batch_time
    if not said.model or said.source not in SURE_SOURCES:
        return None
    try:
        if len(said.model) > MAX_MODEL_BYTES:
            raise ValueError(f"it has {len(said.model)} bytes")
        return _decoded(said.model)
    except ValueError as error:
        extra = {"worker_id": info.worker_id[:MAX_NAME_CHARS], "reason": str(error)}
        log.warning("a worker's model of time is not used", extra=extra)
        return None


@functools.lru_cache(maxsize=256)
def _decoded(model: bytes) -> BatchTime:
    """One object for equal models, so that workers which have it are alike to `router.fleet.fleet`."""
    return decode(model)


def false_info(info: worker_pb2.WorkerInfo) -> str:
    """Which value of `info` is impossible; empty if none is."""
    for name, value, most in (
        ("max_model_len", info.max_model_len, MAX_TOKENS),
        ("vocab_size", info.vocab_size, MAX_TOKENS),
        ("block_size", info.block_size, MAX_BLOCK_SIZE),
    ):
        if not 1 <= value <= most:
            return f"says that its {name} is {value}"
    for name in NAMES:
        if len(getattr(info, name)) > MAX_NAME_CHARS:
            return f"says a {name} of more than {MAX_NAME_CHARS} characters"
    if not info.model:
        return "says no model"
    if len(info.eos_token_ids) > MAX_EOS_TOKENS or any(token >= info.vocab_size for token in info.eos_token_ids):
        return "says eos_token_ids that are too many, or outside its vocabulary"
    return ""
