"""A router of the release before, which asks workers by `Decode` alone."""

from __future__ import annotations

import grpc

from protos.baton.v1 import decode_pb2
from router.fleet.decode_stream import DecodeStreams, SingleCall


def call(
    streams: DecodeStreams,
    channel: grpc.aio.Channel,
    incarnation: tuple[str, str],
    request: decode_pb2.DecodeRequest,
    timeout_s: float,
) -> SingleCall:
    return SingleCall(channel, request, timeout_s)


DecodeStreams.call = call
