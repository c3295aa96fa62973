"""Experts that are dealt out over ranks: which hidden states travel between them.

Of E experts rank r of D has numbers r·E/D to (r+1)·E/D, rounded down. A token's hidden state goes to the ranks whose
experts it chose, once to each, and each sends back one sum, weighed, of what its experts gave. Experts are those of the
sparsely-gated mixture of experts (Shazeer et al., 2017), and this exchange is that of GShard (Lepikhin et al., 2020),
without a capacity: no token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import comb
from typing import Protocol, TypeAlias

import torch

from engine.ranks.group import WHOLE_SUM_BYTES, RankGroup

Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What this rank's experts give to rows: from `x` `[num_tokens, hidden_size]`, `chosen` and `shares` (both
`[num_tokens, per_token]`) to a tensor like `x`."""

_MOST_RANKS_OF_A_TOKEN = 0.5
"""Share of the ranks that may have one of a token's experts, in the mean, if sums are to travel row by row."""


class DealtExperts(Protocol):
    def __call__(self, compute: Compute, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """What the experts of all ranks give to this rank's tokens, like `x` `[num_tokens, hidden_size]`. `chosen`
        int64 has the numbers of experts; one that no expert has counts for nothing. `shares` are floating point. All
        ranks call it in the same order, with `x` of the same width and dtype. What is added up has the bits that
        `RankGroup.all_reduce` gives."""


class OfOwnTokens:
    """`DealtExperts` if each rank has tokens of its own, or none (data ranks).

    Two all-to-alls: tokens go to the ranks whose experts they chose, and sums come back. That is never more than if all
    ranks were given all tokens and added up what they have.
    """

    def __init__(self, group: RankGroup, num_experts: int) -> None:
        self._group = group
        self._stops = stops_of(num_experts, group.size)

    def __call__(self, compute: Compute, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        ranks, tokens = asked_ranks(chosen, self._stops, self._group.size).T.nonzero().unbind(1)
        counts = ranks.bincount(minlength=self._group.size).tolist()
        width, per_token = x.shape[1], chosen.shape[1]
        came, num_from = self._group.all_to_all(_pack(x, chosen, shares)[tokens], counts)
        given = compute(*_unpack(came, x.dtype, width, per_token))
        back, _ = self._group.all_to_all(given, num_from, counts)
        sums = torch.zeros(x.shape, dtype=torch.float32)
        return sums.index_add_(0, tokens, back.float()).to(x.dtype)  # rank by rank


class OfSameTokens:
    """`DealtExperts` if all ranks have the same tokens (expert ranks), so that each computes what chose its experts and
    nothing has to be sent before.

    What they give is added up in one of two ways. An all-reduce sends every row of every rank, also rows of zeros. Or
    each rank adds up some of the tokens: an all-to-all brings it the rows of those ranks that computed something for
    them, and a gather takes the sums to all. All ranks know from `chosen` which rows come.
    """

    def __init__(self, group: RankGroup, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts
        self._stops = stops_of(num_experts, group.size)

    def __call__(self, compute: Compute, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        given = compute(x, chosen, shares)
        if self._group.over_network and sends_rows(given.nbytes, self._num_experts, chosen.shape[1], self._group.size):
            return self.add_up_rows(given, asked_ranks(chosen, self._stops, self._group.size))
        given = given.contiguous()
        self._group.all_reduce(given)
        return given

    def add_up_rows(self, given: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `given` `[num_tokens, hidden_size]`, row by row. `asked` `[num_tokens, size]`: which
        ranks computed something for a token."""
        rank, size = self._group.rank, self._group.size
        num_each = -(-len(given) // size)  # tokens that a rank adds up; the last ones have fewer
        bounds = [min(len(given), number * num_each) for number in range(size + 1)]
        own = asked[bounds[rank] : bounds[rank + 1]]
        counts = [int(asked[start:stop, rank].sum()) for start, stop in pairwise(bounds)]
        came, _ = self._group.all_to_all(given[asked[:, rank]], counts, own.sum(0).tolist())
        sums = torch.zeros((num_each, given.shape[1]), dtype=torch.float32)
        sums.index_add_(0, own.T.nonzero()[:, 1], came.float())  # rank by rank
        gathered = self._group.all_gather(sums.to(given.dtype).view(-1))
        return gathered.view(-1, given.shape[1])[: len(given)]


def sends_rows(num_bytes: int, num_experts: int, per_token: int, size: int) -> bool:
    """Whether ranks of several hosts, which have the same tokens and `num_bytes` of results each, add up row by row.

    An all-reduce of many bytes is two exchanges, of (size - 1) / size of the bytes each: parts to the rank that adds
    them up, and the sums to all. Row by row the first is shorter by the share of ranks that have none of a token's
    experts, which is taken for a router that likes all experts alike. Rows have to be picked out and added up one by
    one, which takes longer than it saves in shared memory (`python -m bench.ranks experts`): it is for networks only.
    Few bytes are one exchange, in which each rank adds up all.
    """
    return num_bytes > WHOLE_SUM_BYTES and share_of_ranks(num_experts, per_token, size) <= _MOST_RANKS_OF_A_TOKEN


@cache
def share_of_ranks(num_experts: int, per_token: int, size: int) -> float:
    """Of `size` ranks, how many have at least one of a token's experts, in the mean: from 1 / size to 1."""
    stops = [0, *stops_of(num_experts, size).tolist()]
    misses = [
        comb(num_experts - (stop - start), per_token) / comb(num_experts, per_token) for start, stop in pairwise(stops)
    ]
    return 1 - sum(misses) / size


def stops_of(num_experts: int, size: int) -> torch.Tensor:
    """`[size]` int64: the number after the last expert of each rank."""
    return torch.tensor([(rank + 1) * num_experts // size for rank in range(size)])


def asked_ranks(chosen: torch.Tensor, stops: torch.Tensor, size: int) -> torch.Tensor:
    """`[num_tokens, size]` bool: which ranks have experts that a token chose."""
    ranks = torch.bucketize(chosen.contiguous(), stops, right=True)  # `size` for a number that no expert has
    return torch.zeros((len(chosen), size + 1), dtype=torch.bool).scatter_(1, ranks, value=True)[:, :size]


def _pack(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Rows of bytes: shares as float32, numbers of experts as int32, `x`, and what makes them 4-byte words."""
    head, num_bytes = 4 * chosen.shape[1], x.shape[1] * x.itemsize
    packed = torch.empty((len(x), 2 * head + -(-num_bytes // 4) * 4), dtype=torch.uint8)
    packed[:, :head].view(torch.float32).copy_(shares)
    packed[:, head : 2 * head].view(torch.int32).copy_(chosen)
    packed[:, 2 * head : 2 * head + num_bytes].view(x.dtype).copy_(x)
    return packed


def _unpack(
    packed: torch.Tensor, dtype: torch.dtype, width: int, per_token: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    head = 4 * per_token
    shares, chosen = packed[:, :head].view(torch.float32), packed[:, head : 2 * head].view(torch.int32)
    x = packed[:, 2 * head : 2 * head + width * dtype.itemsize].view(dtype)
    return x.contiguous(), chosen.long(), shares
