"""A decode worker of the release before, which serves `Decode` and answers UNIMPLEMENTED to `DecodeMany`."""

from __future__ import annotations

import grpc

from common.grpc.server import add_handlers
from protos.baton.v1 import decode_pb2, decode_pb2_grpc


def add_decode_alone(servicer: decode_pb2_grpc.DecodeServiceServicer, server: grpc.aio.Server) -> None:
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.Decode,
        request_deserializer=decode_pb2.DecodeRequest.FromString,
        response_serializer=decode_pb2.DecodeEvent.SerializeToString,
    )
    name = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name
    add_handlers(server, name, {"Decode": handler})


decode_pb2_grpc.add_DecodeServiceServicer_to_server = add_decode_alone
