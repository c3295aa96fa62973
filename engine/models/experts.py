"""A mixture of experts: each token takes a few of many MLPs, and adds what they give by its shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from engine.kernels.library import Activation, Kernels, PackedMLPs
from engine.layers import ACTIVATE, Linear, Place
from engine.models.description import ExpertsConfig
from engine.models.grouped_product import Groups
from engine.models.shard import Shard, Span, places_of_columns, places_of_rows

Gate = Callable[[torch.Tensor], torch.Tensor]
"""From gates and ups `[num_tokens, 2 * inner_size]` what goes into the second product, `[num_tokens, inner_size]`."""


class ExpertMLPs:
    """Tokens are sorted by expert. On a CPU the kernels take all experts in one call; without kernels, or with a gate
    that they do not know, each expert that somebody chose is one product of its tokens. On a device, which nobody
    waits for to learn who was chosen, all experts are one product by groups."""

    def __init__(
        self,
        gate_ups: Sequence[Linear],
        downs: Sequence[Linear],
        gate: Activation | Gate,
        *,
        stacks: tuple[torch.Tensor, ...] = (),
        span: Span | None = None,
    ) -> None:
        """`gate_ups` give `[num_tokens, 2 * inner_size]`; if `gate` is an activation, the gates first. `stacks`: all
        weights of `gate_ups`, and all of `downs`, each in one tensor, on a device. `span`: which experts these are, on
        a CPU; all of them if it is None."""
        self.gate_ups, self.downs = gate_ups, downs
        self._span = span or Span(0, len(downs), len(downs))
        self._activation = gate if isinstance(gate, Activation) else None
        self._gate: Gate = ACTIVATE[gate] if isinstance(gate, Activation) else gate
        self._stacks = stacks
        self._mlps: PackedMLPs | None = None
        self._mlps_below = 0.0  # tokens; from so many on another implementation is faster

    @property
    def stacks(self) -> tuple[torch.Tensor, ...]:
        """All weights of `gate_ups`, and all of `downs`, on a device; empty elsewhere."""
        return self._stacks

    @property
    def is_one_call(self) -> bool:
        """Whether the kernels take all experts in one call."""
        return self._mlps is not None

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """`x` `[num_tokens, hidden_size]`; `chosen` int64 and `shares`, both `[num_tokens, per_token]`. The result is
        like `x`: what these experts give, nothing of others."""
        per_token = chosen.shape[1]
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        if self._stacks:
            return self._by_groups(x, shares, experts, order)
        num_rows = experts.bincount(minlength=self._span.whole)
        if len(num_rows) > len(self.downs):  # other ranks have the rest
            first, behind = int(num_rows[: self._span.start].sum()), int(num_rows[: self._span.stop].sum())
            if first == behind:
                return torch.zeros_like(x)
            order, num_rows = order[first:behind], num_rows[self._span.start : self._span.stop]
        tokens = order // per_token
        if self._mlps is not None and len(x) < self._mlps_below:
            given = self._mlps(x.float()[tokens], num_rows)
        else:
            given = self._one_by_one(x[tokens], num_rows)
        weighed = (given * shares.flatten()[order, None]).to(x.dtype)
        # A token's experts are added in their order, whatever other tokens are there.
        return torch.zeros_like(x).index_add_(0, tokens, weighed)

    def _one_by_one(self, gathered: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        start = 0
        for expert, count in enumerate(num_rows.tolist()):
            if count:
                inner = self._gate(self.gate_ups[expert](gathered[start : start + count]))
                parts.append(self.downs[expert](inner))
                start += count
        return torch.cat(parts)

    def _by_groups(
        self, x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, order: torch.Tensor
    ) -> torch.Tensor:
        gate_up, down = self._stacks
        groups = Groups(experts[order], len(self.downs))
        inner = self._gate(groups.multiply(x[order // shares.shape[1]], gate_up))
        given = groups.multiply(inner, down) * shares.flatten()[order, None]
        by_token = torch.empty_like(given)
        by_token[order] = given
        return by_token.view(*shares.shape, -1).sum(1).to(x.dtype)

    def finish(self, kernels: Kernels | None) -> None:
        """Those that were finished before stay as they are."""
        if self._stacks:
            return
        for linear in (*self.gate_ups, *self.downs):
            linear.finish(kernels)
        if kernels is None or self._activation is None:
            return
        gate_ups, downs = ([one.packed for one in linears if one.packed] for linears in (self.gate_ups, self.downs))
        self._mlps = PackedMLPs(kernels, gate_ups, downs, self._activation)
        self._mlps_below = min(one.packed_below for one in (*self.gate_ups, *self.downs))


class Experts:
    """A router and the experts that it chooses from. If several ranks share a model, each has a part of every expert,
    or some experts whole."""

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        activation: Activation,
        shard: Shard,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Not all experts are here only on a CPU."""
        self.config = config
        self._span = span = shard.experts
        self._group, self._dealt = shard.group, shard.dealt
        self.router = Linear(hidden_size, config.num_experts, bias=False, is_head=True, dtype=dtype, device=device)
        inner = config.inner_size
        sizes = ((hidden_size, 2 * inner), (inner, hidden_size))
        if device.type != "cpu":
            stacks = tuple(torch.empty(span.size, out, size, dtype=dtype, device=device) for size, out in sizes)
            gate_ups, downs = ([Linear.of(weight) for weight in stack] for stack in stacks)
            self.mlps = ExpertMLPs(gate_ups, downs, activation, stacks=stacks)
            return
        gate_ups, downs = (
            [Linear(size, out, bias=False, dtype=dtype, device=device) for _ in range(span.size)] for size, out in sizes
        )
        self.mlps = ExpertMLPs(gate_ups, downs, activation, span=span)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What all ranks' experts give to `x` `[num_tokens, hidden_size]`, like it; no tokens on a data rank without a
        row."""
        chosen, shares = self.route(x)
        if self._dealt is not None:
            return self._dealt(self.mlps, x, chosen, shares)
        given = self.mlps(x, chosen, shares)
        self._group.all_reduce(given)
        return given

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which experts each token takes, int64, and its shares, float32: both `[num_tokens, per_token]`."""
        if not len(x):
            nothing = (0, self.config.per_token)
            return torch.empty(nothing, dtype=torch.long), torch.empty(nothing)
        shares, chosen = self.router(x).float().softmax(-1).topk(self.config.per_token, dim=-1)
        if self.config.normalises:
            shares = shares / shares.sum(-1, keepdim=True)
        return chosen, shares

    def places(self, span: Span) -> dict[str, Place]:
        """`span`: of each expert's inner elements, those that are here."""
        gate, up, down = self.config.gate_up_down
        places: dict[str, Place] = {"gate.weight": self.router.whole()}
        for number, (gate_up, last) in enumerate(
            zip(self.mlps.gate_ups, self.mlps.downs, strict=True), self._span.start
        ):
            name = f"experts.{number}."
            places |= places_of_rows(gate_up, {name + gate: span, name + up: span})
            places |= places_of_columns(last, name + down, span)
        return places

    def names_elsewhere(self) -> Iterator[str]:
        """Of the weights of experts that other ranks have."""
        for number in range(self._span.whole):
            if not self._span.start <= number < self._span.stop:
                yield from (f"experts.{number}.{name}.weight" for name in self.config.gate_up_down)

    def finish(self, kernels: Kernels | None) -> None:
        self.router.finish(kernels)
        self.mlps.finish(kernels)
