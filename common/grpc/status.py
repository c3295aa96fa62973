"""Baton's errors as gRPC carries them, both ways. Knows no grpc.

A `google.rpc.Status` with details goes into the trailing metadata, where `grpc_status` and its like in every language
look for it: BadRequest names the field, RetryInfo says when to try again.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import BatonError, error_of
from common.peers import seconds_to_wait

MOST_DELAY_S = 60.0  # that a peer can make others wait
DETAILS_KEY = "grpc-status-details-bin"

MAX_STATUS_BYTES = 1024
"""Limit for the message of a status. Messages travel in headers, several times and encoded, and clients take 8 KiB of
headers by default. If a message is longer, a client only sees that it was too long."""

Metadata = Iterable[tuple[str, str | bytes]]


def rich_status(error: BatonError) -> status_pb2.Status:
    """The error as every gRPC client library can read it."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.grpc_code), message=short(error.message))
    if error.field:
        field = short(error.field, MAX_STATUS_BYTES // 4)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=short(error.reason))
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def short(text: str, most: int = MAX_STATUS_BYTES) -> str:
    """The first `most` bytes of the text, in whole characters. Part of the text may come from a client."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."


def status_details(error: BatonError) -> tuple[tuple[str, bytes], ...]:
    """What goes into a failed call's trailing metadata."""
    return ((DETAILS_KEY, rich_status(error).SerializeToString()),)


def error_of_call(grpc_code: str, message: str, trailing_metadata: Metadata | None) -> BatonError:
    """The error for a failed call. `message` is the call's status message, for a peer that sends no details."""
    field, reason, retry_after_s = "", message, None
    for detail in _status(grpc_code, trailing_metadata).details:
        retry, bad = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        try:
            if detail.Unpack(retry):
                delay = retry.retry_delay  # of any size: it cannot be relied on to be one that Python's own types take
                retry_after_s = seconds_to_wait(delay.seconds + delay.nanos / 1e9, most=MOST_DELAY_S)
            elif detail.Unpack(bad) and bad.field_violations:
                field, reason = bad.field_violations[0].field, bad.field_violations[0].description
        except DecodeError:  # a peer that says no more than its code and message
            continue
    return error_of(grpc_code, reason, field=field, retry_after_s=retry_after_s)


def _status(grpc_code: str, trailing_metadata: Metadata | None) -> status_pb2.Status:
    """The status that the peer sent for this failure; empty if it sent none, or sent one for another failure: a call
    whose deadline passed here may still carry what its peer would have answered."""
    status = status_pb2.Status()
    value = dict(trailing_metadata or ()).get(DETAILS_KEY)
    if isinstance(value, bytes):
        try:
            status.ParseFromString(value)
        except DecodeError:
            return status_pb2.Status()
    return status if status.code == code_pb2.Code.Value(grpc_code) else status_pb2.Status()
