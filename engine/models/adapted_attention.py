"""Older models of transformers, whose code asks no attention interface: their attention layers are made to ask it.

In most of them a method `_attn` is given Q, K and V of a layer; another one takes its place. In two it is a part of
`forward`, which is written again here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from engine.models.attention_interface import INTERFACE, UnsupportedAttentionError, attend

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def adapt_attention(config: PreTrainedConfig, base: nn.Module) -> None:
    """Raises `UnsupportedAttentionError` if the model does not have the attention that its type is known for."""
    if config.model_type not in ADAPTED:
        return
    # Else the model makes a mask of all pairs of tokens, which is not looked at.
    base.config._attn_implementation_internal = INTERFACE  # type: ignore[union-attr]
    class_name, adapt = ADAPTED[config.model_type]
    layers = [module for module in base.modules() if type(module).__name__ == class_name]
    for number, module in enumerate(layers):
        module.layer_idx = number  # type: ignore[assignment]
        adapt(module, config)


def _ask_in_attn(module: nn.Module, scale: float, window: int = 0, *, is_key_transposed: bool = False) -> None:
    def attn(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: object, **_kwargs: object
    ) -> list[torch.Tensor | None]:
        """All `[1, num_heads, num_tokens, head_dim]`, and so is the result; there are no weights beside it."""
        if is_key_transposed:
            key = key.transpose(2, 3)
        # Some compute Q and K in float32.
        out = attend(
            module, query.to(value.dtype), key.to(value.dtype), value, None, scaling=scale, sliding_window=window
        )[0]
        return [out.transpose(1, 2), None]

    module._attn = attn  # type: ignore[assignment]


def _gptj(module: nn.Module, config: PreTrainedConfig) -> None:
    _ask_in_attn(module, (config.hidden_size // config.num_attention_heads) ** -0.5)


def _gpt_neo(module: nn.Module, config: PreTrainedConfig) -> None:
    _ask_in_attn(module, 1.0, config.window_size if module.attention_type == "local" else 0)


def _openai_gpt(module: nn.Module, config: PreTrainedConfig) -> None:
    scale = (config.n_embd // config.n_head) ** -0.5 if module.scale else 1.0
    _ask_in_attn(module, scale, is_key_transposed=True)


class _Xglm(Protocol):
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    head_dim: int
    scaling: float


def _xglm(module: nn.Module, config: PreTrainedConfig) -> None:  # noqa: ARG001 (as the others are called)
    def forward(this: nn.Module, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """Gives what transformers' own gives without an encoder, `[1, num_tokens, hidden_size]`."""
        layer = cast("_Xglm", this)
        shape = (*hidden_states.shape[:2], -1, layer.head_dim)
        query, key, value = (
            linear(hidden_states).view(shape).transpose(1, 2) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        out = attend(this, query, key, value, None, scaling=layer.scaling)[0]
        return layer.out_proj(out.flatten(2)), None

    module.forward = MethodType(forward, module)


class _Falcon(Protocol):
    query_key_value: nn.Module
    dense: nn.Module
    head_dim: int
    num_kv_heads: int


def _falcon(module: nn.Module, config: PreTrainedConfig) -> None:
    if config.alibi:
        raise UnsupportedAttentionError("scores that depend on distance (alibi)")
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb

    def forward(
        this: nn.Module,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Gives what transformers' own gives, `[1, num_tokens, hidden_size]`, but keeps a KV head for several heads
        once."""
        layer = cast("_Falcon", this)
        merged = layer.query_key_value(hidden_states)[0]
        # Each KV head comes after the heads that it is for.
        by_head = merged.view(len(merged), layer.num_kv_heads, -1, layer.head_dim)
        query, key, value = by_head[:, :, :-2].flatten(1, 2), by_head[:, :, -2], by_head[:, :, -1]
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        query, key = rotate(query, key, *position_embeddings)
        out = attend(this, query, key, value, None)[0]
        return layer.dense(out.flatten(2)), None

    module.forward = MethodType(forward, module)


# By model type: the class of its attention layers, and what makes one of them ask.
ADAPTED: dict[str, tuple[str, Callable[[nn.Module, PreTrainedConfig], None]]] = {
    "codegen": ("CodeGenAttention", _gptj),
    "falcon": ("FalconAttention", _falcon),
    "gpt_neo": ("GPTNeoSelfAttention", _gpt_neo),
    "gptj": ("GPTJAttention", _gptj),
    "openai-gpt": ("Attention", _openai_gpt),
    "xglm": ("XGLMAttention", _xglm),
}
