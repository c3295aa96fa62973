"""Errors on the gRPC side: Baton's own as rich status, and request bytes that are no valid message.

A `google.rpc.Status` with details goes into the trailing metadata, where `grpc_status` and its like in every language
look for it: BadRequest names the field, RetryInfo says when to try again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar, cast

import grpc
from google.protobuf import duration_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from common.errors import (
    BatonError,
    InvalidArgumentError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)

DETAILS_KEY = "grpc-status-details-bin"

MessageT = TypeVar("MessageT", bound=Message)


def rich_status(error: BatonError) -> status_pb2.Status:
    """The error as every gRPC client library can read it."""
    code = grpc.StatusCode[error.grpc_code]
    status = status_pb2.Status(code=code.value[0], message=error.message)
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


async def abort(context: grpc.aio.ServicerContext[object, object], error: BatonError) -> NoReturn:
    """Ends the call with `error`."""
    status = rich_status(error)
    await context.abort(
        grpc.StatusCode[error.grpc_code],
        error.message,
        trailing_metadata=((DETAILS_KEY, status.SerializeToString()),),
    )
    raise AssertionError("abort always raises")


class BadMessage:
    """Stands for a request that could not be parsed, so that a handler can answer with the reason."""

    def __init__(self, error: InvalidArgumentError) -> None:
        self.error = error


class Parser(Generic[MessageT]):
    """A request deserializer that never fails: gRPC would report a failure as INTERNAL, without a reason."""

    def __init__(self, message_class: type[MessageT]) -> None:
        self._message_class = message_class

    def __call__(self, data: bytes) -> MessageT | BadMessage:
        parse: Callable[[bytes], MessageT] = self._message_class.FromString
        try:
            return parse(data)
        except DecodeError as error:
            field = invalid_utf8_field(cast("Descriptor", self._message_class.DESCRIPTOR), data)
            if field:
                return BadMessage(InvalidArgumentError(field, "is not valid UTF-8"))
            name = self._message_class.DESCRIPTOR.full_name
            return BadMessage(InvalidArgumentError("request", f"is not a valid {name} message: {error}"))


def invalid_utf8_field(descriptor: Descriptor, data: bytes) -> str:
    """Path of the first string field in the wire bytes `data` that is not UTF-8; empty where there is none.

    Walks the wire format (https://protobuf.dev/programming-guides/encoding/) as far as it is well formed.
    """
    try:
        return _find(descriptor, memoryview(data))
    except (IndexError, ValueError):
        return ""


def _find(descriptor: Descriptor, data: memoryview) -> str:
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        field = descriptor.fields_by_number.get(tag >> 3)
        wire_type = tag & 7
        if wire_type == 0:
            _, position = _varint(data, position)
        elif wire_type == 1:
            position += 8
        elif wire_type == 5:
            position += 4
        elif wire_type == 2:
            size, position = _varint(data, position)
            value = data[position : position + size]
            position += size
            if field is None:
                continue
            if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
                return str(field.name)
            if field.message_type is not None and (inner := _find(field.message_type, value)):
                return f"{field.name}.{inner}"
        else:
            raise ValueError(f"wire type {wire_type}")
    return ""


def _is_utf8(value: memoryview) -> bool:
    try:
        bytes(value).decode()
    except UnicodeDecodeError:
        return False
    return True


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
