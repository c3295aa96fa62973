"""What the processes that compute one model together ask of each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work
    from torch.distributed import ProcessGroupGloo

LONGEST_WAIT_S = 300.0
"""Default bound of one collective of a `GlooGroup`: others may still read their weights."""
WHOLE_SUM_BYTES = 32 << 10
"""Up to so many bytes each rank adds up all values itself. Of more, each adds up a part and sends the sums to the
others. `exchange.cpp` has the same number."""


class RankGroup(Protocol):
    """One process's place among those that compute one model together.

    All ranks ask for the same collectives, with tensors of the same shape and dtype, in the same order: each waits for
    all others. Only in `all_to_all` they may have unlike numbers of rows. Tensors lie on the device that the rank
    computes on. Only the thread that computes may ask.
    """

    rank: int  # of `size`, from 0
    size: int
    num_here: int  # of them, those on this host, this one included: they share its memory
    over_network: bool  # values are sent; in memory that ranks share they are copied

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sums `values` over all ranks in place. They are float32, bfloat16 or float16, and contiguous; added in
        float32 in the order of ranks and rounded once, so all ranks get the same bits."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """From `[..., n]` of any dtype to `[..., size * n]`, contiguous: the ranks' values in the order of ranks."""

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Sends each rank rows of its own. `rows` `[sum(counts), width]` of any dtype: the first `counts[0]` are for
        rank 0, and so on; all ranks have the same width. Returns the rows for this rank `[sum(num_from), width]`,
        contiguous, in the order of the ranks that sent them, and how many each sent. `num_from`: the same numbers, if
        they are known: some groups would have to ask for them. Wrong ones raise an error."""
        ...


class OneRank:
    """A process that computes the whole model."""

    rank = 0
    size = 1
    num_here = 1
    over_network = False

    def all_reduce(self, values: torch.Tensor) -> None:
        """There is nothing to add."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def all_to_all(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        num_from: Sequence[int] | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, list[int]]:
        return rows, list(counts)


class GlooCollectives(ABC):
    """Ranks that talk by Gloo over sockets. What is added up, each rank adds up itself from all ranks' values, so all
    have the same bits."""

    rank: int
    size: int
    num_here: int
    over_network = True
    _group: ProcessGroupGloo

    def all_reduce(self, values: torch.Tensor) -> None:
        if self.size == 2 or values.nbytes <= WHOLE_SUM_BYTES:
            values.copy_(_sum(self._parts_of(values)))
            return
        flat = values.view(-1)
        width = -(-len(flat) // self.size)
        counts = [len(flat[rank * width : (rank + 1) * width]) for rank in range(self.size)]
        own = counts[self.rank]
        parts, _ = self.all_to_all(flat[:, None], counts, [own] * self.size)
        sums = flat.new_zeros(width)
        sums[:own] = _sum(parts.view(self.size, own).unbind())
        flat.copy_(self.all_gather(sums)[: len(flat)])

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._parts_of(values), dim=-1)

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        if num_from is None:
            ones = [1] * self.size
            num_from = self._exchange(torch.tensor(counts)[:, None], ones, ones).flatten().tolist()
        return self._exchange(rows, counts, num_from), list(num_from)

    def _parts_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `values`."""
        own = _as_bytes(values)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [own]))  # type: ignore[attr-defined]  # missing in torch's stubs
        return [part.view(values.dtype).view(values.shape).to(values.device) for part in parts]

    def _exchange(self, rows: torch.Tensor, counts: Sequence[int], num_from: Sequence[int]) -> torch.Tensor:
        """The rows of `all_to_all`."""
        width = rows.shape[1]
        row_bytes = width * rows.itemsize
        came = torch.empty(sum(num_from) * row_bytes, dtype=torch.uint8)
        sizes = ([num * row_bytes for num in of_ranks] for of_ranks in (num_from, counts))
        self._wait(self._group.alltoall_base(came, _as_bytes(rows), *sizes))  # type: ignore[attr-defined]  # likewise
        return came.view(rows.dtype).view(-1, width).to(rows.device)

    @abstractmethod
    def _wait(self, work: Work) -> None:
        """Until a collective has ended. Raises what it failed with."""


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32, in their order."""
    total = torch.zeros(parts[0].shape, dtype=torch.float32)
    for part in parts:
        total.add_(part)
    return total


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """All of `values`, `[num_bytes]`, as Gloo doesn't know all dtypes."""
    return values.cpu().contiguous().view(-1).view(torch.uint8)


class GlooGroup(GlooCollectives):
    """Ranks of one host that talk over sockets. The reference that other groups are compared with."""

    def __init__(self, store: Store, rank: int, size: int, *, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        """Meets the other ranks by `store`, for instance a `torch.distributed.TCPStore`. A collective that takes
        `longest_wait_s` raises `RuntimeError`, as one does whose peer has gone."""
        from torch.distributed import ProcessGroupGloo

        self.rank, self.size, self.num_here = rank, size, size
        self._group = ProcessGroupGloo(store, rank, size, timedelta(seconds=longest_wait_s))

    def _wait(self, work: Work) -> None:
        work.wait()
