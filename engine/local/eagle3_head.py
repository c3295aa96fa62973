"""The network of an EAGLE-3 head (Li et al., 2025: arXiv 2503.01840): a layer on what three layers of the model begin
with.

    fc(inputs of a low, a middle and a high layer) = state
    norm(embedding of token i + 1), norm(state of token i) ──> layer ──> guessed state of token i + 1
    guessed state ──> norm ──> a head of its own: token i + 2

The guessed state goes in again as it is. The head may be for some of the tokens: `d2t` has what is to be added to a
row's number to get its token id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from common.errors import StartupError
from engine.attention.base import StepAttention
from engine.layers import Linear, Place, RMSNorm
from engine.local.device import LocalDevice
from engine.local.eagle_head import EagleHead
from engine.models.description import DecoderConfig


class Eagle3Head(EagleHead):
    leftovers = frozenset({"t2d"})

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, torch.Tensor],
        device: LocalDevice,
        layer_name: str,
        layers: Sequence[int],
        *,
        norms_residual: bool,
    ) -> None:
        """`layers` of the model. `norms_residual`: what the layer gives is added to the normed state."""
        self.layers = layers
        super().__init__(config, tensors, device, layer_name)
        self._norms_residual = norms_residual
        hidden = config.hidden_size
        num_out = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.layer.qkv = self.linear(2 * hidden, num_out, bias=config.qkv_bias)
        self._hidden_norm, self._norm = self._make_norm(), self._make_norm()
        self._head: Linear | None = None  # None: the model's
        if (rows := tensors.get("lm_head.weight")) is not None:
            self._head = self.linear(hidden, len(rows), is_head=True)
        self._token_ids: torch.Tensor | None = None  # of the head's rows; None: their numbers

    def _make_norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.eps, dtype=self.device.dtype, device=self.device.device)

    def make_fc(self, tensors: Mapping[str, torch.Tensor]) -> Linear:
        num_in = len(self.layers) * self.device.info.hidden_size
        return self.linear(num_in, self.config.hidden_size, bias="fc.bias" in tensors)

    def layer_places(self) -> dict[str, Place]:
        return self.layer.places() | {"hidden_norm.weight": self._hidden_norm.weight}

    def places(self) -> dict[str, Place]:
        places = super().places() | {"norm.weight": self._norm.weight}
        return places if self._head is None else places | self._head.places({"lm_head": None})

    def fill(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        super().fill({name: tensor for name, tensor in tensors.items() if name != "d2t"}, source)
        vocab_size = self.device.info.vocab_size
        num_rows = vocab_size if self._head is None else len(tensors["lm_head.weight"])
        if (offsets := tensors.get("d2t")) is None:
            if num_rows > vocab_size:
                raise StartupError(f"{source}: lm_head.weight is for {num_rows} tokens, the model has {vocab_size}")
        else:
            if tuple(offsets.shape) != (num_rows,):
                raise StartupError(f"{source}: tensor d2t has shape {list(offsets.shape)}, the head is for {num_rows}")
            token_ids = torch.arange(num_rows) + offsets.long()
            if num_rows and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
                raise StartupError(f"{source}: d2t names tokens that are none of the model's {vocab_size}")
            self._token_ids = token_ids.to(self.device.device)
        if self._head is None and self.config.hidden_size != self.device.info.hidden_size:
            raise StartupError(f"{source} lacks tensor lm_head.weight, and its states are not as wide as the model's")

    def finish(self) -> None:
        super().finish()
        for norm in (self._hidden_norm, self._norm):
            norm.finish()
        if self._head is not None:
            self._head.finish(self.device.kernels)

    @property
    def num_weights(self) -> int:
        config, hidden = self.config, self.config.hidden_size
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * 2 * hidden
        num_rows = self.device.info.vocab_size if self._token_ids is None else len(self._token_ids)
        return qkv + config.num_heads * config.head_dim * hidden + 3 * hidden * config.inner_size + num_rows * hidden

    def states(self, rows: Sequence[int]) -> torch.Tensor:
        return self.fc(self.device.layer_inputs(rows).to(self.device.dtype))

    def forward(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        normed = self._hidden_norm(states)
        both = torch.cat((self.layer.input_norm(self.embed(token_ids)), normed), dim=-1)
        residual = normed if self._norms_residual else states.clone()
        return self.layer.add_to(residual, both, self.rope, *self.rope.angles(positions), attention)

    def best_tokens(self, states: torch.Tensor) -> torch.Tensor:
        normed = self._norm(states)
        if self._head is None:
            return self.device.best_tokens(normed)
        rows = self._head(normed).argmax(dim=-1)
        return rows if self._token_ids is None else self._token_ids[rows]
