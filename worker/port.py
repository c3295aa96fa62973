"""Limits of a worker's port."""

from __future__ import annotations

import json
from pathlib import Path

from common.config import WorkerSettings
from common.grpc.options import (
    MAX_PEERS,
    REQUEST_OTHER_BYTES,
    REQUEST_TOKEN_BYTES,
    Options,
    worker_server_options,
)
from common.process.open_files import allow_open_files

MOST_POSITIONS = 2**20  # if config.json does not say how many
OTHER_CALLS = 256  # of those that watch and ask
OTHER_OPEN_FILES = 1024  # other workers, the store, connections that are about to be refused


def server_limits(settings: WorkerSettings, model_dir: Path) -> tuple[Options, int]:
    """Options of the gRPC server, and how many calls it has at a time.

    One connection may have as many calls as the engine may have requests, so that further calls are refused instead of
    waiting. Two connections together may have twice as many. Raises the limit of open files to the number of
    connections.
    """
    allow_open_files(MAX_PEERS + OTHER_OPEN_FILES)
    options = worker_server_options(
        max_message_bytes=max_message_bytes(settings, model_dir), max_streams=_max_streams(settings)
    )
    return options, max_calls(settings)


def max_calls(settings: WorkerSettings) -> int:
    """How many calls there may be at a time, in all connections; also the limit of calls in `DecodeMany` streams."""
    return 2 * _max_streams(settings)


def _max_streams(settings: WorkerSettings) -> int:
    return settings.max_waiting_requests + settings.max_num_seqs + OTHER_CALLS


def max_message_bytes(settings: WorkerSettings, model_dir: Path) -> int:
    """Bytes of the largest message: token ids that fill the model's context. The port is bound before the engine has
    read the model."""
    return REQUEST_TOKEN_BYTES * (settings.max_model_len or _positions(model_dir)) + REQUEST_OTHER_BYTES


def _positions(model_dir: Path) -> int:
    """Ignores a wrong file: the engine reads it, too, and reports it."""
    try:
        positions = json.loads((model_dir / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, LookupError, TypeError):
        return MOST_POSITIONS
    return positions if isinstance(positions, int) and positions > 0 else MOST_POSITIONS
