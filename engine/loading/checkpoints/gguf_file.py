"""The head of a GGUF file, or of all its parts: metadata, and where each tensor lies.

Read here and not by `gguf.GGUFReader`, which takes a minute for a vocabulary of 262144 tokens. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import gguf

from common.errors import StartupError
from common.gguf_parts import parts_of
from common.model_files import refuse_lfs_pointer

_MAGIC = b"GGUF"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 31  # of anything; more is garbage
_MAX_DEPTH = 4  # of arrays in arrays


@dataclass(slots=True, frozen=True)
class GgufTensor:
    path: Path  # of the file, or of the part that has it
    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it
    kind: gguf.GGMLQuantizationType
    start: int  # bytes from the beginning of that file
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // max(1, self.num_elements // self.shape[-1])

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(slots=True, frozen=True)
class GgufFile:
    path: Path  # the first part if there are several
    metadata: dict[str, object]  # lists of numbers and strings included
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def read_gguf(path: Path) -> GgufFile:
    """All tensors of the model of which `path` is the whole or any part; the metadata are those of the first part.

    Raises `StartupError` in one line if a file is none of GGUF, is cut short, or is not the part that its name says.
    """
    parts = [_read_part(part) for part in parts_of(path)]
    first, tensors = parts[0], dict[str, GgufTensor]()
    for number, part in enumerate(parts):
        count, own_number = part.metadata.get("split.count", 0), part.metadata.get("split.no", 0)
        if (count or 1, own_number) != (len(parts), number):
            own = own_number + 1 if isinstance(own_number, int) else own_number
            raise StartupError(
                f"{part.path} is part {own} of {count or 1} of a model, and its name does not say so; give the parts "
                "the names that llama-gguf-split gives them"
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise StartupError(f"{part.path} has tensor {min(twice)}, which another part has too")
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and total != len(tensors):
        raise StartupError(f"{first.path}: its parts have {len(tensors)} tensors, not {total}; download them again")
    return GgufFile(first.path, first.metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    refuse_lfs_pointer(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _Reader(path, memory).read()
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise StartupError(f"{path} is not a readable GGUF file ({error}); download it again") from error


class _Reader:
    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path, self._memory, self._at = path, memory, 0

    def read(self) -> GgufFile:
        if self._memory[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; known are 2 and 3, little-endian")
        num_tensors, num_keys = self._count(), self._count()
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, {info[0]: self._tensor(*info, data) for info in infos})

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        sizes = [self._count() for _ in range(self._count(most=8, of="I"))]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int, data: int) -> GgufTensor:
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"tensor {name} has type {number}, which this version of gguf does not know") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = 1
        for size in shape:
            count *= size
        if not shape or count == 0 or shape[-1] % block:
            raise ValueError(f"tensor {name} has shape {list(shape)}, type {kind.name} takes blocks of {block}")
        num_bytes = count // block * block_bytes
        if data + offset + num_bytes > len(self._memory):
            raise ValueError(f"it ends within tensor {name}")
        return GgufTensor(self._path, name, shape, kind, data + offset, num_bytes)

    def _number(self, letter: str) -> int:
        (value,) = struct.unpack_from(f"<{letter}", self._memory, self._at)
        self._at += struct.calcsize(f"<{letter}")
        return value  # type: ignore[no-any-return]

    def _count(self, most: int = _MAX_COUNT, of: str = "Q") -> int:
        value = self._number(of)
        if value > most:
            raise ValueError(f"a count of {value}")
        return value

    def _string(self) -> str:
        size = self._count()
        start, self._at = self._at, self._at + size
        if self._at > len(self._memory):
            raise ValueError("it ends within its metadata")
        return self._memory[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int, depth: int = 0) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_DEPTH:
            element, count = self._number("I"), self._count()
            if element in _NUMBERS:
                values = struct.unpack_from(f"<{count}{_NUMBERS[element]}", self._memory, self._at)
                self._at += struct.calcsize(f"<{count}{_NUMBERS[element]}")
                return list(values)
            return [self._value(element, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"metadata of type {kind}")
        return self._number(_NUMBERS[kind])
