"""Between a message and a dataclass that name their fields alike, for everyone who speaks `baton.v1`.

A field that only one side has stays at its default. An enum's value is WORKER_STATE_READY on the wire for "ready" of
`WorkerState`. Messages for single tokens are converted by hand (`protos.convert`): there are very many of them.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT", bound="DataclassInstance")

_first_look = threading.Lock()
_known_classes: set[type[object]] = set()


def given_fields(message: Message) -> dict[str, object]:
    """The fields that are set, as plain values: tuples, dictionaries for maps and messages, words for enums."""
    return {field.name: _plain(field, value) for field, value in message.ListFields()}


def value_of(message: Message, value_class: type[ValueT]) -> ValueT:
    """`value_class` with the fields that are set; the others take its defaults."""
    given = given_fields(message)
    if value_class in _known_classes:
        return msgspec.convert(given, value_class)
    with _first_look:  # msgspec crashes the process if two threads bring it a class for the first time
        value = msgspec.convert(given, value_class)
        _known_classes.add(value_class)
        return value


def message_of(value: DataclassInstance, message_class: type[MessageT], **others: object) -> MessageT:
    """`others` are fields of the message that `value` lacks. None leaves a field unset."""
    given = msgspec.to_builtins(value, builtin_types=(bytes,))
    return message_class(**_wired(cast("Descriptor", message_class.DESCRIPTOR), given), **others)


# ---------------------------------------------------------------------------------------------- from the wire


def _plain(field: FieldDescriptor, value: object) -> object:
    if (values := _map_values(field)) is not None:
        return {key: _plain_one(values, one) for key, one in cast("Mapping[object, object]", value).items()}
    if field.is_repeated:
        return tuple(_plain_one(field, one) for one in cast("Iterable[object]", value))
    return _plain_one(field, value)


def _plain_one(field: FieldDescriptor, value: object) -> object:
    if isinstance(value, Message):
        return given_fields(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(cast("int", value))
        return None if known is None else known.name.removeprefix(_prefix(field.enum_type)).lower()
    return value


# ------------------------------------------------------------------------------------------------ to the wire


def _wired(descriptor: Descriptor, given: Mapping[str, object]) -> dict[str, object]:
    fields, wired = _fields(descriptor), {}
    for name, value in given.items():
        if name in fields:
            field = fields[name]
            wired[name] = value if field is None or value is None else _wired_field(field, value)
    return wired


@functools.cache
def _fields(descriptor: Descriptor) -> dict[str, FieldDescriptor | None]:
    """The fields by name; None for a field whose value goes on the wire as it is."""
    return {field.name: field if field.message_type or field.enum_type else None for field in descriptor.fields}


def _wired_field(field: FieldDescriptor, value: object) -> object:
    if (values := _map_values(field)) is not None:
        return {key: _wired_one(values, one) for key, one in cast("Mapping[object, object]", value).items()}
    if field.is_repeated:
        return [_wired_one(field, one) for one in cast("Iterable[object]", value)]
    return _wired_one(field, value)


def _wired_one(field: FieldDescriptor, value: object) -> object:
    if field.message_type is not None:
        return _wired(field.message_type, cast("Mapping[str, object]", value))
    if field.enum_type is not None:
        return _prefix(field.enum_type) + cast("str", value).upper()
    return value


def _map_values(field: FieldDescriptor) -> FieldDescriptor | None:
    """The values' field, if the field is a map."""
    entry = field.message_type
    return entry.fields_by_name["value"] if entry is not None and entry.GetOptions().map_entry else None


def _prefix(enum: EnumDescriptor) -> str:
    """WORKER_STATE_ for WorkerState."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
