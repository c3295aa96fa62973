"""The types of GGUF as the kernels' formats: `https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h`.

A row is a run of blocks. Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 have 32 weights in a block, Q4_K, Q5_K and Q6_K have 256. All
other types are computed as 8-bit integers with a scale for 64 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import torch

from common.errors import StartupError
from engine.kernels.grouped import Codes, GroupedRows, Layout, QuantizedTensor, Scales
from engine.loading.checkpoints.gguf_file import GgufTensor

Bytes = npt.NDArray[np.integer[Any]]  # uint8 all of them; stubs of shifts say otherwise
Type: TypeAlias = gguf.GGMLQuantizationType

_BLOCK, _SUPER_BLOCK, _INT8_GROUP = 32, 256, 64
PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def _nibbles(packed: Bytes) -> Bytes:
    """`[..., size]` to `[..., 2 * size]`: the low 4 bits of all, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _high_bits(words: Bytes) -> Bytes:
    """Bit i of 4 bytes belongs to weight i. Moves it to the place of a code's fifth bit: `[..., 32]`."""
    bits: Bytes = np.unpackbits(words.astype(np.uint8, copy=False), axis=-1, bitorder="little") << 4
    return bits


def _k_scales(packed: Bytes) -> Bytes:
    """Scales and minimums of 6 bits each from 12 bytes: `[..., 8, 2]`."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((low & 63, (rest & 15) | (low >> 6 << 4)), axis=-1)
    minimums = np.concatenate((high & 63, (rest >> 4) | (high >> 6 << 4)), axis=-1)
    return np.stack((scales, minimums), axis=-1)


# Each reader takes blocks `[n, blocks, bytes]`, and returns codes `[n, blocks, weights]`, heads, and the second level
# or None.
Parts = tuple[Bytes, Bytes, Bytes | None]


def _q4_0(b: Bytes) -> Parts:
    return _nibbles(b[..., 2:]), b[..., :2], None


def _q4_1(b: Bytes) -> Parts:
    return _nibbles(b[..., 4:]), b[..., :4], None


def _q5_0(b: Bytes) -> Parts:
    return _nibbles(b[..., 6:]) | _high_bits(b[..., 2:6]), b[..., :2], None


def _q5_1(b: Bytes) -> Parts:
    return _nibbles(b[..., 8:]) | _high_bits(b[..., 4:8]), b[..., :4], None


def _q8_0(b: Bytes) -> Parts:
    return b[..., 2:] ^ 128, b[..., :2], None


def _q4_k(b: Bytes) -> Parts:
    codes = _nibbles(b[..., 16:].reshape(*b.shape[:2], 4, 32))
    return codes.reshape(*b.shape[:2], -1), b[..., :4], _k_scales(b[..., 4:16])


def _q5_k(b: Bytes) -> Parts:
    low = _nibbles(b[..., 48:].reshape(*b.shape[:2], 4, 32)).reshape(*b.shape[:2], 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (b[..., None, 16:48] >> shifts & 1) << 4
    return (low | high).reshape(*b.shape[:2], -1), b[..., :4], _k_scales(b[..., 4:16])


def _q6_k(b: Bytes) -> Parts:
    low = _nibbles(b[..., :128].reshape(*b.shape[:2], 2, 64)).reshape(*b.shape[:2], 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32) >> shifts & 3) << 4
    return (low | high).reshape(*b.shape[:2], -1), b[..., 208:], b[..., 192:208]


_FORMATS: dict[Type, tuple[Layout, Callable[[Bytes], Parts]]] = {
    Type.Q4_0: (Layout(Codes.BITS4, Scales.HALF, _BLOCK), _q4_0),
    Type.Q4_1: (Layout(Codes.BITS4, Scales.HALF_PAIR, _BLOCK), _q4_1),
    Type.Q5_0: (Layout(Codes.BITS5, Scales.HALF, _BLOCK), _q5_0),
    Type.Q5_1: (Layout(Codes.BITS5, Scales.HALF_PAIR, _BLOCK), _q5_1),
    Type.Q8_0: (Layout(Codes.BITS8, Scales.HALF, _BLOCK), _q8_0),
    Type.Q4_K: (Layout(Codes.BITS4, Scales.TWO_LEVELS, _SUPER_BLOCK), _q4_k),
    Type.Q5_K: (Layout(Codes.BITS5, Scales.TWO_LEVELS, _SUPER_BLOCK), _q5_k),
    Type.Q6_K: (Layout(Codes.BITS6, Scales.TWO_SIGNED, _SUPER_BLOCK), _q6_k),
}
COMPUTED_AS_THEY_ARE = frozenset(_FORMATS)


class GgufRows(QuantizedTensor):
    """A quantised matrix of a file, whose rows may be wanted in another `order` than the file's."""

    def __init__(self, tensor: GgufTensor, order: npt.NDArray[np.int64] | None = None) -> None:
        if len(tensor.shape) != 2:
            raise StartupError(f"{tensor.path}: tensor {tensor.name} is {tensor.kind.name} and no matrix")
        self.shape = (tensor.shape[0], tensor.shape[1])
        self._name = f"{tensor.path}: tensor {tensor.name}"
        self._kind, self._order = tensor.kind, order
        self._data = np.memmap(tensor.path, np.uint8, "r", tensor.start, (tensor.shape[0], tensor.row_bytes))
        self._format = _FORMATS.get(tensor.kind)
        group = _INT8_GROUP if self.shape[1] % _INT8_GROUP == 0 else _BLOCK
        self.layout = Layout(Codes.BITS8, Scales.SINGLE, group) if self._format is None else self._format[0]

    def rows(self, start: int, stop: int) -> GroupedRows:
        raw: Bytes = self._data[start:stop] if self._order is None else self._data[self._order[start:stop]]
        if self._format is None:
            return self._as_int8(raw)
        block_bytes = gguf.GGML_QUANT_SIZES[self._kind][1]
        codes, heads, levels = self._format[1](np.asarray(raw).reshape(stop - start, -1, block_bytes))
        n, k = stop - start, self.shape[1]
        return GroupedRows(
            self.layout,
            torch.from_numpy(codes.reshape(n, k)),
            torch.from_numpy(np.ascontiguousarray(heads)),
            None if levels is None else torch.from_numpy(np.ascontiguousarray(levels).reshape(n, k // _BLOCK, 2)),
        )

    def _as_int8(self, raw: Bytes) -> GroupedRows:
        try:
            values = torch.from_numpy(gguf.quants.dequantize(raw, self._kind).astype(np.float32, copy=False))
        except NotImplementedError as error:
            raise StartupError(f"{self._name} has type {self._kind.name}, which gguf cannot read") from error
        grouped = values.view(values.shape[0], -1, self.layout.group)
        scale = grouped.abs().amax(-1, keepdim=True) / 127
        codes = (grouped / scale.where(scale > 0, torch.ones(()))).round().add_(128).to(torch.uint8)
        return GroupedRows(self.layout, codes.view(values.shape), scale.contiguous().view(torch.uint8))


def plain_tensor(tensor: GgufTensor) -> torch.Tensor:
    """A tensor that is not quantised, on the file's own memory."""
    data = torch.from_numpy(np.memmap(tensor.path, np.uint8, "c", tensor.start, (tensor.num_bytes,)))
    return data.view(PLAIN[tensor.kind]).view(tensor.shape)
