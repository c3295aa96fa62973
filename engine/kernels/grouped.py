"""Weights that a file holds quantised, packed for the kernels as they are: codes, and factors that groups share.

The formats and their numbers are those of source/grouped.h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from ctypes import addressof
from dataclasses import dataclass
from enum import IntEnum

import torch

from engine.kernels.library import Kernels, LinearStruct, PackedLinear, WeightKind

GROUPS = (32, 64, 128, 256)
_ROWS = 1024  # that are unpacked at a time; a multiple of any panel
_PARTS_KIND = 6


class Codes(IntEnum):
    """What stands for a weight; all but FP8 (e4m3) are unsigned integers."""

    BITS4 = 0
    BITS5 = 1
    BITS6 = 2
    BITS8 = 3
    FP8 = 4

    @property
    def below_zero(self) -> int:
        """The code of zero if a format has no minimum of its own."""
        return {Codes.BITS4: 8, Codes.BITS5: 16, Codes.BITS6: 32, Codes.BITS8: 128, Codes.FP8: 0}[self]


class Scales(IntEnum):
    """How a group's scale and minimum are written: weight = code * scale + minimum."""

    HALF = 0
    HALF_PAIR = 1
    SINGLE = 2
    SINGLE_PAIR = 3
    TWO_LEVELS = 4
    TWO_SIGNED = 5

    @property
    def head_width(self) -> int:
        """Bytes for a group."""
        return {Scales.HALF: 2, Scales.TWO_SIGNED: 2, Scales.SINGLE_PAIR: 8}.get(self, 4)


@dataclass(slots=True, frozen=True)
class Layout:
    codes: Codes
    scales: Scales
    group: int  # weights of a row that share the first level of factors, one of GROUPS

    @property
    def number(self) -> int:
        return self.codes | self.scales << 4 | self.group << 8


@dataclass(slots=True, frozen=True)
class GroupedRows:
    """Some rows of a weight `[n, k]`, with the factors' bytes as a file writes them."""

    layout: Layout
    codes: torch.Tensor  # uint8 [n, k], one to a byte
    heads: torch.Tensor  # uint8 [n, k / group, head_width]
    blocks: torch.Tensor | None = None  # uint8 [n, k / 32, 2] if factors have two levels

    def dequantize(self) -> torch.Tensor:
        """`[n, k]` float32."""
        n, k = self.codes.shape
        is_fp8 = self.layout.codes is Codes.FP8
        values = (self.codes.view(torch.float8_e4m3fn) if is_fp8 else self.codes).float()
        scale, minimum = self._factors()
        step = k // scale.shape[1]
        values = values.view(n, -1, step) * scale[..., None]
        return (values + minimum[..., None]).view(n, k)

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and minimum, each `[n, k / step]` float32, for steps of 16 or more weights."""
        scales, n = self.layout.scales, self.codes.shape[0]
        is_half = scales not in (Scales.SINGLE, Scales.SINGLE_PAIR)
        numbers = self.heads.contiguous().view(torch.float16 if is_half else torch.float32).float()
        scale, minimum = numbers[..., 0], numbers[..., -1]
        if scales in (Scales.HALF_PAIR, Scales.SINGLE_PAIR):
            return scale, minimum
        if self.blocks is not None:
            parts = self.blocks.view(n, scale.shape[1], -1, 2)
            if scales is Scales.TWO_LEVELS:
                levels = parts.float()
                return (scale[..., None] * levels[..., 0]).flatten(1), (minimum[..., None] * -levels[..., 1]).flatten(1)
            scale = (scale[..., None] * parts.view(torch.int8).float().flatten(2)).flatten(1)
        return scale, scale * -float(self.layout.codes.below_zero)


class QuantizedTensor(ABC):
    """A weight in a file, read in pieces."""

    shape: tuple[int, int]
    layout: Layout

    @abstractmethod
    def rows(self, start: int, stop: int) -> GroupedRows:
        """Some of its rows."""

    def pieces(self) -> list[tuple[int, int]]:
        """Ranges of rows that are read at a time."""
        return [(start, min(start + _ROWS, self.shape[0])) for start in range(0, self.shape[0], _ROWS)]


class PackedGrouped(PackedLinear):
    """A `PackedLinear` on a weight that stays quantised as it came."""

    def __init__(self, kernels: Kernels, tensor: QuantizedTensor) -> None:
        n, k = tensor.shape
        layout = tensor.layout
        if layout.group not in GROUPS or k % layout.group:
            raise ValueError(f"a row of {k} weights has no groups of {layout.group}")
        library = kernels.library
        memory = kernels.arena.allocate(library.baton_grouped_bytes(layout.number, n, k))
        super().__init__(kernels, memory, LinearStruct(memory.address, None, n, k, WeightKind.GROUPED, layout.number))
        for start, stop in tensor.pieces():
            rows = tensor.rows(start, stop)
            codes, heads = rows.codes.contiguous(), rows.heads.contiguous()
            blocks = None if rows.blocks is None else rows.blocks.contiguous()
            library.baton_pack_grouped(
                kernels.team,
                layout.number,
                codes.data_ptr(),
                heads.data_ptr(),
                None if blocks is None else blocks.data_ptr(),
                stop - start,
                k,
                memory.address + library.baton_grouped_bytes(layout.number, start, k),
            )


class PackedParts(PackedLinear):
    """A `PackedLinear` on weights of unlike kinds whose output rows follow each other."""

    def __init__(self, kernels: Kernels, parts: list[PackedLinear]) -> None:
        self._parts = parts
        structs = (LinearStruct * len(parts))(*(part.struct for part in parts))
        self._structs = structs
        n, k = sum(part.out_features for part in parts), parts[0].in_features
        super().__init__(kernels, None, LinearStruct(addressof(structs), None, n, k, _PARTS_KIND, len(parts)))
