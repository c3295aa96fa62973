"""One layer of a decoder, product by product; the layer's part of one rank, if several ranks share it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.attention.base import StepAttention
from engine.kernels.library import Kernels
from engine.layers import ACTIVATE, Linear, Place, RMSNorm, RotaryEmbedding
from engine.models.description import DecoderConfig
from engine.models.experts import Experts
from engine.models.shard import Shard, places_of_columns, places_of_rows


class MLP:
    """What it gives is this rank's summand."""

    def __init__(self, shard: Shard, *, dtype: torch.dtype, device: torch.device) -> None:
        config = shard.config
        self._inner_span = shard.inner
        self._activate = ACTIVATE[config.activation]
        self.inner, bias = config.inner_size, config.mlp_bias
        self.gate_up = Linear(config.hidden_size, 2 * self.inner, bias=bias, dtype=dtype, device=device)
        self.down = Linear(self.inner, config.hidden_size, bias=bias and shard.adds_biases, dtype=dtype, device=device)
        self._has_bias = bias
        self._merged_names = config.merged_names

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activate(self.gate_up(x)))

    def places(self) -> dict[str, Place]:
        span = self._inner_span
        gate_up = places_of_rows(
            self.gate_up, {"gate_proj": span, "up_proj": span}, "gate_up_proj" if self._merged_names else ""
        )
        return gate_up | places_of_columns(self.down, "down_proj", span, has_bias=self._has_bias)

    def finish(self, kernels: Kernels | None) -> None:
        self.gate_up.finish(kernels)
        self.down.finish(kernels)


class DecoderLayer:
    """Norms are named by what they stand at: `mlp_norm` before the MLP, `out_norm` and `down_norm` (None without
    sandwich norms) behind attention and behind the MLP. It has either `mlp` or `experts`."""

    def __init__(self, shard: Shard, index: int, dtype: torch.dtype, device: torch.device) -> None:
        config = shard.config
        self.index = index
        self._shard, self._group, self._config = shard, shard.group, config
        self._dtype = dtype
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.q_size = config.num_heads * self.head_dim
        self.kv_size = config.num_kv_heads * self.head_dim
        self.num_q = config.num_heads
        self.num_qk = config.num_heads + config.num_kv_heads

        def norm(size: int, wanted: bool) -> RMSNorm | None:
            return _norm(config, size, dtype, device) if wanted else None

        self.input_norm = _norm(config, hidden, dtype, device)
        self.mlp_norm = _norm(config, hidden, dtype, device)
        self.out_norm, self.down_norm = norm(hidden, config.sandwich_norms), norm(hidden, config.sandwich_norms)
        self.q_norm, self.k_norm = norm(self.head_dim, config.qk_norm), norm(self.head_dim, config.qk_norm)
        self.qkv = Linear(hidden, self.q_size + 2 * self.kv_size, bias=config.qkv_bias, dtype=dtype, device=device)
        has_bias = config.out_bias and shard.adds_biases
        self.out = Linear(self.q_size, hidden, bias=has_bias, dtype=dtype, device=device)
        self.mlp: MLP | None = None
        self.experts: Experts | None = None
        if config.experts is not None and config.experts.layers[index]:
            self.experts = Experts(config.experts, hidden, config.activation, shard, dtype=dtype, device=device)
        else:
            self.mlp = MLP(shard, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        rope: RotaryEmbedding,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Returns the new hidden states, the same on all ranks; overwrites `hidden` on the way."""
        return self.add_to(hidden, self.input_norm(hidden), rope, cos, sin, attention)

    def add_to(
        self,
        hidden: torch.Tensor,
        given: torch.Tensor,
        rope: RotaryEmbedding,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        """The same if `given`, as wide as `qkv` takes it, is what attention computes with in place of the normed
        `hidden`."""
        qkv = self.qkv(given).view(hidden.shape[0], -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qkv[:, : self.num_q], qkv[:, self.num_q : self.num_qk]
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        rope.rotate_(qkv[:, : self.num_qk], cos, sin)
        kv = qkv[:, self.num_q :].view(-1, 2, self.num_qk - self.num_q, self.head_dim)
        given = self.out(attention.forward(self.index, qkv[:, : self.num_q], kv))
        self._group.all_reduce(given)
        hidden.add_(given if self.out_norm is None else self.out_norm(given))
        if self.mlp is None:
            self.add_experts(hidden)
            return hidden
        given = self.mlp(self.mlp_norm(hidden))
        self._group.all_reduce(given)
        return hidden.add_(given if self.down_norm is None else self.down_norm(given))

    def add_experts(self, hidden: torch.Tensor) -> None:
        """The second half of a layer that has experts, in place; nothing for others."""
        if self.experts is not None:
            normed = self.mlp_norm(hidden) if len(hidden) else hidden
            if self._shard.data_ranks is not None:
                # In one dtype: which one `hidden` has depends on how many tokens a rank has.
                normed = normed.to(self._dtype)
            given = self.experts(normed)
            if not len(hidden):  # a data rank without a row has computed those of others
                return
            hidden.add_(given if self.down_norm is None else self.down_norm(given))

    def places(self) -> dict[str, Place]:
        """The layer's parts, by the names that a checkpoint gives them within its layer."""
        norms = {"input_layernorm": self.input_norm, "post_attention_layernorm": self.mlp_norm}
        if self.out_norm is not None and self.down_norm is not None:
            norms["post_attention_layernorm"] = self.out_norm
            norms["pre_feedforward_layernorm"] = self.mlp_norm
            norms["post_feedforward_layernorm"] = self.down_norm
        if self.q_norm is not None and self.k_norm is not None:
            norms |= {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        places: dict[str, Place] = {f"{name}.weight": norm.weight for name, norm in norms.items()}
        q, kv = self._shard.heads.times(self.head_dim), self._shard.kv_heads.times(self.head_dim)
        merged_name = "qkv_proj" if self._config.merged_names else ""
        attention = places_of_rows(self.qkv, {"q_proj": q, "k_proj": kv, "v_proj": kv}, merged_name)
        attention |= places_of_columns(self.out, "o_proj", q, has_bias=self._config.out_bias)
        places |= {f"self_attn.{name}": place for name, place in attention.items()}
        if self.mlp is not None:
            places |= {f"mlp.{name}": place for name, place in self.mlp.places().items()}
        if self.experts is not None and self._config.experts is not None:
            block = self._config.experts.block
            of_experts = self.experts.places(self._shard.expert_inner)
            places |= {f"{block}.{name}": place for name, place in of_experts.items()}
        return places

    def names_elsewhere(self) -> Iterator[str]:
        """Of a checkpoint's tensors of this layer that other ranks have whole."""
        if self.experts is not None:
            yield from (f"{self.experts.config.block}.{name}" for name in self.experts.names_elsewhere())

    @property
    def packed_below(self) -> float:
        """The kernels compute the whole layer, but for experts, if there are fewer tokens than this."""
        linears = [self.qkv, self.out]
        if self.mlp is not None:
            linears += [self.mlp.gate_up, self.mlp.down]
        return min(linear.packed_below for linear in linears)

    def finish(self, kernels: Kernels | None) -> None:
        for norm in (self.input_norm, self.mlp_norm, self.out_norm, self.down_norm, self.q_norm, self.k_norm):
            if norm is not None:
                norm.finish()
        for part in (self.qkv, self.out, self.mlp, self.experts):
            if part is not None:
                part.finish(kernels)


def _norm(config: DecoderConfig, size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(size, config.eps, from_one=config.norms_from_one, dtype=dtype, device=device)
