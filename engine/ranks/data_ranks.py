"""Data parallelism: each rank has all of a mixture but its experts, computes attention for some of a step's rows, and
some experts for the tokens of all ranks (`engine.ranks.dealt_experts`).

All ranks are told whole steps and deal them out by the same rule, so each knows which rows the others have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.ranks.group import RankGroup
from engine.step import StepRow


class DataRanks:
    """A `RankGroup` whose ranks have tokens of their own in each step."""

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size, self.num_here = group.rank, group.size, group.num_here
        self.over_network = group.over_network
        self._group = group

    def all_reduce(self, values: torch.Tensor) -> None:
        self._group.all_reduce(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(values)

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        return self._group.all_to_all(rows, counts, num_from)

    def join(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """From this rank's rows `[counts[rank], width]` to all ranks' `[sum(counts), width]`, by rank. What a rank
        sends is as long as the longest part."""
        width, most = own.shape[1], max(counts)
        padded = own.new_zeros(most, width)
        padded[: len(own)] = own
        parts = self._group.all_gather(padded.view(-1)).view(self.size, most, width)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def deal(rows: Sequence[StepRow], size: int, block_size: int, hidden_size: int) -> list[list[int]]:
    """Which rows each rank computes, in order. A row that begins where another row of the step ends, as drafted tokens
    do, needs its KV in the same layer, so both go to one rank. The longest go first, each to the rank with least work.
    """
    ends: dict[tuple[int, int], int] = {}  # by slot of a row's last new token
    for index, row in enumerate(rows):
        ends[_slot(row, row.num_computed_tokens + len(row.token_ids) - 1, block_size)] = index
    heads = list(range(len(rows)))  # the first row of a chain, by row
    for index in sorted(range(len(rows)), key=lambda index: rows[index].num_computed_tokens):
        before = rows[index].num_computed_tokens - 1
        if before >= 0 and (found := ends.get(_slot(rows[index], before, block_size))) is not None:
            heads[index] = heads[found]
    chains: dict[int, list[int]] = {}
    for index, head in enumerate(heads):
        chains.setdefault(head, []).append(index)
    work = {head: sum(_work(rows[index], hidden_size) for index in chain) for head, chain in chains.items()}
    parts: list[list[int]] = [[] for _ in range(size)]
    sums = [0.0] * size
    for head in sorted(chains, key=lambda head: (-work[head], head)):
        rank = sums.index(min(sums))
        parts[rank] += chains[head]
        sums[rank] += work[head]
    return [sorted(part) for part in parts]


def _slot(row: StepRow, position: int, block_size: int) -> tuple[int, int]:
    number, offset = divmod(position, block_size)
    return row.block_ids[number], offset


def _work(row: StepRow, hidden_size: int) -> float:
    """In tokens: attention to `2 * hidden_size` tokens takes about as many products as the projections around it."""
    new = len(row.token_ids)
    return new + new * (row.num_computed_tokens + new / 2) / (2 * hidden_size)
