"""Tensors of the Open Inference Protocol v2: texts, flags and numbers, as one value after the other or as raw bytes.

Raw: values in row-major order, little endian; each of type BYTES begins with its length in four bytes ("binary tensor
data" of Triton's protocol extensions).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from common.errors import InvalidArgumentError

Value = bytes | bool | int | float

_FORMATS = {"BOOL": "?", "UINT32": "I", "FP32": "f"}  # of the datatypes that are known here, besides BYTES
_LENGTH = struct.Struct("<I")


@dataclass(slots=True, frozen=True)
class Tensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Value, ...]

    def raw(self) -> bytes:
        """Its values, as raw bytes."""
        if self.datatype == "BYTES":
            texts = cast("Sequence[bytes]", self.values)
            return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))
        return struct.pack(f"<{len(self.values)}{_FORMATS[self.datatype]}", *self.values)


def vector(name: str, datatype: str, values: Sequence[Value]) -> Tensor:
    return Tensor(name, datatype, (len(values),), tuple(values))


def one_value(tensor: Tensor, datatype: str) -> Value:
    """The value of a tensor that must have one of this type. Raises `InvalidArgumentError`."""
    if tensor.datatype != datatype:
        raise InvalidArgumentError(tensor.name, f"must have datatype {datatype}, not {tensor.datatype[:20]!r}")
    if len(tensor.shape) > 2 or any(size != 1 for size in tensor.shape):
        raise InvalidArgumentError(tensor.name, f"must have shape [1], not {list(tensor.shape)[:8]}")
    check_one_value(tensor.name, len(tensor.values))
    return tensor.values[0]


def check_one_value(name: str, num: int) -> None:
    """Each input has exactly one value. Ask before values are copied: a message has room for millions of flags. Raises
    `InvalidArgumentError`."""
    if num != 1:
        raise InvalidArgumentError(name, f"must have one value, not {num}")


def text_of(tensor: Tensor) -> str:
    """The text of a tensor that must have one. Raises `InvalidArgumentError`."""
    try:
        return cast("bytes", one_value(tensor, "BYTES")).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(tensor.name, "is not valid UTF-8") from error


def value_of_raw(name: str, datatype: str, data: bytes) -> Value:
    """The value of an input. Raises `InvalidArgumentError` if `data` does not hold exactly one, or if inputs have no
    such datatype."""
    if datatype == "BOOL":
        check_one_value(name, len(data))
        return data != b"\0"
    if datatype == "BYTES":
        return _text_of_raw(name, data)
    raise InvalidArgumentError(name, f"has datatype {datatype[:20]!r}: take BYTES for texts and BOOL for flags")


def _text_of_raw(name: str, data: bytes) -> bytes:
    begin = _LENGTH.size
    if len(data) < begin:
        raise InvalidArgumentError(name, f"has {len(data)} bytes: a text begins with its length in {begin} bytes")
    (num_bytes,) = _LENGTH.unpack_from(data)
    if begin + num_bytes > len(data):
        raise InvalidArgumentError(name, f"ends inside a text of {num_bytes} bytes")
    if begin + num_bytes < len(data):
        raise InvalidArgumentError(name, f"must have one value: more follows a text of {num_bytes} bytes")
    return data[begin:]
