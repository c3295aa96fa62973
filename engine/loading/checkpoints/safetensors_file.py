"""A safetensors file, read front to back in pieces, the next one while the one before it is used. Of tensors of which
only a part is wanted, no other bytes are read.

Plain reads of megabytes get large folios in the page cache. A mapping whose pages advice asks for ahead of their use
(POSIX_FADV_WILLNEED) gets single pages, which cost three times as much of the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from common.errors import StartupError
from common.model_files import read_safetensors_header
from engine.loading.checkpoints.part import Part

_PIECE_BYTES = 8 << 20  # about as many; smaller and larger pieces were slower, as more of them ahead were
_ROWS_MULTIPLE = 256  # of a matrix; a multiple of any panel, so that each piece begins one
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(slots=True, frozen=True, order=True)
class _Run:
    """Bytes of the file: `count` times `num_bytes`, whose beginnings are `stride` apart."""

    begin: int
    num_bytes: int
    count: int = 1
    stride: int = 0


def _whole(_name: str) -> Part | None:
    return None


class SafetensorsFile:
    """An open file. Raises `SafetensorError` or `OSError` if it cannot be read, `StartupError` for what it holds."""

    def __init__(self, path: Path, part_of: Callable[[str], Part | None] = _whole) -> None:
        """`part_of` says by a tensor's name which part of it is wanted; None: all of it."""
        with safe_open(path, framework="pt") as checked:  # the header, against itself and the file's size
            names = checked.offset_keys()
        header, start = read_safetensors_header(path)
        self._places: list[tuple[_Run, ...]] = []  # of pieces
        self.tensors = [self._tensor(path, name, header[name], start, part_of(name)) for name in names]
        self.num_bytes_read = 0  # of tensors, and no piece twice
        self._stream = path.open("rb", buffering=0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._buffers = [mmap(-1, 1), mmap(-1, 1)]  # for pieces of even number, and of odd; the system gets them back
        self._next: tuple[int, Future[mmap]] | None = None  # what is read ahead

    def _tensor(self, path: Path, name: str, described: Any, start: int, part: Part | None) -> TensorInFile:
        dtype = _DTYPES.get(described["dtype"])
        if dtype is None:
            raise StartupError(f"{path}: tensor {name} is {described['dtype']}, which is not supported")
        tensor = TensorInFile(self, name, dtype, tuple(described["shape"]), len(self._places), part)
        self._places += tensor.runs(start + described["data_offsets"][0])
        return tensor

    def read(self, number: int) -> tuple[mmap, int]:
        """(memory that begins with the piece of that number, its bytes), until another piece is asked for."""
        if self._next is None or self._next[0] != number:
            self._next = number, self._begin(number)
        buffer = self._next[1].result()
        following = number + 1
        self._next = (following, self._begin(following)) if following < len(self._places) else None
        return buffer, self._num_bytes(number)

    def _num_bytes(self, number: int) -> int:
        return sum(run.num_bytes * run.count for run in self._places[number])

    def _begin(self, number: int) -> Future[mmap]:
        return self._thread.submit(self._read_into, number)

    def _read_into(self, number: int) -> mmap:
        num_bytes = self._num_bytes(number)
        if len(self._buffers[number % 2]) < num_bytes:
            self._buffers[number % 2] = mmap(-1, num_bytes)
        buffer, view, at = self._buffers[number % 2], memoryview(self._buffers[number % 2]), 0
        for run in self._places[number]:
            for index in range(run.count):
                self._read_at(run.begin + index * run.stride, view[at : at + run.num_bytes])
                at += run.num_bytes
        self.num_bytes_read += num_bytes
        return buffer

    def _read_at(self, offset: int, into: memoryview) -> None:
        at, num_bytes = 0, len(into)
        while at < num_bytes:
            num_read = os.preadv(self._stream.fileno(), [into[at:]], offset + at)
            if not num_read:
                raise OSError(f"it ends before byte {offset + num_bytes}")
            at += num_read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._stream.close()


class TensorInFile:
    """A tensor, or a part of one, that is read when its pieces are asked for."""

    def __init__(
        self,
        file: SafetensorsFile,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        first_piece: int,
        part: Part | None,
    ) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape  # in the file
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._file, self._first_piece = file, first_piece
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        num_rows = shape[0] if shape else 1
        # What is read is `[_num_rows, *_rest]`.
        self._part, self._num_rows, self._rest = part, num_rows, shape[1:]
        if part is not None and part.axis == 0:
            self._num_rows = part.size
        elif part is not None:
            self._rest = (part.size,)
        part_row_bytes = math.prod(self._rest) * dtype.itemsize
        multiple = _ROWS_MULTIPLE if len(shape) == 2 else 1
        self._rows_per_piece = max(_PIECE_BYTES // max(part_row_bytes, 1) // multiple, 1) * multiple
        if not part_row_bytes:
            self._num_rows = 0  # there is nothing to read

    def runs(self, begin: int) -> Iterator[tuple[_Run, ...]]:
        """Where each of the pieces lies in the file, the tensor beginning at `begin`."""
        for first in range(0, self._num_rows, self._rows_per_piece):
            last = min(first + self._rows_per_piece, self._num_rows)
            if self._part is not None and self._part.axis == 1:
                ((column, end),) = self._part.ranges
                at = begin + first * self._row_bytes + column * self.dtype.itemsize
                yield (_Run(at, (end - column) * self.dtype.itemsize, last - first, self._row_bytes),)
                continue
            rows = [(first, last)] if self._part is None else self._part.rows(first, last)
            yield tuple(_Run(begin + row * self._row_bytes, (end - row) * self._row_bytes) for row, end in rows)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first row, rows `[num_rows, ...]`), in order, as the part counts them; without dimensions, all
        of it. A piece has to be done with when the next is asked for. Raises `OSError`."""
        for number in range(-(-self._num_rows // self._rows_per_piece)):
            buffer, num_bytes = self._file.read(self._first_piece + number)
            values = torch.frombuffer(buffer, dtype=self.dtype, count=num_bytes // self.dtype.itemsize)
            yield number * self._rows_per_piece, values.view(-1, *self._rest) if self.shape else values.view(())
