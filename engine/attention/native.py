"""Attention by Baton's own kernels: reads the blocks where they lie, for prompts and single tokens alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.types import KVCacheSpec
from engine.attention.base import AttentionBackend, AttentionShape, StepAttention
from engine.attention.step_tables import StepTables
from engine.kernels.library import MAX_HEAD_DIM, AttentionStruct, BatchStruct, Kernels
from engine.step import StepRow


class NativeBackend(AttentionBackend):
    """Sums are float32 whatever the cache holds."""

    def __init__(self, cache: torch.Tensor, spec: KVCacheSpec, shape: AttentionShape, kernels: Kernels) -> None:
        super().__init__(cache, spec, shape)
        self.kernels = kernels
        sinks = [None] * spec.num_layers if shape.sinks is None else [each.data_ptr() for each in shape.sinks]
        self.structs = [  # one for each layer
            AttentionStruct(
                num_heads=shape.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                block_size=spec.block_size,
                block_stride=cache.stride(0),
                layer_stride=cache.stride(1),
                scale=shape.softmax_scale,
                soft_cap=shape.soft_cap,
                window=shape.window(layer),
                is_bf16=cache.dtype == torch.bfloat16,
                cache=cache.data_ptr(),
                sinks=sinks[layer],
            )
            for layer in range(spec.num_layers)
        ]

    @staticmethod
    def takes(spec: KVCacheSpec) -> bool:
        return spec.head_dim <= MAX_HEAD_DIM and spec.num_planes == 2

    def prepare(self, sequences: Sequence[StepRow]) -> NativeStep:
        return NativeStep(self, sequences)


class NativeStep(StepAttention):
    def __init__(self, backend: NativeBackend, sequences: Sequence[StepRow]) -> None:
        self.backend = backend
        tables = StepTables(sequences, backend.spec.block_size)
        self._tables = tables  # the struct holds addresses of its arrays
        self.num_tokens = tables.num_tokens
        arrays = (tables.num_before, tables.num_new, tables.starts, tables.tables)
        self.batch = BatchStruct(len(sequences), self.num_tokens, *(each.ctypes.data for each in arrays))

    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        if (
            q.stride(2) != 1
            or q.stride(1) != q.shape[2]
            or kv.stride()[1:] != (kv.stride(2) * kv.shape[2], q.shape[2], 1)
        ):
            q, kv = q.contiguous(), kv.contiguous()
        if q.stride(0) != kv.stride(0):
            # The kernel takes one distance between rows: that of Q and KV lying in one tensor.
            both = torch.cat((q.flatten(1), kv.flatten(1)), 1)
            q = both[:, : q.shape[1] * q.shape[2]].view(q.shape)
            kv = both[:, q.shape[1] * q.shape[2] :].view(kv.shape)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        self.backend.kernels.attention(self.backend.structs[layer], self.batch, layer, q, kv, out)
        return out
