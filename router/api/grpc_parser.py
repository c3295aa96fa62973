"""Parses the bytes of a request. An error names the field that is to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from common.errors import InvalidArgumentError

MessageT = TypeVar("MessageT", bound=Message)


class Parser(Generic[MessageT]):
    """A request deserializer. gRPC itself would report a failure as INTERNAL, without a reason."""

    def __init__(self, message_class: type[MessageT]) -> None:
        self._message_class = message_class

    def __call__(self, data: bytes) -> MessageT:
        """Raises `InvalidArgumentError`."""
        parse: Callable[[bytes], MessageT] = self._message_class.FromString
        try:
            return parse(data)
        except DecodeError as error:
            field = invalid_utf8_field(cast("Descriptor", self._message_class.DESCRIPTOR), data)
            if field:
                raise InvalidArgumentError(field, "is not valid UTF-8") from error
            name = self._message_class.DESCRIPTOR.full_name
            raise InvalidArgumentError("request", f"is not a valid {name} message: {error}") from error


def invalid_utf8_field(descriptor: Descriptor, data: bytes) -> str:
    """Path of the first string field in the wire bytes `data` that is not UTF-8; empty if there is none.

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
