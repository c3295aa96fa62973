"""Attention as the formula says, sequence by sequence in float32. Slow; other backends are compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, StepAttention
from engine.step import StepRow


class ReferenceBackend(AttentionBackend):
    def prepare(self, sequences: Sequence[StepRow]) -> StepAttention:
        return _ReferenceStep(self, sequences)


class _ReferenceStep(StepAttention):
    def __init__(self, backend: ReferenceBackend, sequences: Sequence[StepRow]) -> None:
        self._backend = backend
        self._sequences = sequences

    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        spec, cache = self._backend.spec, self._backend.cache[:, layer]
        value_dim = self._backend.shape.value_dim or spec.head_dim
        out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
        start = 0
        for sequence in self._sequences:
            stop = start + len(sequence.token_ids)
            positions = torch.arange(stop - start) + sequence.num_computed_tokens
            blocks = torch.tensor(list(sequence.block_ids))
            written = blocks[positions // spec.block_size]
            cache[written, :, :, positions % spec.block_size] = kv[start:stop]

            everything = torch.arange(sequence.num_computed_tokens + stop - start)
            seen = cache[blocks[everything // spec.block_size], :, :, everything % spec.block_size].float()
            group = self._backend.shape.num_heads // spec.num_kv_heads
            keys = seen[:, 0].repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
            values = seen[:, -1, :, :value_dim].repeat_interleave(group, dim=1)
            shape = self._backend.shape
            scores = torch.einsum("qhd,chd->hqc", q[start:stop].float(), keys) * shape.softmax_scale
            if shape.soft_cap:
                scores = (scores / shape.soft_cap).tanh() * shape.soft_cap
            hidden = everything[None, :] > positions[:, None]
            if window := shape.window(layer):
                hidden |= everything[None, :] <= positions[:, None] - window
                values = values.masked_fill(hidden.all(0)[:, None, None].to(values.device), 0)  # NaN times 0 is NaN
            scores.masked_fill_(hidden.to(scores.device), float("-inf"))
            if shape.sinks is not None:
                column = shape.sinks[layer].to(scores.device)[:, None, None].expand(-1, stop - start, 1)
                scores = torch.cat((scores, column), -1)
            weights = scores.softmax(-1)[..., : len(everything)]
            out[start:stop] = torch.einsum("hqc,chd->qhd", weights, values).to(q.dtype)
            start = stop
        return out.flatten(1)
