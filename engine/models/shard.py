"""Which heads, experts, part of the MLPs and tokens' rows of a decoder one rank has (tensor and expert parallelism).

    q k v, gate up      by rows: each rank computes some of their results
    o, down             by columns: each rank computes a summand of all results; an all-reduce adds them up
    embedding           by rows: a rank gives zeros for tokens of others; an all-reduce adds them up
    head                by rows: each rank has some tokens' logits; an all-gather joins them
    norms, router       whole, on every rank
    experts             like an MLP each; or dealt out whole (expert parallelism): a rank computes the rows of its own

Ranks that are more than the KV heads share them: with 2 heads, ranks 0 and 1 of 4 both keep head 0. The product's name
for columns of results is rows of the weight, as a weight is `[out_features, in_features]`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from common.errors import StartupError
from engine.layers import Linear, Place, place_of_part
from engine.loading.checkpoints.part import NOTHING, Part
from engine.models.description import DecoderConfig
from engine.ranks.data_ranks import DataRanks
from engine.ranks.dealt_experts import DealtExperts, OfOwnTokens, OfSameTokens
from engine.ranks.group import OneRank, RankGroup

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Span:
    """What a rank has of things that are counted."""

    start: int
    stop: int
    whole: int  # of all ranks

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> Span:
        """The same of rows, if each thing has `width`."""
        return Span(self.start * width, self.stop * width, self.whole * width)

    def part(self, axis: int) -> Part:
        return Part(axis, ((self.start, self.stop),))


@dataclass(slots=True, frozen=True)
class Shard:
    """A rank's part of a model."""

    group: RankGroup
    config: DecoderConfig  # of this part: with its heads and inner sizes, and the whole vocabulary
    heads: Span
    kv_heads: Span
    inner: Span  # of an MLP
    experts: Span  # that it has a part of, or all; none if the model has none
    expert_inner: Span  # of each of those
    vocabulary: Span  # rows of embedding and head; equal on all ranks but for the last ones, which have fewer
    dealt: DealtExperts | None = None  # of each layer, if ranks have some experts whole; None: a part of each
    data_ranks: DataRanks | None = None  # ranks that have all but experts whole, and tokens of their own

    @property
    def kv_shard(self) -> tuple[int, int]:
        """(which part of the KV heads this rank keeps, of how many): several ranks may keep the same."""
        return self.kv_heads.start // self.kv_heads.size, self.kv_heads.whole // self.kv_heads.size

    @property
    def rows_per_rank(self) -> int:
        """Rows of the vocabulary that the first rank has."""
        return -(-self.vocabulary.whole // self.group.size)

    @property
    def adds_biases(self) -> bool:
        """Whether this rank is the one that adds the biases of products that are summed over all ranks."""
        return self.group.rank == 0


def dealing_flag(group: RankGroup) -> str:
    """The flag that asks for experts to be dealt out over these ranks, and its value."""
    name = "--data-parallel-size" if isinstance(group, DataRanks) else "--expert-parallel-size"
    return f"{name} {group.size}"


def dealt_out(num_experts: int, group: RankGroup) -> Span:
    """The experts that this rank has whole. Raises `StartupError` if one of the ranks has none."""
    size, rank = group.size, group.rank
    if num_experts < size:
        raise StartupError(f"{dealing_flag(group)} leaves a rank without any of {num_experts} experts")
    return Span(rank * num_experts // size, (rank + 1) * num_experts // size, num_experts)


def dealt_experts(num_experts: int, group: RankGroup) -> DealtExperts:
    """How a layer's experts that are dealt out over these ranks come to their tokens."""
    return (OfOwnTokens if isinstance(group, DataRanks) else OfSameTokens)(group, num_experts)


def log_dealt_out(experts: Span) -> None:
    extra = {"experts": f"{experts.start} to {experts.stop - 1}", "of": experts.whole}
    log.info("this rank has some experts of each layer, whole", extra=extra)


def shard_of(whole: DecoderConfig, group: RankGroup, *, deals_experts: bool = False) -> Shard:
    """`deals_experts`: each rank has some experts whole, in place of a part of each. Raises `StartupError` that names
    what the ranks cannot share evenly."""
    if isinstance(group, DataRanks):
        if whole.experts is None:
            raise StartupError(
                f"--data-parallel-size {group.size}: this model has no experts; start more workers instead"
            )
        alone = shard_of(whole, OneRank())
        num_experts = whole.experts.num_experts
        return replace(
            alone,
            experts=dealt_out(num_experts, group),
            dealt=dealt_experts(num_experts, group),
            data_ranks=group,
        )
    size, rank = group.size, group.rank
    flag = f"--tensor-parallel-size {size}"

    def split(count: int, what: str) -> Span:
        if count % size:
            raise StartupError(f"{flag} does not divide {count} {what}")
        return Span(rank * count // size, (rank + 1) * count // size, count)

    heads = split(whole.num_heads, "attention heads")
    num_kv = whole.num_kv_heads
    if num_kv % size and size % num_kv:
        raise StartupError(f"{flag} is neither a divisor nor a multiple of {num_kv} KV heads")
    first = rank * num_kv // size
    kv_heads = Span(first, first + max(num_kv // size, 1), num_kv)
    has_mlps = whole.experts is None or not all(whole.experts.layers)
    inner = split(whole.inner_size, "inner elements of the MLP") if has_mlps else Span(0, 0, 0)
    dealt = expert_inner = Span(0, 0, 0)
    experts = whole.experts
    if experts is None and deals_experts:
        raise StartupError(f"--expert-parallel-size {size}: this model has no experts")
    if experts is not None and deals_experts:
        dealt = dealt_out(experts.num_experts, group)
        expert_inner = Span(0, experts.inner_size, experts.inner_size)
    elif experts is not None:
        dealt = Span(0, experts.num_experts, experts.num_experts)
        expert_inner = split(experts.inner_size, "inner elements of an expert")
        experts = replace(experts, inner_size=expert_inner.size)
    rows = -(-whole.vocab_size // size)
    if rows * (size - 1) >= whole.vocab_size:
        raise StartupError(f"{flag} leaves a rank without any of {whole.vocab_size} rows of the vocabulary")
    config = replace(whole, num_heads=heads.size, num_kv_heads=kv_heads.size, inner_size=inner.size, experts=experts)
    vocabulary = Span(rank * rows, min((rank + 1) * rows, whole.vocab_size), whole.vocab_size)
    exchange = dealt_experts(experts.num_experts, group) if experts is not None and deals_experts else None
    return Shard(group, config, heads, kv_heads, inner, dealt, expert_inner, vocabulary, exchange)


def places_of_rows(linear: Linear, spans: Mapping[str, Span], merged_name: str = "") -> dict[str, Place]:
    """Where a checkpoint's weights and biases go if `linear` gives the results of several of them next to each other:
    by the name of each, the span of its rows that this rank has. `merged_name`: the checkpoint has all of them in one
    tensor of that name."""
    places: dict[str, Place] = {}
    at = 0
    if merged_name:
        ranges = []
        for span in spans.values():
            ranges.append((at + span.start, at + span.stop))
            at += span.whole
        part = Part.of_rows(ranges)
        return {key: place_of_part(place, part, at) for key, place in linear.places({merged_name: None}).items()}
    for name, span in spans.items():
        for key, place in linear.places({name: (at, at + span.size)}).items():
            places[key] = place_of_part(place, span.part(0), span.whole)
        at += span.size
    return places


def places_of_columns(linear: Linear, name: str, span: Span, *, has_bias: bool = False) -> dict[str, Place]:
    """The same of one product whose results are summed over all ranks. The checkpoint's bias goes to the rank that adds
    it."""
    weight = linear.whole()
    places = {f"{name}.weight": place_of_part(weight, span.part(1), span.whole)}
    if has_bias:
        bias = linear.bias
        nowhere = place_of_part(torch.empty(0), NOTHING, weight.shape[0])
        places[f"{name}.bias"] = nowhere if bias is None else bias
    return places
