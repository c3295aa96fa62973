"""A mixture of experts: each token takes a few of many MLPs, and adds what they give by its shares."""

from __future__ import annotations

import torch

from engine.kernels.library import Activation, Kernels, PackedMLPs
from engine.layers import ACTIVATE, Linear, Place
from engine.models.description import ExpertsConfig
from engine.models.grouped_product import Groups


class Experts:
    """Tokens are sorted by expert. On a CPU the kernels take all experts in one call; without kernels each expert that
    somebody chose is one product of its tokens. On a device, which nobody waits for to learn who was chosen, all
    experts are one product by groups."""

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        activation: Activation,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._activation, self._activate = activation, ACTIVATE[activation]
        self._mlps: PackedMLPs | None = None
        self._mlps_below = 0.0  # tokens; from so many on another implementation is faster
        self.router = Linear(hidden_size, config.num_experts, bias=False, dtype=dtype, device=device)
        inner = config.inner_size
        sizes = ((hidden_size, 2 * inner), (inner, hidden_size))
        self._stacks: tuple[torch.Tensor, ...] = ()  # of gate_up's and of down's weights, on a device
        if device.type != "cpu":
            self._stacks = tuple(
                torch.empty(config.num_experts, out, size, dtype=dtype, device=device) for size, out in sizes
            )
            self.gate_up, self.down = ([Linear.of(weight) for weight in stack] for stack in self._stacks)
            return
        self.gate_up, self.down = (
            [Linear(size, out, bias=False, dtype=dtype, device=device) for _ in range(config.num_experts)]
            for size, out in sizes
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[num_tokens, hidden_size]`; the result is like it."""
        per_token = self._config.per_token
        shares, chosen = self.router(x).float().softmax(-1).topk(per_token, dim=-1)
        if self._config.normalises:
            shares = shares / shares.sum(-1, keepdim=True)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        if self._stacks:
            return self._by_groups(x, shares, experts, order)
        tokens = order // per_token
        num_rows = experts.bincount(minlength=self._config.num_experts)
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
                inner = self._activate(self.gate_up[expert](gathered[start : start + count]))
                parts.append(self.down[expert](inner))
                start += count
        return torch.cat(parts)

    def _by_groups(
        self, x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, order: torch.Tensor
    ) -> torch.Tensor:
        gate_up, down = self._stacks
        groups = Groups(experts[order], self._config.num_experts)
        inner = self._activate(groups.multiply(x[order // self._config.per_token], gate_up))
        given = groups.multiply(inner, down) * shares.flatten()[order, None]
        by_token = torch.empty_like(given)
        by_token[order] = given
        return by_token.view(*shares.shape, -1).sum(1).to(x.dtype)

    def places(self) -> dict[str, Place]:
        inner = self._config.inner_size
        gate, up, down = self._config.gate_up_down
        places: dict[str, Place] = {"gate.weight": self.router.whole()}
        for number, (gate_up, last) in enumerate(zip(self.gate_up, self.down, strict=True)):
            places[f"experts.{number}.{gate}.weight"] = gate_up.rows(0, inner)
            places[f"experts.{number}.{up}.weight"] = gate_up.rows(inner, 2 * inner)
            places[f"experts.{number}.{down}.weight"] = last.whole()
        return places

    def finish(self, kernels: Kernels | None) -> None:
        self.router.finish(kernels, is_head=True)
        if self._stacks:
            return
        for linear in (*self.gate_up, *self.down):
            linear.finish(kernels)
        if kernels is None:
            return
        gate_ups, downs = ([one.packed for one in linears if one.packed] for linears in (self.gate_up, self.down))
        self._mlps = PackedMLPs(kernels, gate_ups, downs, self._activation)
        self._mlps_below = min(one.packed_below for one in (*self.gate_up, *self.down))
