"""The decoder that all families share: Llama's shape and what its relatives add to it (engine/models/families.py).

Several ranks may share one (engine/models/shard.py). Then the kernels compute half a layer in a call, up to where the
ranks add up what they have. On a CUDA device what stands between products is then torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from common.model_files import ModelFiles
from engine.attention.base import PagedStep, StepAttention
from engine.attention.native import NativeStep
from engine.kernels.library import Kernels
from engine.layers import Embedding, Linear, Place, RMSNorm, RotaryEmbedding, place_of_part
from engine.loading.weights import load_weights
from engine.models.base import CausalLM
from engine.models.description import DecoderConfig
from engine.models.fused import FusedDecoder
from engine.models.layer import DecoderLayer
from engine.models.native import NativeDecoder
from engine.models.shard import Shard, log_dealt_out, places_of_rows, shard_of
from engine.models.text_part import is_composite, text_name
from engine.ranks.group import OneRank, RankGroup


class Decoder(CausalLM):
    def __init__(
        self,
        whole: DecoderConfig,
        *,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
        deals_experts: bool = False,
    ) -> None:
        """This rank's part of the model; all of it if `group` is None. `deals_experts`: it has some experts whole. The
        rotary tables cover `num_positions`. Raises `StartupError` if the ranks cannot share the model."""
        self.shard: Shard = shard_of(whole, group or OneRank(), deals_experts=deals_experts)
        self._group = self.shard.group
        config = self.shard.config
        self.config = config
        self.num_layers = config.num_layers
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.kv_shard = self.shard.kv_shard
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.softmax_scale = config.softmax_scale
        self.windows = config.windows
        self.soft_cap = config.soft_cap
        self.kv_variant = " ".join(sorted({rope.variant for rope in config.ropes if rope.variant}))
        self.native: NativeDecoder | None = None
        self.fused: FusedDecoder | None = None
        num_rows = self.shard.vocabulary.size
        self.embedding = Embedding(
            num_rows,
            config.hidden_size,
            scale=config.embedding_scale,
            is_head_too=config.tie_word_embeddings,
            dtype=dtype,
            device=device,
        )
        self.layers = [DecoderLayer(self.shard, index, dtype, device) for index in range(self.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.eps, from_one=config.norms_from_one, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.head = Linear.of(self.embedding.plain(), is_head=True)
        else:
            self.head = Linear(config.hidden_size, num_rows, bias=False, is_head=True, dtype=dtype, device=device)
        self.ropes = [
            RotaryEmbedding(rope.inv_freq, rope.scale, num_positions, dtype=dtype, device=device)
            for rope in config.ropes
        ]

    def load(self, files: ModelFiles, kernels: Kernels | None) -> None:
        rename = text_name if is_composite(files.config) else str
        elsewhere = {f"model.layers.{layer.index}.{name}" for layer in self.layers for name in layer.names_elsewhere()}
        load_weights(
            files,
            self.places(),
            kernels=kernels,
            may_skip=lambda name: name in elsewhere or self.may_skip(name),
            rename=rename,
        )
        if elsewhere:
            log_dealt_out(self.shard.experts)
        if self.config.tie_word_embeddings and self.embedding.packed is not None:
            self.head = Linear.packed_as(self.embedding.packed)

    def places(self) -> dict[str, Place]:
        """Where each tensor of a checkpoint goes, by its name there. All of them, or what is computed is garbage."""
        rows = self.shard.vocabulary
        places: dict[str, Place] = {
            "model.embed_tokens.weight": place_of_part(self.embedding, rows.part(0), rows.whole),
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            places |= places_of_rows(self.head, {"lm_head": rows})
        for layer in self.layers:
            places |= {f"model.layers.{layer.index}.{name}": place for name, place in layer.places().items()}
        return places

    def may_skip(self, name: str) -> bool:
        """Whether a checkpoint may hold tensor `name` although it has no place.

        Tied checkpoints may repeat the embedding as the head; old ones carry their rotary frequencies.
        """
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        return name.endswith(".rotary_emb.inv_freq")

    def finish(self, kernels: Kernels | None) -> None:
        for layer in self.layers:
            layer.finish(kernels)
        self.norm.finish()
        self.head.finish(kernels)
        is_exact = kernels is not None and kernels.quantization == "none"
        if self.config.tie_word_embeddings and self.head.packed is not None and is_exact:
            self.embedding.share(self.head.packed)
        if self._group.size == 1:
            self.fused = FusedDecoder.of(self.config, self.layers, self.ropes)
        if kernels is not None:
            self.native = NativeDecoder(
                kernels, self.config, self.layers, self.norm, self.head, self.ropes, self._group
            )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        between_layers: Callable[[], None],
    ) -> torch.Tensor:
        hidden = self._embed(token_ids)
        native = self.native
        if native is not None and isinstance(attention, NativeStep) and len(token_ids) < native.below:
            return native.forward(hidden, attention, between_layers)
        if self.fused is not None and isinstance(attention, PagedStep):
            return self.fused.forward(hidden, positions, attention, between_layers)
        angles = [rope.angles(positions) for rope in self.ropes]
        for layer, index in zip(self.layers, self.config.rope_of_layer, strict=True):
            hidden = layer.forward(hidden, self.ropes[index], *angles[index], attention)
            between_layers()
        return hidden

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]`, whichever rank has a token's row."""
        if self._group.size == 1:
            return self.embedding(token_ids)
        rows = self.shard.vocabulary
        is_elsewhere = (token_ids < rows.start) | (token_ids >= rows.stop)
        hidden = self.embedding((token_ids - rows.start).masked_fill(is_elsewhere, 0))
        hidden.masked_fill_(is_elsewhere[:, None], 0)
        self._group.all_reduce(hidden)
        return hidden

    def last_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._own_logits(hidden)
        if self._group.size == 1:
            return logits
        missing = self.shard.rows_per_rank - logits.shape[1]
        if missing:
            logits = F.pad(logits, (0, missing))  # all ranks' rows are equally long, and the last ones have few tokens
        # Each rank had as many rows as the first, so all that is too much lies at the end.
        return self._group.all_gather(logits)[:, : self.vocab_size].contiguous()

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of this rank's tokens."""
        if self.native is not None and hidden.dtype == torch.float32:
            logits = self.native.logits(hidden)
        else:
            logits = self.head(self.norm(hidden))
        cap = self.config.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            native = self._native_head(hidden)
            return super().best_tokens(hidden) if native is None else native.best_tokens(hidden)
        values, tokens = self._own_logits(hidden).max(dim=-1, keepdim=True)
        # float64 holds both exactly: a logit, and where in the vocabulary it stands.
        both = torch.cat((values.double(), tokens + self.shard.vocabulary.start), dim=1)
        of_ranks = self._group.all_gather(both).view(len(hidden), -1, 2)
        best = of_ranks[:, :, 0].argmax(dim=1, keepdim=True)
        return of_ranks[:, :, 1].gather(1, best).squeeze(1).long()

    def _native_head(self, hidden: torch.Tensor) -> NativeDecoder | None:
        """What finds the best tokens, if their logits are as the head gives them: a soft cap may make equal what was
        not."""
        return None if hidden.dtype != torch.float32 or self.config.logit_soft_cap else self.native
