"""How much a worker's port takes in."""

from __future__ import annotations

import json
from pathlib import Path

from common.config import WorkerSettings
from common.grpc_options import (
    MAX_PEERS,
    REQUEST_OTHER_BYTES,
    REQUEST_TOKEN_BYTES,
    Options,
    worker_server_options,
)
from common.open_files import allow_open_files

MOST_POSITIONS = 2**20  # if config.json does not say how many
OTHER_CALLS = 256  # of those that watch and ask
OTHER_OPEN_FILES = 1024  # other workers, the store, connections that are about to be refused


def server_limits(settings: WorkerSettings, model_dir: Path) -> tuple[Options, int]:
    """Options of the gRPC server, and how many calls it has at a time.

    The calls of one connection are as many as the engine may have in hand, so that what is too much is refused and does
    not wait; two connections may bring as many together. Makes room for as many open files as it may have connections.
    """
    allow_open_files(MAX_PEERS + OTHER_OPEN_FILES)
    options = worker_server_options(
        max_message_bytes=max_message_bytes(settings, model_dir), max_streams=_max_streams(settings)
    )
    return options, max_calls(settings)


def max_calls(settings: WorkerSettings) -> int:
    """At a time, in all connections; and of those that come in streams of many, too."""
    return 2 * _max_streams(settings)


def _max_streams(settings: WorkerSettings) -> int:
    return settings.max_waiting_requests + settings.max_num_seqs + OTHER_CALLS


def max_message_bytes(settings: WorkerSettings, model_dir: Path) -> int:
    """Bytes of the largest message: token ids that fill the model's context. The port is bound before the engine has
    read the model."""
    return REQUEST_TOKEN_BYTES * (settings.max_model_len or _positions(model_dir)) + REQUEST_OTHER_BYTES


def _positions(model_dir: Path) -> int:
    """A file that is wrong is no error here: the engine reads it, too, and reports it."""
    try:
        positions = json.loads((model_dir / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, LookupError, TypeError):
        return MOST_POSITIONS
    return positions if isinstance(positions, int) and positions > 0 else MOST_POSITIONS
