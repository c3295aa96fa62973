"""FlashInfer's paged kernels for CUDA: one call per layer for the decodes of a step, one for its prefill chunks.

Layers with different windows are planned apart; tables begin at the block in which a window begins.

They read K and V where they lie: each layer is a strided view of the one cache tensor,
`[num_blocks, 2, num_kv_heads, block_size, head_dim]` ("HND").

A plan is made on the host and copied to the device from page-locked memory that the next plan overwrites. So a step may
be prepared only when the device has computed the step before.

With `cascade`, blocks that several single tokens see are read once for all of them (`flashinfer_cascade`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, Protocol, overload

import numpy as np
import torch

from common.errors import StartupError
from common.types import KVCacheSpec
from engine.attention.base import AttentionBackend, AttentionShape, FixedDecode, KVWriter, PagedStep, StepAttention
from engine.attention.flashinfer_cascade import SharedBlocks, min_saved_tokens
from engine.attention.shared_prefixes import SharedPrefixes, shared_prefixes
from engine.attention.step_tables import Int32s, StepTables
from engine.device_copies import page_locked, to_device
from engine.step import StepRow

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for split-KV partial results


class _Wrapper(Protocol):
    def plan(self, *tables_and_sizes: torch.Tensor | int, **options: object) -> None: ...

    @overload
    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor: ...

    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, return_lse: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def import_flashinfer() -> ModuleType:
    """Raises `StartupError` that names the extra to install."""
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:
        raise StartupError(f"attention backend flashinfer: {error}; pip install 'baton-serve[flashinfer]'") from error


class FlashInferBackend(AttentionBackend):
    has_fixed_decode = True

    def __init__(
        self,
        cache: torch.Tensor,
        spec: KVCacheSpec,
        shape: AttentionShape,
        *,
        max_table_blocks: int | None = None,
        cascade: bool = False,
    ) -> None:
        """`max_table_blocks`: of one sequence, in recorded graphs; as many as the cache has if None. `cascade`: blocks
        that several single tokens see are read once, if that saves enough."""
        super().__init__(cache, spec, shape)
        self.writer = KVWriter(self)
        self._flashinfer = import_flashinfer()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        prefill_workspace = torch.zeros_like(self._workspace)
        # Tensor cores pay off for decode if several query heads share a KV head.
        self._is_grouped = shape.num_heads // spec.num_kv_heads >= 4
        self._max_table_blocks = min(max_table_blocks or len(cache), len(cache))
        # By window, of recorded graphs: memory for block ids, and what the last plan was made of.
        self.fixed_ids: dict[int, torch.Tensor] = {}
        self._fixed_plans: dict[int, tuple[_Wrapper, Int32s, Int32s]] = {}
        # By window. They run one after another, so they share their workspaces.
        self.decode: dict[int, _Wrapper] = {}
        self.prefill: dict[int, _Wrapper] = {}
        for window in shape.distinct_windows():
            self.decode[window] = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=self._is_grouped
            )
            self.prefill[window] = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                prefill_workspace, "HND", backend=_prefill_kernels(spec, shape, window)
            )
        self.cascades = cascade and 0 in shape.distinct_windows()
        # By reading shared blocks once, of each layer's KV in a step.
        self.min_saved_tokens = min_saved_tokens(shape, spec.num_kv_heads, spec.head_dim, cache.element_size())
        self._fixed_shared_ids: torch.Tensor | None = None
        self.shared: SharedBlocks | None = None
        if self.cascades:
            self.shared = SharedBlocks(self._flashinfer, self._workspace, self._sizes(), self._options(0))

    def prepare(self, sequences: Sequence[StepRow]) -> StepAttention:
        """Decodes first, then prefill chunks: the model runner's order. Other orders cost one index each layer."""
        tables = StepTables(sequences, self.spec.block_size)
        decodes, chunks = (np.flatnonzero(each).astype(np.int32) for each in (tables.num_new == 1, tables.num_new != 1))
        shared = self._shared_prefixes(tables, decodes)
        if shared is not None and self.shared is not None:
            decodes = shared.order
            self.shared.plan(shared)
        for window in self.shape.distinct_windows():
            if len(decodes):
                num_skipped = None if shared is None or window else shared.num_skipped
                self.plan_decodes(self.decode[window], tables, decodes, window, num_skipped)
            if len(chunks):
                offsets = torch.from_numpy(np.append(np.int32(0), tables.num_new[chunks].cumsum(dtype=np.int32)))
                planned = self._tables(tables, chunks, window)
                self.prefill[window].plan(
                    page_locked(offsets, self.device), *planned, *self._sizes(), causal=True, **self._options(window)
                )
        return _FlashInferStep(self, tables, decodes, chunks, num_sharing=0 if shared is None else shared.num_sharing)

    def shared_prefixes(self, sequences: Sequence[StepRow]) -> SharedPrefixes | None:
        if not self.cascades:
            return None
        return self._shared_prefixes(
            StepTables(sequences, self.spec.block_size), np.arange(len(sequences), dtype=np.int32)
        )

    def _shared_prefixes(self, tables: StepTables, rows: Int32s) -> SharedPrefixes | None:
        if not self.cascades or len(rows) < 2:
            return None
        return shared_prefixes(tables, rows, min_tokens=self.min_saved_tokens)

    def fixed_decode(self, size: int) -> FixedDecode:
        """The largest size first: block ids of all sizes lie in the same memory."""
        for window in self.shape.distinct_windows():
            if window not in self.fixed_ids:
                shape = size * self._max_table_blocks
                self.fixed_ids[window] = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return _FixedFlashInferDecode(self, size)

    def fixed_cascade(self, size: int) -> FixedDecode:
        self.fixed_decode(size)
        if self._fixed_shared_ids is None:
            shape = size // 2 * self._max_table_blocks  # two rows at least share a block
            self._fixed_shared_ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        shared = SharedBlocks(
            self._flashinfer,
            self._workspace,
            self._sizes(),
            self._options(0),
            graph_size=size,
            fixed_ids=self._fixed_shared_ids,
        )
        return _FixedFlashInferDecode(self, size, shared)

    def fixed_wrapper(self, last_page_len: torch.Tensor, window: int) -> _Wrapper:
        """For as many tokens as `last_page_len` has; their last blocks' lengths are read there."""
        wrapper: _Wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._is_grouped,
            paged_kv_indptr_buffer=torch.zeros(len(last_page_len) + 1, dtype=torch.int32, device=self.device),
            paged_kv_indices_buffer=self.fixed_ids[window],
            paged_kv_last_page_len_buffer=last_page_len,
        )
        return wrapper

    def plan_fixed(
        self, wrapper: _Wrapper, tables: StepTables, rows: Int32s, window: int, num_skipped: Int32s | None
    ) -> None:
        """Plans the work if it is another than that of the last replay. A plan is about whole blocks: it holds until a
        sequence gets a further one, and so for most steps of a small batch."""
        ids, offsets = (each.numpy() for each in tables.flat(rows, window, num_skipped))
        last = self._fixed_plans.get(window)
        if last is None or last[0] is not wrapper or not np.array_equal(last[1], offsets):
            self.plan_decodes(wrapper, tables, rows, window, num_skipped)
        elif not np.array_equal(last[2], ids):
            self.fixed_ids[window][: len(ids)].copy_(to_device(torch.from_numpy(ids), self.device))
        self._fixed_plans[window] = wrapper, offsets, ids

    def plan_decodes(
        self, wrapper: _Wrapper, tables: StepTables, rows: Int32s, window: int, num_skipped: Int32s | None
    ) -> None:
        planned = self._tables(tables, rows, window, num_skipped)
        wrapper.plan(*planned, *self._sizes(), **self._options(window))

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.shape.num_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.block_size

    def _options(self, window: int) -> dict[str, object]:
        return {
            "q_data_type": self.cache.dtype,
            "kv_data_type": self.cache.dtype,
            "sm_scale": self.shape.softmax_scale,
            "window_left": window - 1,  # tokens beside the query's own; -1: all
            "logits_soft_cap": self.shape.soft_cap,
        }

    def _tables(
        self, tables: StepTables, rows: Int32s, window: int, num_skipped: Int32s | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Offsets into the block ids, the block ids (on the device), and the tokens in each last block, all int32."""
        block_ids, offsets = tables.flat(rows, window, num_skipped)
        last = torch.from_numpy((tables.num_before[rows] + tables.num_new[rows] - 1) % tables.block_size + 1)
        # FlashInfer reads offsets and lengths on the host, too, and copies them to the device.
        return page_locked(offsets, self.device), to_device(block_ids, self.device), page_locked(last, self.device)


class _FlashInferStep(PagedStep):
    def __init__(
        self, backend: FlashInferBackend, tables: StepTables, decodes: Int32s, chunks: Int32s, *, num_sharing: int
    ) -> None:
        """`decodes` are computed in that order, then `chunks`. The first `num_sharing` of them share blocks."""
        self._cache = backend.cache
        self._shape = backend.shape
        self.writer, self.rows = backend.writer, backend.writer.rows(tables)
        self._decode = backend.decode if len(decodes) else {}
        self._prefill = backend.prefill if len(chunks) else {}
        self._num_decodes = len(decodes)
        self._shared, self._num_sharing = backend.shared, num_sharing
        self._order: torch.Tensor | None = None
        sequences = np.concatenate((decodes, chunks))
        if (sequences[1:] < sequences[:-1]).any():
            self._order = to_device(_positions(tables, sequences), backend.device)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        cache = self._cache[:, layer]
        if self._order is not None:
            q = q[self._order]
        parts: list[torch.Tensor] = []
        window = self._shape.window(layer)
        if self._decode:
            parts.append(self._attend_decodes(window, q[: self._num_decodes], cache))
        if self._prefill:
            parts.append(self._prefill[window].run(q[self._num_decodes :], cache))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._order is not None:
            out = torch.empty_like(out).index_copy_(0, self._order, out)
        return out.flatten(1)

    def _attend_decodes(self, window: int, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        if self._shared is None or window or not self._num_sharing:
            return self._decode[window].run(q, cache)
        out, lse = self._decode[window].run(q, cache, return_lse=True)
        q, part, part_lse = (each[: self._num_sharing] for each in (q, out, lse))
        self._shared.merge(q, cache, part, part_lse)
        return out


class _FixedFlashInferDecode(FixedDecode):
    def __init__(self, backend: FlashInferBackend, size: int, shared: SharedBlocks | None = None) -> None:
        """`shared`: where the graph reads blocks that several tokens see."""
        device = backend.device
        self._backend = backend
        self._shared = shared
        self.writer = backend.writer
        # The first row of each token in the cache, how many tokens its last block has, and whether it shares blocks.
        self._given = torch.zeros((3, size), dtype=torch.int64, device=device)
        self._staged = page_locked(torch.zeros((3, size), dtype=torch.int64), device)
        self._last_page_len = torch.ones(size, dtype=torch.int32, device=device)
        self._is_sharing = torch.zeros(size, dtype=torch.bool, device=device)
        self._wrappers = {
            window: backend.fixed_wrapper(self._last_page_len, window) for window in backend.shape.distinct_windows()
        }
        self._all = np.arange(size, dtype=np.int32)

    def fill(self, sequences: Sequence[StepRow], shared: SharedPrefixes | None = None) -> None:
        backend = self._backend
        tables = StepTables(sequences, backend.spec.block_size)
        num_skipped = np.zeros(len(sequences), np.int32)
        if self._shared is not None:
            if shared is None:
                self._shared.plan_for_recording(len(sequences), int(tables.tables[0]))
            else:
                self._shared.plan(shared)
                num_skipped[: len(shared.order)] = shared.num_skipped
        for window, wrapper in self._wrappers.items():
            backend.plan_fixed(wrapper, tables, self._all, window, None if window else num_skipped)
        staged = self._staged.numpy()
        staged[0] = backend.writer.first_rows(tables)
        staged[1] = tables.num_before % tables.block_size + 1
        staged[2] = num_skipped > 0
        self._given.copy_(self._staged, non_blocking=True)

    def begin(self) -> None:
        self.rows = self._given[0][:, None] + self.writer.planes_there
        self._last_page_len.copy_(self._given[1])
        if self._shared is not None:
            self._is_sharing.copy_(self._given[2])

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        cache, window = self._backend.cache[:, layer], self._backend.shape.window(layer)
        if self._shared is None or window:
            return self._wrappers[window].run(q, cache).flatten(1)
        out, lse = self._wrappers[window].run(q, cache, return_lse=True)
        self._shared.merge(q, cache, out, lse, self._is_sharing)
        return out.flatten(1)


def _prefill_kernels(spec: KVCacheSpec, shape: AttentionShape, window: int) -> str:
    """FlashInfer's own choice, which is another set of kernels on Hopper, if they were tried there: they are a tenth
    faster on prompts of 8,000 tokens, and take minutes more to compile at a first start."""
    return "auto" if spec.head_dim == 128 and not window and not shape.soft_cap else "fa2"


def _positions(tables: StepTables, sequences: Int32s) -> torch.Tensor:
    """Where the tokens of `sequences`, one after the other, are in the flat batch, `[num_tokens]` int64."""
    counts = tables.num_new[sequences].astype(np.int64)
    ends = counts.cumsum()
    starts = tables.num_new.cumsum()[sequences] - counts
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts))
