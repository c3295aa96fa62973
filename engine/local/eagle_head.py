"""The network of EAGLE heads: one decoder layer that continues the model's own states (Li et al., 2024:
arXiv 2401.15077 and 2406.16858).

The layer's token i is made of the model's state of token i and of the token after it. What the layer gives is a guess
of the state of that next token, and the model's head names the token after it:

    fc(embedding of token i + 1, state of token i) ──> layer, without its first norm ──> the model's head: token i + 2

The next token of a guess goes in with the guessed state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from common.errors import StartupError
from engine.attention.base import StepAttention
from engine.layers import Embedding, Linear, PartPlace, Place, RotaryEmbedding
from engine.local.device import LocalDevice
from engine.models.description import DecoderConfig
from engine.models.layer import DecoderLayer
from engine.models.shard import shard_of
from engine.ranks.group import OneRank


class EagleHead:
    """Of EAGLE-1 and EAGLE-2, whose checkpoints are alike."""

    layers: Sequence[int] = ()  # of the model, whose inputs stand for its last states
    leftovers = frozenset({"lm_head.weight"})  # tensors that some checkpoints have and nobody reads

    def __init__(
        self, config: DecoderConfig, tensors: Mapping[str, torch.Tensor], device: LocalDevice, layer_name: str
    ) -> None:
        """`config` is the layer's, and `layer_name` its name in a checkpoint. `fill` is to be called with `tensors`."""
        self.config = config
        self.device = device
        self.layer_name = layer_name
        self.layer = DecoderLayer(shard_of(config, OneRank()), 0, device.dtype, device.device)
        self.fc = self.make_fc(tensors)
        self._embedding: Embedding | None = None
        if (own := tensors.get("embed_tokens.weight")) is not None:
            self._embedding = Embedding(len(own), config.hidden_size, dtype=device.dtype, device=device.device)
        rope, num_positions = config.ropes[0], device.info.max_model_len
        self.rope = RotaryEmbedding(rope.inv_freq, rope.scale, num_positions, dtype=device.dtype, device=device.device)

    def make_fc(self, tensors: Mapping[str, torch.Tensor]) -> Linear:
        return self.linear(2 * self.config.hidden_size, self.config.hidden_size, bias="fc.bias" in tensors)

    def linear(self, num_in: int, num_out: int, *, bias: bool = False, is_head: bool = False) -> Linear:
        dtype, device = self.device.dtype, self.device.device
        return Linear(num_in, num_out, bias=bias, is_head=is_head, dtype=dtype, device=device)

    # ------------------------------------------------------------------------------------------- loading

    def places(self) -> dict[str, Place]:
        """Where each tensor goes, by its name in a checkpoint. All have to be there, but for the embedding."""
        places = {f"{self.layer_name}.{name}": place for name, place in self.layer_places().items()}
        places |= self.fc.places({"fc": None})
        if self._embedding is not None:
            places["embed_tokens.weight"] = self._embedding.plain()
        return places

    def layer_places(self) -> dict[str, Place]:
        return {name: place for name, place in self.layer.places().items() if name != "input_layernorm.weight"}

    def fill(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """Raises `StartupError` that names a tensor which is missing, not known, or of another shape."""
        places = self.places()
        for name, place in places.items():
            if isinstance(place, PartPlace):
                raise TypeError(f"{name} of one rank")
            if (tensor := tensors.get(name)) is None:
                raise StartupError(f"{source} lacks tensor {name}")
            if tuple(tensor.shape) != tuple(place.shape):
                raise StartupError(
                    f"{source}: tensor {name} has shape {list(tensor.shape)}, not {list(place.shape)} as config.json "
                    "and the model need"
                )
            (place if isinstance(place, torch.Tensor) else place.plain()).copy_(tensor)
        for name in sorted(set(tensors) - set(places) - self.leftovers):
            if not name.endswith(".rotary_emb.inv_freq"):
                raise StartupError(f"{source} has tensor {name}, which no EAGLE head of this kind has")
        info = self.device.info
        if self._embedding is None and self.config.hidden_size != info.hidden_size:
            raise StartupError(f"{source} lacks tensor embed_tokens.weight, and the model's is not as wide")
        vocab_size = info.vocab_size
        if self._embedding is not None and self._embedding.shape[0] < vocab_size:
            raise StartupError(f"{source}: embed_tokens.weight is for fewer than the model's {vocab_size} tokens")
        self.finish()

    def finish(self) -> None:
        self.layer.finish(self.device.kernels)
        self.fc.finish(self.device.kernels)

    @property
    def num_weights(self) -> int:
        """That a guess of one token multiplies by."""
        config, hidden = self.config, self.config.hidden_size
        attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * hidden
        head = self.device.info.vocab_size * hidden
        return attention + 3 * hidden * config.inner_size + 2 * hidden * hidden + head

    # ----------------------------------------------------------------------------------------- computing

    def states(self, rows: Sequence[int]) -> torch.Tensor:
        """The model's states of these rows of its last step, as `forward` takes them: `[len(rows), hidden_size]`."""
        return self.device.states(rows).to(self.device.dtype)

    def forward(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Guesses the state of each of `token_ids` `[num_tokens]` from `states` `[num_tokens, hidden_size]` of the
        tokens before them, which are at `positions`."""
        hidden = self.fc(torch.cat((self.embed(token_ids), states), dim=-1))
        return self.layer.add_to(hidden, hidden.clone(), self.rope, *self.rope.angles(positions), attention)

    def best_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """The token guessed after each of the guessed `states`, `[num_tokens]` int64."""
        return self.device.best_tokens(states)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.device.embed(token_ids) if self._embedding is None else self._embedding(token_ids)
