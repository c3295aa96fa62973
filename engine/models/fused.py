"""A decoder's layers on a CUDA device: matrix products and attention, and one kernel for all that is between two."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from engine.attention.base import PagedStep
from engine.kernels.library import Activation
from engine.layers import RotaryEmbedding
from engine.models.description import DecoderConfig
from engine.models.experts import Experts
from engine.models.grouped_product import has_grouped_mm
from engine.models.layer import DecoderLayer
from engine.models.layer_inputs import LayerInputs

_HEAD_DIMS = (64, 128, 256)  # powers of two that attention has kernels for


class FusedDecoder:
    """Of the shape that most families share: no norms behind attention and MLP, whole heads rotated, SiLU."""

    def __init__(self, config: DecoderConfig, layers: Sequence[DecoderLayer], ropes: Sequence[RotaryEmbedding]) -> None:
        from engine.kernels import fused, fused_experts

        self._kernels, self._expert_kernels = fused, fused_experts
        self._config = config
        self._layers = layers
        self._angles = [ropes[index].half_angles for index in config.rope_of_layer]

    @classmethod
    def of(
        cls, config: DecoderConfig, layers: Sequence[DecoderLayer], ropes: Sequence[RotaryEmbedding]
    ) -> FusedDecoder | None:
        """None if the layers are of another shape, in float32, or on a device without Triton."""
        weight = layers[0].input_norm.weight
        is_plain = not config.sandwich_norms and not config.norms_from_one and config.activation is Activation.SILU
        is_whole = all(2 * rope.half_angles[0].shape[1] == config.head_dim for rope in ropes)
        if not is_plain or not is_whole or config.head_dim not in _HEAD_DIMS:
            return None
        if weight.device.type != "cuda" or weight.dtype == torch.float32:
            return None
        return cls(config, layers, ropes) if importlib.util.find_spec("triton") else None

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: PagedStep,
        between_layers: Callable[[], None],
        inputs: LayerInputs,
    ) -> torch.Tensor:
        """Overwrites `hidden` `[num_tokens, hidden_size]`, which it returns."""
        kernels, config = self._kernels, self._config
        given: torch.Tensor | None = None
        for layer, angles in zip(self._layers, self._angles, strict=True):
            inputs.note(layer.index, hidden, given)
            x = kernels.add_rms_norm(hidden, given, layer.input_norm.weight, config.eps)
            qkv = layer.qkv(x).view(len(x), -1, config.head_dim)
            norms = None
            if layer.q_norm is not None and layer.k_norm is not None:
                norms = layer.q_norm.weight, layer.k_norm.weight
            cache_rows = attention.writer.layer_rows(layer.index)
            kernels.rotate_and_write(qkv, positions, angles, norms, config.eps, attention.rows, cache_rows)
            given = layer.out(attention.attend(layer.index, qkv[:, : layer.num_q]))
            x = kernels.add_rms_norm(hidden, given, layer.mlp_norm.weight, config.eps)
            if layer.mlp is not None:
                given = layer.mlp.down(kernels.silu_and_mul(layer.mlp.gate_up(x)))
            elif layer.experts is not None:
                given = self._mix(layer.experts, x)
            between_layers()
        return hidden if given is None else hidden.add_(given)

    def _mix(self, experts: Experts, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = experts.mlps.stacks
        if not self._expert_kernels.takes(gate_up, down):
            return experts(x)
        per_token, normalises = experts.config.per_token, experts.config.normalises
        return self._expert_kernels.experts(
            x,
            experts.router(x),
            gate_up,
            down,
            per_token,
            normalises=normalises,
            has_grouped_mm=has_grouped_mm(gate_up),
        )
