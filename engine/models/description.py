"""A decoder as flags: what the models of this family differ in, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.library import Activation


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class Rope:
    """Rotary frequencies of some layers."""

    inv_freq: torch.Tensor  # [rotary_dim / 2] float32, radians per position; rotary_dim may be less than head_dim
    scale: float  # of cosines and sines
    variant: str = ""  # names the choice if the same config.json allows several


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpertsConfig:
    """Layers in which each token takes `per_token` of `num_experts` MLPs."""

    num_experts: int
    per_token: int
    inner_size: int
    normalises: bool  # the chosen experts' shares add up to 1
    layers: tuple[bool, ...]  # whether a layer has experts; the others have an MLP
    block: str  # the checkpoint's name of the block with router and experts
    gate_up_down: tuple[str, str, str]  # and of an expert's weights


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    inner_size: int  # of the MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of all norms
    softmax_scale: float
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]  # indexes into `ropes`
    windows: tuple[int, ...]  # by layer, tokens that a query sees, itself included; 0: all
    activation: Activation = Activation.SILU
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Q and K pass a norm of head_dim before they are rotated
    sandwich_norms: bool = False  # what attention and MLP give passes a norm before it is added
    norms_from_one: bool = False  # a checkpoint's norm weights are differences from 1
    embedding_scale: float = 1.0
    soft_cap: float = 0.0  # of attention scores, 0: none
    logit_soft_cap: float = 0.0
    merged_names: bool = False  # a checkpoint has qkv_proj and gate_up_proj in one piece each
    experts: ExpertsConfig | None = None
