"""Attention of transformers' models on Baton's cache: what their attention interface calls."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.attention.base import StepAttention
from engine.models.latent import latent_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

INTERFACE = "baton"
# Keyword arguments that say nothing about the result when there is one flat batch and no training.
_HARMLESS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "position_ids", "use_cache", "cache_position", "is_causal"}
    | {"output_attentions", "output_hidden_states", "return_dict", "layer_head_mask", "position_embeddings"}
    | {"num_items_in_batch", "output_router_logits", "logits_to_keep", "past_key_values", "rotary_pos_emb"}
)


class UnsupportedAttentionError(Exception):
    """A model's attention is none that the backends compute; the message is the reason."""


@dataclass(slots=True, frozen=True)
class LayerShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of K; V's may be smaller or larger
    value_dim: int
    scale: float
    window: int
    soft_cap: float
    latent_value_dim: int


@dataclass(slots=True)
class Probe:
    """Stands in for a step while a model is looked at; attention gives zeros."""

    calls: list[LayerShape] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # what the model calls the layer of each call
    sinks: dict[int, torch.Tensor] = field(default_factory=dict)  # of calls that have some


@dataclass(slots=True)
class Step:
    attention: StepAttention
    between_layers: Callable[[], None]
    num_kv_heads: int  # of the cache, and of K and V as attention gets them
    head_dim: int
    num_calls: int = 0
    """Calls of attention so far. The cache has a layer for each: a model's layer may attend more than once, or be
    computed several times in one step."""


current_step: ContextVar[Probe | Step] = ContextVar("step")


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """`query` `[1, num_heads, num_tokens, head_dim]`, `key` and `value` likewise; returns `[1, num_tokens, ...]`."""
    current = current_step.get()
    latent = latent_of(module)
    if isinstance(current, Probe):
        _look(current, module, query, key, value, attention_mask, options)
        value_dim = value.shape[3] if latent is None else latent.value_dim
        return value.new_zeros(1, query.shape[2], query.shape[1], value_dim), None
    layer = current.num_calls
    current.num_calls += 1
    if latent is not None:
        out = current.attention.forward(layer, latent.queries(query[0]), key.permute(2, 0, 1, 3))
        current.between_layers()
        return latent.results(out)[None], None
    # Layers of other shapes than the cache's: a head serves fewer, and zeros at the end change no score.
    shape = current.num_kv_heads, current.head_dim
    kv = torch.stack((_widened(key[0], *shape), _widened(value[0], *shape))).permute(2, 0, 1, 3)
    queries = _widened(query[0], query.shape[1], current.head_dim).transpose(0, 1)
    out = current.attention.forward(layer, queries, kv)
    current.between_layers()
    return out.view(1, query.shape[2], query.shape[1], current.head_dim)[..., : value.shape[3]], None


def _widened(heads: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    """`[n, num_tokens, d]` as `[num_heads, num_tokens, head_dim]`: heads are repeated, and end in zeros."""
    if heads.shape[0] != num_heads:
        heads = heads.repeat_interleave(num_heads // heads.shape[0], dim=0)
    missing = head_dim - heads.shape[2]
    return nn.functional.pad(heads, (0, missing)) if missing else heads


def _look(
    probe: Probe,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, object],
) -> None:
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise UnsupportedAttentionError("attention layers without a number")
    latent = latent_of(module)
    if latent is None and (key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]):
        raise UnsupportedAttentionError("K and V of unlike heads")
    if query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise UnsupportedAttentionError("attention to other tokens than those of the sequence")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise UnsupportedAttentionError("attention to later tokens")
    if mask is not None:
        raise UnsupportedAttentionError("a mask of its own")
    for name, option in options.items():
        if name not in (*_HARMLESS, "s_aux") and option is not None and option is not False:
            raise UnsupportedAttentionError(f"attention with {name}")
    scale, window, cap = options.get("scaling"), options.get("sliding_window"), options.get("softcap")
    if isinstance(scale, torch.Tensor):
        raise UnsupportedAttentionError("a scale for each token")
    if isinstance(sinks := options.get("s_aux"), torch.Tensor):
        if sinks.shape != (query.shape[1],):
            raise UnsupportedAttentionError("sinks other than one for each head")
        probe.sinks[len(probe.calls)] = sinks.detach()
    probe.numbers.append(number)
    probe.calls.append(
        LayerShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=float(scale) if isinstance(scale, int | float) else query.shape[3] ** -0.5,
            window=window if isinstance(window, int) else 0,
            soft_cap=float(cap) if isinstance(cap, int | float) else 0.0,
            latent_value_dim=0 if latent is None else latent.latent_dim,
        )
    )


def check_layer_types(config: PreTrainedConfig) -> None:
    """Raises `UnsupportedAttentionError` if layers keep anything but the KV of tokens, or see others than a window."""
    kinds = {str(kind) for key in ("layer_types", "layers_block_type") for kind in getattr(config, key, None) or ()}
    if odd := sorted(kinds - {"full_attention", "sliding_attention", "attention", "dense", "sparse"}):
        raise UnsupportedAttentionError(f"layers of type {', '.join(odd)}")
