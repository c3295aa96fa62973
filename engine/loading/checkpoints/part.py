"""The part of a checkpoint's tensor that a rank has, when several compute one model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from common.errors import StartupError
from engine.kernels.grouped import GroupedRows, QuantizedTensor


@dataclass(slots=True, frozen=True)
class Part:
    """Rows of a tensor (`axis` 0), or neighbouring columns of a matrix (`axis` 1)."""

    axis: int
    ranges: tuple[tuple[int, int], ...]  # ascending, first and behind the last; of columns one

    @property
    def size(self) -> int:
        """Rows or columns in all."""
        return sum(stop - start for start, stop in self.ranges)

    @classmethod
    def of_rows(cls, ranges: Iterable[tuple[int, int]]) -> Part:
        """Ascending ranges of rows; neighbours become one."""
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            if joined and joined[-1][1] == start:
                start, _ = joined.pop()
            joined.append((start, stop))
        return cls(0, tuple(joined))

    def is_all_of(self, size: int) -> bool:
        return self.ranges == ((0, size),)

    def rows(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where rows `start` to `stop` of this part of rows lie in the whole."""
        found: list[tuple[int, int]] = []
        at = 0  # in the part
        for first, end in self.ranges:
            begin, behind = max(start, at), min(stop, at + end - first)
            if begin < behind:
                found.append((first + begin - at, first + behind - at))
            at += end - first
        return found

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        pieces = [tensor.narrow(self.axis, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)


NOTHING = Part(0, ((0, 0),))


class PartOfQuantized(QuantizedTensor):
    """A part of a matrix that stays quantised. Columns are whole groups of it: a factor belongs to one rank."""

    def __init__(self, whole: QuantizedTensor, part: Part, name: str) -> None:
        """`name` of the matrix, for the `StartupError` if columns cut a group in two."""
        n, k = whole.shape
        self._whole, self._part = whole, part
        self.layout = whole.layout
        self.shape = (part.size, k) if part.axis == 0 else (n, part.size)
        group = self.layout.group
        if part.axis == 1 and any(bound % group for bounds in part.ranges for bound in bounds):
            raise StartupError(
                f"{name} is quantised in groups of {group} weights, which cannot be cut: a rank would have weights "
                f"{part.ranges[0][0]} to {part.ranges[0][1] - 1} of a row; take another --tensor-parallel-size"
            )

    def rows(self, start: int, stop: int) -> GroupedRows:
        if self._part.axis == 0:
            found = [self._whole.rows(*each) for each in self._part.rows(start, stop)]
            has_blocks = found[0].blocks is not None
            return GroupedRows(
                self.layout,
                torch.cat([each.codes for each in found]),
                torch.cat([each.heads for each in found]),
                torch.cat([each.blocks for each in found if each.blocks is not None]) if has_blocks else None,
            )
        rows = self._whole.rows(start, stop)
        ((first, end),) = self._part.ranges
        columns = rows.codes.shape[1]

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            width = columns // tensor.shape[1]  # weights that share an entry
            return tensor[:, first // width : end // width]

        blocks = None if rows.blocks is None else cut(rows.blocks)
        return GroupedRows(self.layout, cut(rows.codes), cut(rows.heads), blocks)
