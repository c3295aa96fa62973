"""Cascade attention: blocks that several rows share are read once for all of them, the rest row by row.

Each row's attention to what it shares and to what is its own are two results, which their log-sum-exps join into the
one that both together have (recursive attention; FlashInfer's `merge_state_in_place`):

    queries of a group ---> shared blocks, one kernel for all groups --+
                                                                       +--> merged
    each query         ---> its own blocks, as without sharing --------+

FlashInfer's `MultiLevelCascadeAttentionWrapper` does the same with kernels for prompts on both levels. Here the own
blocks stay with the decode kernels, so that rows which share nothing are computed as ever. The shared blocks are left
to the older kernels ("fa2"), which alone divide few long prefixes among the whole device.

Layers with a window are not computed so: the kernels count a window from the end of what they are given.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import AttentionShape
from engine.attention.shared_prefixes import MAX_GROUPS, SharedPrefixes
from engine.attention.step_tables import Int32s
from engine.device_copies import page_locked, to_device

# KV bytes of one layer. Two more kernels in a row take about 10 microseconds, in which an H100 or H200 reads 33 to 48
# MB. This is an estimate: it has not been measured.
MIN_SAVED_BYTES = 32 << 20


class _SharedWrapper(Protocol):
    def plan(self, *tables_and_sizes: torch.Tensor | int, **options: object) -> None: ...

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class SharedBlocks:
    """Attention of groups of rows to the blocks that each group shares."""

    def __init__(
        self,
        flashinfer: ModuleType,
        workspace: torch.Tensor,
        sizes: tuple[int, int, int, int],
        options: dict[str, object],
        *,
        graph_size: int | None = None,
        fixed_ids: torch.Tensor | None = None,
    ) -> None:
        """`sizes` and `options` as a plan takes them. `graph_size` and `fixed_ids`: of a recorded graph the number of
        rows, and memory for block ids."""
        self._flashinfer, self._device = flashinfer, workspace.device
        self._sizes, self._options = sizes, options
        self._graph_size, self.num_groups = graph_size, MAX_GROUPS
        self._last: tuple[Int32s, Int32s, Int32s] | None = None
        fixed: dict[str, object] = {}
        if graph_size is not None:
            # FlashInfer takes tiles of rows for the largest group that there may be beside the others.
            self.num_groups = min(MAX_GROUPS, graph_size // 2)
            zeros = torch.zeros(self.num_groups + 1, dtype=torch.int32, device=self._device)
            fixed = {
                "use_cuda_graph": True,
                "qo_indptr_buf": zeros,
                "paged_kv_indptr_buf": zeros.clone(),
                "paged_kv_indices_buf": fixed_ids,
                "paged_kv_last_page_len_buf": zeros[1:].clone(),
            }
        self._wrapper: _SharedWrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "HND", backend="fa2", **fixed
        )

    def plan(self, shared: SharedPrefixes) -> None:
        """Does nothing if the last plan of a graph was the same."""
        block_offsets = np.append(np.int32(0), shared.num_blocks.cumsum(dtype=np.int32))
        self._plan(shared.offsets, block_offsets, shared.block_ids)

    def plan_for_recording(self, num_rows: int, block_id: int) -> None:
        """All rows of the graph and one block: the most rows that a later plan may have are those of the first one."""
        self._plan(np.array([0, num_rows], np.int32), np.array([0, 1], np.int32), np.array([block_id], np.int32))

    def _plan(self, row_offsets: Int32s, block_offsets: Int32s, ids: Int32s) -> None:
        if self._graph_size is not None:
            given = row_offsets, block_offsets, ids
            if self._last is not None and all(map(np.array_equal, self._last, given)):
                return
            self._last = given
            missing = self.num_groups + 1 - len(row_offsets)  # groups without rows
            row_offsets, block_offsets = (np.pad(each, (0, missing), "edge") for each in (row_offsets, block_offsets))
        page_lens = torch.full((len(row_offsets) - 1,), self._sizes[3], dtype=torch.int32)
        rows, blocks, lens = (
            page_locked(each, self._device)
            for each in (torch.from_numpy(row_offsets), torch.from_numpy(block_offsets), page_lens)
        )
        ids_there = to_device(torch.from_numpy(ids), self._device)
        self._wrapper.plan(rows, blocks, ids_there, lens, *self._sizes, causal=False, **self._options)

    def merge(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        is_sharing: torch.Tensor | None = None,
    ) -> None:
        """Adds what the first rows see of shared blocks to `out` `[num_rows, num_heads, head_dim]`, given what they see
        of their own, and to its log-sum-exps `lse` `[num_rows, num_heads]` float32. `is_sharing` `[num_rows]` bool:
        which rows are in a group; all if None."""
        shared_out, shared_lse = self._wrapper.run(q, cache, return_lse=True)
        self._flashinfer.merge_state_in_place(out, lse, shared_out, shared_lse, is_sharing)


def min_saved_tokens(shape: AttentionShape, num_kv_heads: int, head_dim: int, element_size: int) -> int:
    """Tokens that have to be saved in a step, so that each layer saves `MIN_SAVED_BYTES`."""
    value_dim = shape.value_dim or head_dim
    return -(-MIN_SAVED_BYTES // (num_kv_heads * (head_dim + value_dim) * element_size))
