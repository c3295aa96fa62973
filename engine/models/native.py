"""A decoder's layers as calls of the kernels, one for a layer or for several, with a residual stream in float32.

If several ranks share the layers it is a call for attention and one for the MLP, as the ranks add up what each gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, pointer

import torch

from engine.attention.native import NativeBackend, NativeStep
from engine.kernels.library import Kernels, LayerCallStruct, LayerStruct, LinearStruct, PackedLinear
from engine.layers import Linear, RMSNorm, RotaryEmbedding
from engine.models.description import DecoderConfig
from engine.models.layer import DecoderLayer
from engine.models.layer_inputs import LayerInputs
from engine.ranks.group import RankGroup

# Weights times tokens of a call: layers that have fewer go into one call, since messages need not pass more often than
# every millisecond or two.
_CALL_PRODUCTS = 32 << 20


class NativeDecoder:
    """Experts are computed between the calls, product by product."""

    def __init__(
        self,
        kernels: Kernels,
        config: DecoderConfig,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm | None,
        head: Linear | None,
        ropes: Sequence[RotaryEmbedding],
        group: RankGroup,
    ) -> None:
        """`layers` follow each other: all, or those of one stage. `norm` and `head` are those of the last stage, None
        in others."""
        self._kernels = kernels
        self._group = group
        self._config = config
        self._angles = [ropes[index].half_angles for index in config.rope_of_layer]
        self._norm = None if norm is None else norm.factors()
        self._norms: list[torch.Tensor] = []  # the structs hold their addresses
        self._layers = layers
        self._structs = [self._struct(layer) for layer in layers]
        self._num_weights = [_num_weights(struct) for struct in self._structs]
        self._backend: NativeBackend | None = None  # that `_calls` are for
        self._calls: Array[LayerCallStruct] = (LayerCallStruct * 0)()
        self._head = None if head is None else packed(head)
        self.below = min(layer.packed_below for layer in layers)  # tokens of a step

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

    def forward(
        self, hidden: torch.Tensor, step: NativeStep, between_layers: Callable[[], None], inputs: LayerInputs
    ) -> torch.Tensor:
        """Gives what `CausalLM.forward` gives, from `hidden`, the tokens' embeddings; float32."""
        hidden = hidden.float()
        if step.backend is not self._backend:
            self._prepare(step.backend)
        if self._group.size > 1:
            self._forward_shared(hidden, step, between_layers, inputs)
            return hidden
        index = 0
        while index < len(self._layers):
            inputs.note(self._layers[index].index, hidden)
            stop = inputs.stop_before(index, self._stop(index, step.num_tokens))
            self._kernels.layers(self._calls, step.batch, self._layers[index].index, stop - index, hidden)
            self._layers[stop - 1].add_experts(hidden)
            between_layers()
            index = stop
        return hidden

    def _forward_shared(
        self, hidden: torch.Tensor, step: NativeStep, between_layers: Callable[[], None], inputs: LayerInputs
    ) -> None:
        for layer in self._layers:
            inputs.note(layer.index, hidden)
            self._add_half(layer, hidden, step, layer.out_norm, is_mlp=False)
            if layer.experts is None:
                self._add_half(layer, hidden, step, layer.down_norm, is_mlp=True)
            else:
                layer.add_experts(hidden)
            between_layers()

    def _add_half(
        self, layer: DecoderLayer, hidden: torch.Tensor, step: NativeStep, norm: RMSNorm | None, *, is_mlp: bool
    ) -> None:
        given = self._kernels.half_layer(self._calls, step.batch, layer.index, hidden, is_mlp=is_mlp)
        self._group.all_reduce(given)
        hidden.add_(given if norm is None else norm(given))

    def _prepare(self, backend: NativeBackend) -> None:
        calls = (LayerCallStruct * self._config.num_layers)()  # other stages' stay empty
        for struct, layer in zip(self._structs, self._layers, strict=True):
            shape, (cos, sin) = backend.structs[layer.index], self._angles[layer.index]
            calls[layer.index] = LayerCallStruct(pointer(struct), pointer(shape), cos.data_ptr(), sin.data_ptr())
        self._calls = calls
        self._backend = backend

    def _stop(self, start: int, num_tokens: int) -> int:
        """Up to which of `layers` the call goes that begins with number `start`: one with experts ends it."""
        left = _CALL_PRODUCTS
        for index in range(start, len(self._layers)):
            left -= self._num_weights[index] * num_tokens
            if left <= 0 or self._layers[index].experts is not None:
                return index + 1
        return len(self._layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._kernels.head(*self._ends(), self._config.eps, hidden)

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._kernels.best_tokens(*self._ends(), self._config.eps, hidden)

    def _ends(self) -> tuple[PackedLinear, torch.Tensor]:
        if self._head is None or self._norm is None:
            raise RuntimeError("the last stage has norm and head")
        return self._head, self._norm


def _num_weights(layer: LayerStruct) -> int:
    return sum(int(one.n) * int(one.k) for one in (layer.qkv, layer.out, layer.gate_up, layer.down))


def packed(linear: Linear) -> PackedLinear:
    if linear.packed is None:
        raise RuntimeError("finish() was not called with kernels")
    return linear.packed
