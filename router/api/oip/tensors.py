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
    if any(size != 1 for size in tensor.shape) or len(tensor.shape) > 2:
        raise InvalidArgumentError(tensor.name, f"must have shape [1], not {list(tensor.shape)[:8]}")
    if len(tensor.values) != 1:
        raise InvalidArgumentError(tensor.name, f"must have one value, not {len(tensor.values)}")
    return tensor.values[0]


def text_of(tensor: Tensor) -> str:
    """The text of a tensor that must have one. Raises `InvalidArgumentError`."""
    try:
        return cast("bytes", one_value(tensor, "BYTES")).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(tensor.name, "is not valid UTF-8") from error


def values_of_raw(name: str, datatype: str, data: bytes) -> tuple[Value, ...]:
    """Raises `InvalidArgumentError` if `data` does not hold whole values, or if the datatype is not known here."""
    if datatype == "BYTES":
        return _texts_of_raw(name, data)
    if datatype not in _FORMATS:
        raise _unknown(name, datatype)
    one = struct.Struct(f"<{_FORMATS[datatype]}")
    if len(data) % one.size:
        raise InvalidArgumentError(name, f"has {len(data)} bytes, which are no whole values of {datatype}")
    return tuple(value for (value,) in one.iter_unpack(data))


def _texts_of_raw(name: str, data: bytes) -> tuple[bytes, ...]:
    texts = []
    position = 0
    while position < len(data):
        begin = position + _LENGTH.size
        if begin > len(data):
            raise InvalidArgumentError(name, "ends inside the length of a text")
        position = begin + _LENGTH.unpack_from(data, position)[0]
        if position > len(data):
            raise InvalidArgumentError(name, f"ends inside a text of {position - begin} bytes")
        texts.append(data[begin:position])
    return tuple(texts)


def _unknown(name: str, datatype: str) -> InvalidArgumentError:
    return InvalidArgumentError(name, f"has datatype {datatype[:20]!r}: take BYTES for texts and BOOL for flags")
