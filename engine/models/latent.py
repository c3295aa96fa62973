"""Latent attention (MLA, arXiv 2405.04434): of each token the cache keeps what K and V are computed from, not K and V.

The latent `c` and the rotated part `r` of K are the same for all heads. A head's K is `(W_k c, r)` and its V is
`W_v c`. Both matrices can be moved to the other side of attention, where they are applied once for each new token
instead of once for each token that it sees:

    q · (W_k c, r) = (W_kᵀ q', q'') · (c, r)         with q = (q', q'')
    Σ a (W_v c)    = W_v (Σ a c)                      a: what a token gives each of those that it sees

So attention has one KV head, whose K is the cached row `(c, r)` and whose V is the row's beginning.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

_NAME = "baton_latent"


class _Attention(Protocol):
    """What transformers' latent attention layers have in common, whatever model they are of."""

    kv_b_proj: nn.Module | None
    qk_nope_head_dim: int
    v_head_dim: int


class LatentAttention(nn.Module):
    """The matrices W_k and W_v of all heads, in the place of a layer's `kv_b_proj`."""

    def __init__(self, weight: torch.Tensor, key_dim: int, value_dim: int) -> None:
        """`weight` `[num_heads * (key_dim + value_dim), latent_dim]`, W_k and W_v of one head after the other."""
        super().__init__()
        by_head = weight.detach().view(-1, key_dim + value_dim, weight.shape[1])
        self.key_dim, self.value_dim, self.latent_dim = key_dim, value_dim, weight.shape[1]
        # [num_heads, key_dim, latent_dim] and [num_heads, latent_dim, value_dim]
        self.keys = nn.Parameter(by_head[:, :key_dim].contiguous(), requires_grad=False)
        self.values = nn.Parameter(by_head[:, key_dim:].mT.contiguous(), requires_grad=False)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """From queries `[num_heads, num_tokens, head_dim]` to those that are compared with cached rows,
        `[num_tokens, num_heads, row_dim]`."""
        plain, rotated = query[..., : self.key_dim], query[..., self.key_dim :]
        return torch.cat((plain @ self.keys, rotated), -1).transpose(0, 1)

    def results(self, attended: torch.Tensor) -> torch.Tensor:
        """From sums of latents `[num_tokens, num_heads * latent_dim]` to what the model's own attention gives,
        `[num_tokens, num_heads, value_dim]`."""
        by_head = attended.view(attended.shape[0], -1, self.latent_dim).transpose(0, 1)
        return (by_head @ self.values).transpose(0, 1)


def keep_latents(model: nn.Module) -> None:
    """Has the layers of `model` that compute K and V from a latent hand the latent to attention instead."""
    for module in list(model.modules()):
        linear = getattr(module, "kv_b_proj", None)
        if not callable(getattr(module, "expand_kv", None)) or not isinstance(linear, nn.Linear):
            continue
        if linear.bias is not None:
            continue  # a bias of K cannot be moved; attention refuses this layer for K and V of unlike sizes
        attention = cast("_Attention", module)
        latent = LatentAttention(linear.weight, attention.qk_nope_head_dim, attention.v_head_dim)
        setattr(module, _NAME, latent)
        attention.kv_b_proj = None
        module.expand_kv = _latent_as_key


def latent_of(module: nn.Module) -> LatentAttention | None:
    latent = getattr(module, _NAME, None)
    return latent if isinstance(latent, LatentAttention) else None


def _latent_as_key(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in the place of `expand_kv`. Both are `[1, 1, num_tokens, ...]`; K is what the cache keeps, V its
    beginning."""
    key = torch.cat((latent, rotated), -1)
    return key, key[..., : latent.shape[-1]]
