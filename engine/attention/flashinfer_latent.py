"""FlashInfer's paged kernels for attention to latents (MLA): one call per layer for all rows of a step.

They read the cache where it lies: `[num_blocks, block_size, head_dim]` of a layer, a strided view of the one cache
tensor. A row of it is a latent, and the rotated part of K behind that; queries are like it ("packed"). No GPU has run
them for Baton yet, so they are taken only if they are asked for by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.errors import StartupError
from common.types import KVCacheSpec
from engine.attention.base import AttentionBackend, AttentionShape, KVWriter, PagedStep, StepAttention
from engine.attention.flashinfer import WORKSPACE_BYTES, import_flashinfer
from engine.attention.step_tables import StepTables
from engine.device_copies import page_locked, to_device
from engine.step import StepRow


class FlashInferLatentBackend(AttentionBackend):
    def __init__(self, cache: torch.Tensor, spec: KVCacheSpec, shape: AttentionShape) -> None:
        """Raises `StartupError` for windows, soft caps and sinks, which these kernels do not have."""
        super().__init__(cache, spec, shape)
        if shape.soft_cap or any(shape.windows) or shape.sinks is not None:
            raise StartupError(
                "attention backend flashinfer: "
                "attention to latents (MLA) with windows, soft caps or sinks is not supported; take torch"
            )
        self.writer = KVWriter(self)
        self._mla = import_flashinfer().mla
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        # These kernels run on every GPU since Ampere, and take strides and offsets ("CSR") as they are.
        self.wrapper = self._mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa2")

    def prepare(self, sequences: Sequence[StepRow]) -> StepAttention:
        tables, shape = StepTables(sequences, self.spec.block_size), self.shape
        block_ids, offsets = tables.flat(np.arange(len(sequences), dtype=np.int32), 0)
        queries = torch.from_numpy(np.append(np.int32(0), tables.num_new.cumsum(dtype=np.int32)))
        lengths = torch.from_numpy(tables.num_before + tables.num_new)
        # Offsets and lengths are read on the host, too, and copied to the device.
        queries, offsets, lengths = (page_locked(each, self.device) for each in (queries, offsets, lengths))
        self.wrapper.plan(
            metadata=self._mla.MLAPlanMetadata.csr(queries, offsets, to_device(block_ids, self.device), lengths),
            num_heads=shape.num_heads,
            head_dim_ckv=shape.value_dim,
            head_dim_kpe=self.spec.head_dim - shape.value_dim,
            page_size=self.spec.block_size,
            causal=True,
            sm_scale=shape.softmax_scale,
            q_data_type=self.cache.dtype,
            kv_data_type=self.cache.dtype,
        )
        return _FlashInferLatentStep(self, tables)


class _FlashInferLatentStep(PagedStep):
    def __init__(self, backend: FlashInferLatentBackend, tables: StepTables) -> None:
        self._cache, self._wrapper = backend.cache, backend.wrapper
        self.writer, self.rows = backend.writer, backend.writer.rows(tables)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(query=q, kv_cache=self._cache[:, layer, 0, 0])
        return out.flatten(1)
