"""Llama (1 to 3.x) and what has its shape, SmolLM2 among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import StartupError
from engine.attention.base import StepAttention
from engine.attention.native import NativeStep
from engine.kernels.library import Kernels, LayerStruct, PackedLinear
from engine.layers import Embedding, Linear, RMSNorm, RopeScaling, RotaryEmbedding, silu_and_mul
from engine.models.base import CausalLM, ConfigReader
from engine.models.rope import read_rope


@dataclass(slots=True, frozen=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, config: dict[str, object]) -> LlamaConfig:
        reader = ConfigReader(config)
        num_heads = reader.integer("num_attention_heads")
        num_kv_heads = reader.integer("num_key_value_heads", num_heads)
        hidden_size = reader.integer("hidden_size")
        max_positions = reader.integer("max_position_embeddings", 2048)
        rope_theta, rope_scaling = read_rope(reader, max_positions)
        activation = reader.text("hidden_act", "silu")
        if activation != "silu":
            raise StartupError(f"config.json: hidden_act {activation!r} is not supported by this architecture")
        if num_heads % num_kv_heads:
            raise StartupError("config.json: num_attention_heads has to be a multiple of num_key_value_heads")
        return cls(
            vocab_size=reader.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=reader.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=reader.integer("head_dim", hidden_size // num_heads),
            max_positions=max_positions,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
            attention_bias=reader.boolean("attention_bias", False),
            mlp_bias=reader.boolean("mlp_bias", False),
        )


class LlamaLayer:
    def __init__(self, config: LlamaConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        hidden, head_dim = config.hidden_size, config.head_dim
        self.q_size = config.num_heads * head_dim
        self.kv_size = config.num_kv_heads * head_dim
        self.num_q = config.num_heads
        self.num_qk = config.num_heads + config.num_kv_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        bias = config.attention_bias
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.post_attention_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.qkv = Linear(hidden, self.q_size + 2 * self.kv_size, bias=bias, dtype=dtype, device=device)
        self.out = Linear(self.q_size, hidden, bias=bias, dtype=dtype, device=device)
        self.inner = config.intermediate_size
        self.gate_up = Linear(hidden, 2 * self.inner, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(self.inner, hidden, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        rope: RotaryEmbedding,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Returns the new hidden states; overwrites `hidden` on the way."""
        qkv = self.qkv(self.input_norm(hidden)).view(hidden.shape[0], -1, self.head_dim)
        rope.rotate_(qkv[:, : self.num_qk], cos, sin)
        kv = qkv[:, self.num_q :].view(-1, 2, self.num_kv_heads, self.head_dim)
        attended = attention.forward(self.index, qkv[:, : self.num_q], kv)
        hidden = hidden.add_(self.out(attended))
        return hidden.add_(self.down(silu_and_mul(self.gate_up(self.post_attention_norm(hidden)))))

    def places(self) -> dict[str, torch.Tensor]:
        q, k, v = (0, self.q_size), (self.q_size, self.kv_size), (self.q_size + self.kv_size, self.kv_size)
        gate, up = (0, self.inner), (self.inner, self.inner)
        merged = {
            "self_attn.q_proj": (self.qkv, *q),
            "self_attn.k_proj": (self.qkv, *k),
            "self_attn.v_proj": (self.qkv, *v),
            "self_attn.o_proj": (self.out, 0, self.input_norm.weight.shape[0]),
            "mlp.gate_proj": (self.gate_up, *gate),
            "mlp.up_proj": (self.gate_up, *up),
            "mlp.down_proj": (self.down, 0, self.input_norm.weight.shape[0]),
        }
        places = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
        }
        for name, (linear, start, size) in merged.items():
            places[f"{name}.weight"] = linear.rows(start, start + size)
            if linear.bias is not None:
                places[f"{name}.bias"] = linear.bias[start : start + size]
        return places

    def finish(self, kernels: Kernels | None) -> None:
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.finish(kernels)


