"""What the processes that compute one model together ask of each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_WAIT_S = 300.0
"""Default bound of one collective of a `GlooGroup`: others may still read their weights."""


class RankGroup(Protocol):
    """One process's place among those that compute one model together.

    All ranks ask for the same collectives, with tensors of the same shape and dtype, in the same order: each waits for
    all others. Tensors lie on the device that the rank computes on. Only the thread that computes may ask.
    """

    rank: int  # of `size`, from 0
    size: int

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sums `values` over all ranks in place. They are float32, bfloat16 or float16, and contiguous; added in
        float32 in the order of ranks and rounded once, so all ranks get the same bits."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """From `[..., n]` of any dtype to `[..., size * n]`, contiguous: the ranks' values in the order of ranks."""


class OneRank:
    """A process that computes the whole model."""

    rank = 0
    size = 1

    def all_reduce(self, values: torch.Tensor) -> None:
        """There is nothing to add."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


class AddingGroup(ABC):
    """Every rank gets the values of all others, and adds them up itself: an all-reduce sends `size` times as many bytes
    as it has to."""

    rank: int
    size: int

    def all_reduce(self, values: torch.Tensor) -> None:
        total = torch.zeros(values.shape, dtype=torch.float32)
        for part in self._parts_of(values):
            total.add_(part)
        values.copy_(total)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._parts_of(values), dim=-1)

    @abstractmethod
    def _parts_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `values`."""


class GlooGroup(AddingGroup):
    """Ranks that talk over sockets, on one host or several. The reference that other groups are compared with."""

    def __init__(self, store: Store, rank: int, size: int, *, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        """Meets the other ranks by `store`, for instance a `torch.distributed.TCPStore`. A collective that takes
        `longest_wait_s` raises `RuntimeError`, as one does whose peer has gone."""
        from torch.distributed import ProcessGroupGloo

        self.rank, self.size = rank, size
        self._group = ProcessGroupGloo(store, rank, size, timedelta(seconds=longest_wait_s))

    def _parts_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """They travel as bytes, since Gloo doesn't know all dtypes."""
        own = values.cpu().contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([parts], [own]).wait()  # type: ignore[attr-defined]  # missing in torch's stubs
        return [part.view(values.dtype).view(values.shape).to(values.device) for part in parts]
