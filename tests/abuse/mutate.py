"""Messages of the protos, and what else can be sent in their place: extreme values, bytes that are changed or cut."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

INTS = (0, 1, -1, 2, 5, 16, 300, 399, 400, 4096, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-38, 1e38, math.inf, -math.inf, math.nan)
TEXTS = (
    "",
    "x",
    "Hello, how are you?",
    "\x00",
    "a\nb",
    "\u202e",
    "😀" * 50,
    "<|im_end|>",
    "../../etc/passwd",
    "%s%n",
    "{}",
)
JSON_FIELDS = ("arguments", "parameters", "chat_template_kwargs", "json_schema", "structural_tag")
JSONS = (
    "{}",
    '{"x": 1}',
    '{"x":[' + "1," * 100_000 + "1]}",
    '{"x":' * 100 + "1" + "}" * 100,
    '{"x":[' + "{}," * 9_000 + "1]}",
)
ROLES = ("user", "system", "assistant", "tool", "")
MAX_DEPTH = 4
MOST_BYTES = 8 * 2**20
"""Of the entries of one field. A port refuses a message of twice its limit (4 MiB, the router's) like any larger one.
One of a gigabyte takes seconds to make, in which no other thread has a turn."""
Make = Callable[[random.Random], object]
M = TypeVar("M", bound=Message)


def message_of(rng: random.Random, descriptor: Descriptor, depth: int = 0) -> Message:
    """Any of its fields, with values that its wire type can hold."""
    message: Message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if rng.random() < 0.5:
            _fill(rng, message, field, depth)
    return message


def any_of(rng: random.Random, kind: type[M]) -> M:
    """As `message_of`, of a class."""
    descriptor: Descriptor = kind.DESCRIPTOR  # type: ignore[assignment]  # of one of two implementations
    message = message_of(rng, descriptor)
    assert isinstance(message, kind)
    return message


def _fill(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries, (key_field, value_field) = getattr(message, field.name), field.message_type.fields
        for _ in range(rng.randrange(5)):
            key = _value(rng, key_field)
            if value_field.message_type is None:
                entries[key] = _value(rng, value_field)
            elif depth < MAX_DEPTH:
                entries[key].CopyFrom(message_of(rng, value_field.message_type, depth + 1))
    elif field.message_type is not None:
        if depth < MAX_DEPTH:
            inner = message_of(rng, field.message_type, depth + 1)
            if field.is_repeated:
                getattr(message, field.name).extend([inner] * _most(_length(rng), inner.ByteSize()))
            else:
                getattr(message, field.name).CopyFrom(inner)
    elif field.is_repeated:
        values = [_value(rng, field) for _ in range(min(_length(rng), 50))]
        times = 1 if rng.random() < 0.9 else 100
        num_bytes = sum(len(value) for value in values if isinstance(value, str | bytes))
        getattr(message, field.name).extend(values * _most(times, num_bytes))
    else:
        setattr(message, field.name, _value(rng, field))


def _most(times: int, num_bytes: int) -> int:
    """How often so many bytes can be there: once at least."""
    return min(times, max(1, MOST_BYTES // max(1, num_bytes)))


def _length(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 5, 20, 1000)) if rng.random() < 0.5 else 1


def _value(rng: random.Random, field: FieldDescriptor) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([n for n in INTS if -(2**31) <= n < 2**31])
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice([n for n in INTS if 0 <= n < 2**32])
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice([n for n in INTS if -(2**63) <= n < 2**63])
        case FieldDescriptor.CPPTYPE_UINT64:
            return rng.choice([n for n in INTS if n >= 0])
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 16, 1000)))
    if field.name == "role":
        return rng.choice(ROLES)
    if field.name in JSON_FIELDS and rng.random() < 0.5:
        return rng.choice(JSONS)
    return rng.choice(TEXTS) * rng.choice((1, 1, 1, 50, 5000))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """As it is in every second case; else with some bytes changed, cut, doubled or put in."""
    if rng.random() < 0.5:
        return data
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0:
                changed[at : at + 1] = rng.randbytes(1)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = changed[: rng.randrange(50)]
            case 3:
                changed[at:at] = _odd_field(rng)
            case 4:
                changed[at:at] = rng.randbytes(rng.randrange(200))
            case _:
                del changed[at : at + rng.randrange(20)]
    return bytes(changed)


def _odd_field(rng: random.Random) -> bytes:
    """A known number with any wire type, and lengths that lie."""
    tag = bytes([rng.randrange(1, 16) << 3 | rng.randrange(8)])
    match rng.randrange(4):
        case 0:
            return tag + b"\xff" * rng.choice((1, 9, 10, 11, 100))  # a number without end
        case 1:
            return tag + b"\xff\xff\xff\xff\x07" + b"x" * 10  # two GiB, it says
        case 2:
            return tag + struct.pack("<d", rng.choice(FLOATS))
        case _:
            return bytes([rng.randrange(1, 16) << 3 | 3]) * 200  # groups in groups
