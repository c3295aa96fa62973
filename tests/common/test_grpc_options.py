"""What gRPC makes of our options."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined] # compiled, without stubs

from common.grpc import options as grpc_options
from common.grpc.options import Options, client_server_options, worker_server_options

WORKER = worker_server_options(max_message_bytes=1 << 20, max_streams=8)
CLIENTS = client_server_options(max_message_bytes=1 << 20, max_connections=8, max_streams=8)


@pytest.mark.parametrize(
    "options",
    [
        WORKER,
        CLIENTS,
        grpc_options.CHANNEL_OPTIONS,
        grpc_options.CLIENT_CHANNEL_OPTIONS,
        grpc_options.HEALTH_SERVER_OPTIONS,
    ],
)
def test_every_name_is_one_that_grpc_knows_and_given_once(options: Options) -> None:
    """gRPC ignores the others without a word."""
    library = Path(cygrpc.__file__).read_bytes()
    assert len(dict(options)) == len(options)
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []
