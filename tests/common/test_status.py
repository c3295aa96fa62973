"""What a failed call says."""

from __future__ import annotations

from google.protobuf import any_pb2
from google.rpc import code_pb2, status_pb2

from common.errors import UnavailableError
from common.grpc.status import error_of_call


def test_details_that_cannot_be_read_are_left_out() -> None:
    rubbish = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
    status = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="busy", details=[rubbish])
    error = error_of_call("UNAVAILABLE", "busy", (("grpc-status-details-bin", status.SerializeToString()),))
    assert isinstance(error, UnavailableError)
    assert str(error) == str(UnavailableError("busy"))
    assert error.retry_after_s == UnavailableError("busy").retry_after_s
