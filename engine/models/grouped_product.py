"""Rows times the matrix of the group that each is in, on a device, without a wait to learn how large the groups are."""

from __future__ import annotations

import torch

_TILE = 64  # rows of one group that are multiplied together, at most
_GATHERED_BYTES = 256 << 20


class Groups:
    """Which rows belong to which group. All of it stays on the device."""

    def __init__(self, group_of_row: torch.Tensor, num_groups: int, gathered_bytes: int = _GATHERED_BYTES) -> None:
        """`group_of_row` `[num_rows]` int64, sorted. `gathered_bytes`: of matrices that are copied at a time."""
        self.of_row = group_of_row
        self._gathered_bytes = gathered_bytes
        self._numbers = torch.arange(num_groups, device=group_of_row.device)
        self.ends = torch.searchsorted(group_of_row, self._numbers, right=True)
        self.starts = torch.searchsorted(group_of_row, self._numbers)

    def multiply(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[num_rows, in_features]` times `weights` `[num_groups, out_features, in_features]`."""
        if has_grouped_mm(weights):
            out: torch.Tensor = torch._grouped_mm(x, weights.transpose(1, 2), offs=self.ends.int())
            return out
        return self._in_tiles(x, weights)

    def _in_tiles(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Each group's rows fill tiles of their own. How many tiles there are at most is known beforehand; those that
        are left over are empty."""
        num_rows, num_groups = len(x), len(weights)
        size = min(_TILE, max(8, 1 << (num_rows // num_groups).bit_length()))
        num_tiles = num_rows // size + min(num_groups, num_rows)
        tiles = (self.ends - self.starts + size - 1) // size
        tile_ends = tiles.cumsum(0)
        within = torch.arange(num_rows, device=x.device) - self.starts[self.of_row]
        place = (tile_ends - tiles)[self.of_row] * size + within
        rows = x.new_zeros(num_tiles * size, x.shape[1])
        rows[place] = x
        group = torch.searchsorted(tile_ends, torch.arange(num_tiles, device=x.device), right=True)
        group.clamp_(max=num_groups - 1)
        at_once = max(1, self._gathered_bytes // (weights[0].numel() * weights.element_size()))
        tiled = rows.view(num_tiles, size, -1)
        products = []
        for start in range(0, num_tiles, at_once):
            some = slice(start, start + at_once)
            products.append(torch.bmm(tiled[some], weights[group[some]].transpose(1, 2)))
        return torch.cat(products).flatten(0, 1)[place]


def has_grouped_mm(weights: torch.Tensor) -> bool:
    """Whether this torch has a kernel for such weights on their device. For others its `_grouped_mm` reads the groups'
    ends, and so waits for the device."""
    return (
        hasattr(torch, "_grouped_mm")
        and weights.device.type == "cuda"
        and torch.version.cuda is not None
        and weights.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in weights.shape[1:])
        and torch.cuda.get_device_capability(weights.device)[0] in (9, 10)
    )
