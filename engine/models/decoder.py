"""The decoder that all families share: Llama's shape and what its relatives add to it (engine/models/families.py).

Several ranks may share one (engine/models/shard.py). Then the kernels compute half a layer in a call, up to where the
ranks add up what they have. On a CUDA device what stands between products is then torch's. Or it is one stage of a
decoder and has some of the layers (engine/models/stage.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from engine.models.layer_inputs import LayerInputs
from engine.models.native import NativeDecoder
from engine.models.shard import Shard, log_dealt_out, places_of_rows, shard_of
from engine.models.stage import Stage
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
        stage: Stage | None = None,
    ) -> None:
        """This rank's part of the model, or of one stage of it; all of it if `group` and `stage` are None.
        `deals_experts`: it has some experts whole. The rotary tables cover `num_positions`. Raises `StartupError` if
        the ranks cannot share the model."""
        self.shard: Shard = shard_of(whole, group or OneRank(), deals_experts=deals_experts)
        self._group = self.shard.group
        config = self.shard.config
        self.config = config
        self.stage = stage = stage or Stage()
        self._dtype = dtype
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
        self.states_dtype = dtype
        self.inputs = LayerInputs()
        self.native: NativeDecoder | None = None
        self.fused: FusedDecoder | None = None
        num_rows = self.shard.vocabulary.size
        is_tied = config.tie_word_embeddings
        self.embedding: Embedding | None = None
        if stage.is_first or (is_tied and stage.is_last):
            self.embedding = Embedding(
                num_rows,
                config.hidden_size,
                scale=config.embedding_scale,
                is_head_too=is_tied and stage.is_last,
                dtype=dtype,
                device=device,
            )
        self.layers = [DecoderLayer(self.shard, index, dtype, device) for index in stage.layers(config.num_layers)]
        self.norm: RMSNorm | None = None
        self.head: Linear | None = None
        if stage.is_last:
            self.norm = RMSNorm(
                config.hidden_size, config.eps, from_one=config.norms_from_one, dtype=dtype, device=device
            )
            if is_tied and self.embedding is not None:
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
        of_other_stages = self._prefixes_elsewhere()
        load_weights(
            files,
            self.places(),
            kernels=kernels,
            may_skip=lambda name: name in elsewhere or name.startswith(of_other_stages) or self.may_skip(name),
            rename=rename,
        )
        if elsewhere:
            log_dealt_out(self.shard.experts)
        if self._is_tied_head and self.embedding is not None and self.embedding.packed is not None:
            self.head = Linear.packed_as(self.embedding.packed)

    def places(self) -> dict[str, Place]:
        """Where each tensor of a checkpoint goes, by its name there. All of them, or what is computed is garbage."""
        rows = self.shard.vocabulary
        places: dict[str, Place] = {}
        if self.embedding is not None:
            places["model.embed_tokens.weight"] = place_of_part(self.embedding, rows.part(0), rows.whole)
        if self.norm is not None:
            places["model.norm.weight"] = self.norm.weight
        if self.head is not None and not self._is_tied_head:
            places |= places_of_rows(self.head, {"lm_head": rows})
        for layer in self.layers:
            places |= {f"model.layers.{layer.index}.{name}": place for name, place in layer.places().items()}
        return places

    @property
    def _is_tied_head(self) -> bool:
        """Whether the embedding is here, and the head beside it is the same matrix."""
        return self.config.tie_word_embeddings and self.stage.is_last

    def _prefixes_elsewhere(self) -> tuple[str, ...]:
        """What the names of a checkpoint's tensors begin with that other stages have."""
        own = {layer.index for layer in self.layers}
        layers = [f"model.layers.{index}." for index in range(self.config.num_layers) if index not in own]
        ends = [
            *([] if self.embedding else ["model.embed_tokens."]),
            *([] if self.norm else ["model.norm."]),
            *([] if self.head else ["lm_head."]),
        ]
        return (*layers, *ends)

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
        if self.norm is not None:
            self.norm.finish()
        if self.head is not None:
            self.head.finish(kernels)
            is_exact = kernels is not None and kernels.quantization == "none"
            if self._is_tied_head and self.embedding is not None and self.head.packed is not None and is_exact:
                self.embedding.share(self.head.packed)
        if self._group.size == 1 and self.shard.data_ranks is None:
            self.fused = FusedDecoder.of(self.config, self.layers, self.ropes)
        if kernels is not None:
            self.states_dtype = torch.float32
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
        return self.forward_from(self._embed(token_ids), positions, attention, between_layers)

    def forward_from(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        between_layers: Callable[[], None],
    ) -> torch.Tensor:
        if not len(hidden):  # a data rank without a row: others need its experts
            for layer in self.layers:
                layer.add_experts(hidden)
            return hidden
        inputs, native = self.inputs, self.native
        inputs.begin()
        if native is not None and isinstance(attention, NativeStep) and len(hidden) < native.below:
            return native.forward(hidden, attention, between_layers, inputs)
        hidden = hidden.to(self._dtype)  # the stage before may have had kernels
        if self.fused is not None and isinstance(attention, PagedStep):
            return self.fused.forward(hidden, positions, attention, between_layers, inputs)
        angles = [rope.angles(positions) for rope in self.ropes]
        for layer in self.layers:
            inputs.note(layer.index, hidden)
            index = self.config.rope_of_layer[layer.index]
            hidden = layer.forward(hidden, self.ropes[index], *angles[index], attention)
            between_layers()
        return hidden

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]`, whichever rank has a token's row."""
        if self.embedding is None:
            raise RuntimeError("the first stage has the embedding")
        if self._group.size == 1:
            return self.embedding(token_ids)
        rows = self.shard.vocabulary
        is_elsewhere = (token_ids < rows.start) | (token_ids >= rows.stop)
        hidden = self.embedding((token_ids - rows.start).masked_fill(is_elsewhere, 0))
        hidden.masked_fill_(is_elsewhere[:, None], 0)
        self._group.all_reduce(hidden)
        return hidden

    def last_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ends()[0](hidden)

    def _ends(self) -> tuple[RMSNorm, Linear]:
        if self.norm is None or self.head is None:
            raise RuntimeError("the last stage has norm and head")
        return self.norm, self.head

    def keep_layer_inputs(self, layers: Sequence[int]) -> None:
        self.inputs = LayerInputs(layers)

    def take_layer_inputs(self) -> torch.Tensor:
        return self.inputs.take()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            raise RuntimeError("the first stage has the embedding")
        rows, scale = self.embedding(token_ids), self.config.embedding_scale
        return rows if scale == 1.0 else rows.div_(scale)

    def best_after_norm(self, states: torch.Tensor) -> torch.Tensor:
        return self._ends()[1](states).argmax(dim=-1)

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
            norm, head = self._ends()
            logits = head(norm(hidden))
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
