"""FlashInfer's paged kernels for CUDA: one call per layer for the decodes of a step, one for its prefill chunks.

Layers with different windows are planned apart; tables begin at the block in which a window begins.

They read K and V where they lie: each layer is a strided view of the one cache tensor,
`[num_blocks, 2, num_kv_heads, block_size, head_dim]` ("HND").
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from common.errors import StartupError
from common.types import KVCacheSpec
from engine.attention.base import AttentionBackend, AttentionShape, KVWriter, StepAttention
from engine.attention.step_tables import Int32s, StepTables
from engine.device_copies import to_device
from engine.step import StepRow

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for split-KV partial results


class _Wrapper(Protocol):
    def plan(self, *tables_and_sizes: torch.Tensor | int, **options: object) -> None: ...

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor: ...


def import_flashinfer() -> ModuleType:
    """Raises `StartupError` that names the extra to install."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:
        raise StartupError(f"attention backend flashinfer: {error}; pip install 'baton-serve[flashinfer]'") from error


class FlashInferBackend(AttentionBackend):
    def __init__(self, cache: torch.Tensor, spec: KVCacheSpec, shape: AttentionShape) -> None:
        super().__init__(cache, spec, shape)
        self.writer = KVWriter(self)
        flashinfer = import_flashinfer()
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        prefill_workspace = torch.empty_like(workspace)
        # Tensor cores pay off for decode if several query heads share a KV head.
        grouped = shape.num_heads // spec.num_kv_heads >= 4
        # By window. They run one after another, so they share their workspaces.
        self.decode: dict[int, _Wrapper] = {}
        self.prefill: dict[int, _Wrapper] = {}
        for window in shape.distinct_windows():
            self.decode[window] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=grouped
            )
            self.prefill[window] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(prefill_workspace, "HND")

    def prepare(self, sequences: Sequence[StepRow]) -> StepAttention:
        """Decodes first, then prefill chunks: the model runner's order. Other orders cost one index each layer."""
        tables = StepTables(sequences, self.spec.block_size)
        decodes, chunks = (np.flatnonzero(each).astype(np.int32) for each in (tables.num_new == 1, tables.num_new != 1))
        spec, shape = self.spec, self.shape
        sizes = (shape.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size)
        for window in shape.distinct_windows():
            options: dict[str, object] = {
                "q_data_type": self.cache.dtype,
                "kv_data_type": self.cache.dtype,
                "sm_scale": shape.softmax_scale,
                "window_left": window - 1,  # tokens beside the query's own; -1: all
                "logits_soft_cap": shape.soft_cap,
            }
            if len(decodes):
                self.decode[window].plan(*self._tables(tables, decodes, window), *sizes, **options)
            if len(chunks):
                offsets = torch.from_numpy(np.append(np.int32(0), tables.num_new[chunks].cumsum(dtype=np.int32)))
                planned = self._tables(tables, chunks, window)
                self.prefill[window].plan(offsets, *planned, *sizes, causal=True, **options)
        return _FlashInferStep(self, tables, num_decodes=len(decodes), num_chunks=len(chunks))

    def _tables(self, tables: StepTables, rows: Int32s, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Offsets into the block ids, the block ids (on the device), and the tokens in each last block, all int32."""
        block_ids, offsets = tables.flat(rows, window)
        last = (tables.num_before[rows] + tables.num_new[rows] - 1) % tables.block_size + 1
        return offsets, to_device(block_ids, self.device), torch.from_numpy(last)


class _FlashInferStep(StepAttention):
    def __init__(self, backend: FlashInferBackend, tables: StepTables, *, num_decodes: int, num_chunks: int) -> None:
        self._cache = backend.cache
        self._shape = backend.shape
        self._writer, self._rows = backend.writer, backend.writer.rows(tables)
        self._decode = backend.decode if num_decodes else {}
        self._prefill = backend.prefill if num_chunks else {}
        self._num_decodes = num_decodes
        self._order: torch.Tensor | None = None
        if (tables.num_new[:num_decodes] != 1).any():
            self._order = to_device(_decodes_first(tables), backend.device)

    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        self._writer.write(layer, self._rows, kv)
        cache = self._cache[:, layer]
        q = q.contiguous() if self._order is None else q[self._order]
        parts: list[torch.Tensor] = []
        window = self._shape.window(layer)
        if self._decode:
            parts.append(self._decode[window].run(q[: self._num_decodes], cache))
        if self._prefill:
            parts.append(self._prefill[window].run(q[self._num_decodes :], cache))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._order is not None:
            out = torch.empty_like(out).index_copy_(0, self._order, out)
        return out.flatten(1)


def _decodes_first(tables: StepTables) -> torch.Tensor:
    """Positions in the flat batch, those of single tokens first, `[num_tokens]` int64."""
    return torch.from_numpy(np.argsort(np.repeat(tables.num_new != 1, tables.num_new), stable=True))
