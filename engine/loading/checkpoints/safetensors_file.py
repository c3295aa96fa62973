"""A safetensors file, read front to back in pieces, the next one while the one before it is used.

Plain reads of megabytes get large folios in the page cache. A mapping whose pages advice asks for ahead of their use
(POSIX_FADV_WILLNEED) gets single pages, which cost three times as much of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from common.errors import StartupError
from common.model_files import read_safetensors_header

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


class SafetensorsFile:
    """An open file. Raises `SafetensorError` or `OSError` if it cannot be read, `StartupError` for what it holds."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as checked:  # the header, against itself and the file's size
            names = checked.offset_keys()
        header, start = read_safetensors_header(path)
        self._places: list[tuple[int, int]] = []  # of pieces: first byte, and how many
        self.tensors = [self._tensor(path, name, header[name], start) for name in names]
        self._stream = path.open("rb", buffering=0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._buffers = [mmap(-1, 1), mmap(-1, 1)]  # for pieces of even number, and of odd; the system gets them back
        self._next: tuple[int, Future[mmap]] | None = None  # what is read ahead

    def _tensor(self, path: Path, name: str, described: Any, start: int) -> TensorInFile:
        dtype = _DTYPES.get(described["dtype"])
        if dtype is None:
            raise StartupError(f"{path}: tensor {name} is {described['dtype']}, which is not supported")
        tensor = TensorInFile(self, name, dtype, tuple(described["shape"]), len(self._places))
        begin, end = (start + offset for offset in described["data_offsets"])
        self._places += [(at, min(tensor.piece_bytes, end - at)) for at in range(begin, end, tensor.piece_bytes)]
        return tensor

    def read(self, number: int) -> tuple[mmap, int]:
        """(memory that begins with the piece of that number, its bytes), until another piece is asked for."""
        if self._next is None or self._next[0] != number:
            self._next = number, self._begin(number)
        buffer = self._next[1].result()
        following = number + 1
        self._next = (following, self._begin(following)) if following < len(self._places) else None
        return buffer, self._places[number][1]

    def _begin(self, number: int) -> Future[mmap]:
        return self._thread.submit(self._read_into, number)

    def _read_into(self, number: int) -> mmap:
        begin, num_bytes = self._places[number]
        if len(self._buffers[number % 2]) < num_bytes:
            self._buffers[number % 2] = mmap(-1, num_bytes)
        buffer, at = self._buffers[number % 2], 0
        self._stream.seek(begin)
        while at < num_bytes:
            num_read = self._stream.readinto(memoryview(buffer)[at:num_bytes])
            if not num_read:
                raise OSError(f"it ends before byte {begin + num_bytes}")
            at += num_read
        return buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._stream.close()


class TensorInFile:
    """A tensor that is read when its pieces are asked for."""

    def __init__(
        self, file: SafetensorsFile, name: str, dtype: torch.dtype, shape: tuple[int, ...], first_piece: int
    ) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self.nbytes = math.prod(shape) * dtype.itemsize
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        multiple = _ROWS_MULTIPLE if len(shape) == 2 else 1
        num_rows = max(_PIECE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
        self.piece_bytes = max(num_rows * row_bytes, 1)
        self._num_rows = num_rows
        self._file, self._first_piece = file, first_piece

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first row, rows `[num_rows, ...]`), in order; without dimensions, all of it. A piece has to be
        done with when the next is asked for. Raises `OSError`."""
        for number in range(-(-self.nbytes // self.piece_bytes)):
            buffer, num_bytes = self._file.read(self._first_piece + number)
            values = torch.frombuffer(buffer, dtype=self.dtype, count=num_bytes // self.dtype.itemsize)
            yield number * self._num_rows, values.view(-1, *self.shape[1:]) if self.shape else values.view(())
