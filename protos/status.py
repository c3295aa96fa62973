"""Baton's errors as gRPC carries them, for everyone who serves.

A `google.rpc.Status` with details goes into the trailing metadata, where `grpc_status` and its like in every language
look for it: BadRequest names the field, RetryInfo says when to try again.
"""

from __future__ import annotations

from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import BatonError, InvalidArgumentError, ModelNotFoundError, OverloadedError, UnavailableError

DETAILS_KEY = "grpc-status-details-bin"


def rich_status(error: BatonError) -> status_pb2.Status:
    """The error as every gRPC client library can read it."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.grpc_code), message=error.message)
    if isinstance(error, InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.reason)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, ModelNotFoundError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, OverloadedError | UnavailableError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def status_details(error: BatonError) -> tuple[tuple[str, bytes], ...]:
    """What goes into a failed call's trailing metadata."""
    return ((DETAILS_KEY, rich_status(error).SerializeToString()),)
