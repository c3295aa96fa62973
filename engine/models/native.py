"""A decoder's layers as one call each of the kernels, with a residual stream in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.attention.native import NativeStep
from engine.kernels.library import Kernels, LayerStruct, LinearStruct, PackedLinear
from engine.layers import Linear, RMSNorm, RotaryEmbedding
from engine.models.description import DecoderConfig
from engine.models.layer import DecoderLayer


class NativeDecoder:
    """Experts are computed between the calls, product by product."""

    def __init__(
        self,
        kernels: Kernels,
        config: DecoderConfig,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ropes: Sequence[RotaryEmbedding],
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._angles = [ropes[index].half_angles for index in config.rope_of_layer]
        self._norm = norm.factors()
        self._norms: list[torch.Tensor] = []  # the structs hold their addresses
        self._layers = layers
        self._structs = [self._struct(layer) for layer in layers]
        self._head = packed(head)
        self.below = layers[0].qkv.packed_below  # tokens of a step

    def _struct(self, layer: DecoderLayer) -> LayerStruct:
        mlp = layer.mlp
        return LayerStruct(
            *(
                self._address(norm)
                for norm in (
                    *(layer.input_norm, layer.mlp_norm, layer.out_norm, layer.down_norm),
                    *(layer.q_norm, layer.k_norm),
                )
            ),
            *(packed(linear).struct for linear in (layer.qkv, layer.out)),
            LinearStruct() if mlp is None else packed(mlp.gate_up).struct,
            LinearStruct() if mlp is None else packed(mlp.down).struct,
            self._config.eps,
            2 * self._angles[layer.index][0].shape[1],
            self._config.activation,
        )

    def _address(self, norm: RMSNorm | None) -> int | None:
        if norm is None:
            return None
        self._norms.append(norm.factors())
        return self._norms[-1].data_ptr()

    def forward(self, hidden: torch.Tensor, step: NativeStep, between_layers: Callable[[], None]) -> torch.Tensor:
        """As `CausalLM.forward`, from `hidden`, the tokens' embeddings; float32."""
        hidden = hidden.float()
        for index, struct in enumerate(self._structs):
            cos, sin = self._angles[index]
            self._kernels.layer(struct, step.backend.structs[index], step.batch, index, hidden, cos, sin)
            self._layers[index].add_experts(hidden)
            between_layers()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._kernels.head(self._head, self._norm, self._config.eps, hidden)


def packed(linear: Linear) -> PackedLinear:
    if linear.packed is None:
        raise RuntimeError("finish() was not called with kernels")
    return linear.packed