class NativeLlama:
    """The same layers as one call each of the kernels, with a residual stream in float32."""

    def __init__(self, kernels: Kernels, layers: list[LlamaLayer], norm: RMSNorm, head: Linear, rope: RotaryEmbedding):
        self._kernels = kernels
        self._cos, self._sin = rope.half_angles
        self._norm, self._eps = norm.weight.float(), norm.eps
        self._norms = [(each.input_norm.weight.float(), each.post_attention_norm.weight.float()) for each in layers]
        self._layers = [
            LayerStruct(
                *(each.data_ptr() for each in norms),
                *(packed(linear).struct for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)),
                layer.input_norm.eps,
            )
            for layer, norms in zip(layers, self._norms, strict=True)
        ]
        self._head = packed(head)
        self.below = layers[0].qkv.packed_below  # tokens of a step

    def forward(self, hidden: torch.Tensor, step: NativeStep, between_layers: Callable[[], None]) -> torch.Tensor:
        """As `CausalLM.forward`, from `hidden`, the tokens' embeddings; float32."""
        hidden = hidden.float()
        for index, layer in enumerate(self._layers):
            self._kernels.layer(layer, step.backend.struct, step.batch, index, hidden, self._cos, self._sin)
            between_layers()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._kernels.head(self._head, self._norm, self._eps, hidden)


def packed(linear: Linear) -> PackedLinear:
    if linear.packed is None:
        raise RuntimeError("finish() was not called with kernels")
    return linear.packed


class Llama(CausalLM):
    def __init__(
        self, config: dict[str, object], *, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`config` is config.json; the rotary table covers `num_positions`."""
        self.config = LlamaConfig.read(config)
        self.num_layers = self.config.num_layers
        self.num_heads = self.config.num_heads
        self.num_kv_heads = self.config.num_kv_heads
        self.head_dim = self.config.head_dim
        self.vocab_size = self.config.vocab_size
        self.softmax_scale = self.head_dim**-0.5
        self._native: NativeLlama | None = None
        hidden = self.config.hidden_size
        self.embedding = Embedding(self.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = [LlamaLayer(self.config, index, dtype, device) for index in range(self.num_layers)]
        self.norm = RMSNorm(hidden, self.config.rms_norm_eps, dtype=dtype, device=device)
        if self.config.tie_word_embeddings:
            self.head = Linear.sharing(self.embedding.weight)
        else:
            self.head = Linear(hidden, self.vocab_size, bias=False, dtype=dtype, device=device)
        self.rope = RotaryEmbedding(
            self.head_dim,
            num_positions,
            self.config.rope_theta,
            self.config.rope_scaling,
            dtype=dtype,
            device=device,
        )

    def places(self) -> dict[str, torch.Tensor]:
        places = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            places["lm_head.weight"] = self.head.rows(0, self.vocab_size)
        for layer in self.layers:
            places |= {f"model.layers.{layer.index}.{name}": place for name, place in layer.places().items()}
        return places

    def may_skip(self, name: str) -> bool:
        """Tied checkpoints may repeat the embedding as the head; old ones carry their rotary frequencies."""
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        return name.endswith(".rotary_emb.inv_freq")

    def finish(self, kernels: Kernels | None) -> None:
        for layer in self.layers:
            layer.finish(kernels)
        self.head.finish(kernels, is_head=True)
        if kernels is not None:
            self._native = NativeLlama(kernels, self.layers, self.norm, self.head, self.rope)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        between_layers: Callable[[], None],
    ) -> torch.Tensor:
        hidden = self.embedding(token_ids)
        native = self._native
        if native is not None and isinstance(attention, NativeStep) and len(token_ids) < native.below:
            return native.forward(hidden, attention, between_layers)
        cos, sin = self.rope.angles(positions)
        for layer in self.layers:
            hidden = layer.forward(hidden, self.rope, cos, sin, attention)
            between_layers()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._native is not None and hidden.dtype == torch.float32:
            return self._native.logits(hidden)
        return self.head(self.norm(hidden))
