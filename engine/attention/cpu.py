"""Attention out of a few large torch operations per layer. Made for CPUs; runs on any device.

A step's sequences are cut into runs, each a stretch of the flat batch:
- a prefill chunk at the start of its prompt attends to its own K and V as they come;
- a later chunk gathers its blocks, and masks what lies ahead;
- single tokens of neighbouring sequences with similar numbers of blocks are one batched product.

A layer that sees a window only gathers the blocks in which the window lies.

A gather copies `block_size` tokens of one head at a time, so it runs at the speed of memory. What it copied beyond
a sequence's last token is set to zero: masking alone would let NaN through (0 * NaN).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from common.cpu import read_cpu
from common.types import KVCacheSpec
from engine.attention.base import AttentionBackend, AttentionShape, KVWriter, StepAttention, first_seen
from engine.attention.step_tables import StepTables
from engine.device_copies import to_device
from engine.step import StepRow

_TILE = 64  # queries of each head at a time
_GROUP_BYTES = 32 << 20  # of gathered K and V in one batched product; bounds the workspace


class TorchBackend(AttentionBackend):
    def __init__(self, cache: torch.Tensor, spec: KVCacheSpec, shape: AttentionShape) -> None:
        super().__init__(cache, spec, shape)
        self.writer = KVWriter(self)
        self.group = shape.num_heads // spec.num_kv_heads
        # A plane is one head's K or V in one block. Plane numbers of layer 0 serve all layers, as KVWriter's rows do.
        self.planes = cache.view(-1, spec.block_size * spec.head_dim)
        self.planes_per_layer = spec.num_planes * spec.num_kv_heads
        self.planes_per_block = spec.num_layers * self.planes_per_layer
        # Tiles round scores to bfloat16; the fused kernel keeps them in float32, as transformers does. It has no cap
        # and no sinks, and takes no V that is narrower than K.
        is_fast = self.device.type == "cpu" and cache.dtype == torch.bfloat16 and read_cpu().has_bf16
        self._sinks = None if shape.sinks is None else shape.sinks.to(self.device, cache.dtype)
        self.tile, self.group_bytes = _TILE, _GROUP_BYTES
        self.tiles_chunks = is_fast or shape.soft_cap > 0 or shape.value_dim > 0 or self._sinks is not None
        self._plane_offsets = torch.arange(self.planes_per_layer).view(spec.num_planes, 1, spec.num_kv_heads, 1)
        self._workspace = torch.empty(0, dtype=cache.dtype, device=cache.device)

    def prepare(self, sequences: Sequence[StepRow]) -> StepAttention:
        tables = StepTables(sequences, self.spec.block_size)
        runs = {window: self._runs(tables, window) for window in self.shape.distinct_windows()}
        layers = [runs[self.shape.window(layer)] for layer in range(self.spec.num_layers)]
        return _TorchStep(self.writer, self.writer.rows(tables), layers)

    def _runs(self, tables: StepTables, window: int) -> list[_Run]:
        runs: list[_Run] = []
        num_seen: list[int] = (tables.end_blocks() - tables.first_blocks(window)).tolist()
        num_new: list[int] = tables.num_new.tolist()
        start = index = 0
        while index < len(num_new):
            if num_new[index] == 1:
                stop = self._end_of_group(num_new, num_seen, index)
                runs.append(_DecodeRun(self, tables, index, stop, start, window))
                start += stop - index
                index = stop
                continue
            run_type = _LaterChunkRun if tables.num_before[index] else _FirstChunkRun
            runs.append(run_type(self, tables, index, start, window))
            start += num_new[index]
            index += 1
        return runs

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """`scores`, overwritten."""
        cap = self.shape.soft_cap
        return scores.div_(cap).tanh_().mul_(cap) if cap else scores

    def weights(self, layer: int, scores: torch.Tensor) -> torch.Tensor:
        """Softmax of `scores` `[num_sequences * num_kv_heads, group * queries, tokens]`, with the layer's sinks."""
        if self._sinks is None:
            return scores.softmax(-1)
        by_head = scores.view(-1, len(self._sinks[layer]), scores.shape[1] // self.group, scores.shape[2])
        sinks = self._sinks[layer][:, None, None].expand(*by_head.shape[:3], 1)
        return torch.cat((by_head, sinks), -1).softmax(-1)[..., :-1].reshape(scores.shape)

    def plane_index(self, tables: torch.Tensor) -> torch.Tensor:
        """Planes in the order [plane, sequence, head, block] for block ids `tables` `[num_sequences, num_blocks]`."""
        index = tables.long()[None, :, None, :] * self.planes_per_block + self._plane_offsets
        return to_device(index.flatten(), self.device)

    def gather(self, layer: int, index: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """`[num_planes, num_sequences, num_kv_heads, tokens, head_dim]`, valid until the next gather."""
        width = self.planes.shape[1]
        if self._workspace.numel() < index.numel() * width:
            # A quarter more, so that a growing context does not allocate anew with every block.
            self._workspace = torch.empty(index.numel() * width * 5 // 4, dtype=self.planes.dtype, device=self.device)
        out = self._workspace[: index.numel() * width].view(-1, width)
        torch.index_select(self.planes[layer * self.planes_per_layer :], 0, index, out=out)
        return out.view(self.spec.num_planes, num_sequences, self.spec.num_kv_heads, -1, self.spec.head_dim)

    def _end_of_group(self, num_new: Sequence[int], num_seen: Sequence[int], start: int) -> int:
        """End of the run of single tokens that are computed together: padding at most doubles anyone's work. For each
        sequence its new tokens, and the blocks that they see."""
        fewest = most = num_seen[start]
        stop = start + 1
        while stop < len(num_new) and num_new[stop] == 1:
            fewest, most = min(fewest, num_seen[stop]), max(most, num_seen[stop])
            if most > 2 * fewest + 1 or (stop + 1 - start) * most * self.spec.layer_bytes > self.group_bytes:
                break
            stop += 1
        return stop


class _Run(ABC):
    """Some neighbouring tokens of the flat batch, `start` to `stop`."""

    start: int
    stop: int

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """`q`, `kv`: this run's tokens only. Returns `[num_tokens, num_heads * (elements of V)]`."""


class _TorchStep(StepAttention):
    def __init__(self, writer: KVWriter, rows: torch.Tensor, runs: list[list[_Run]]) -> None:
        """`rows` for the writer, `runs` by layer."""
        self._writer, self._rows = writer, rows
        self._runs = runs

    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        self._writer.write(layer, self._rows, kv)
        runs = self._runs[layer]
        if len(runs) == 1:
            return runs[0].attend(layer, q, kv)
        parts = [run.attend(layer, q[run.start : run.stop], kv[run.start : run.stop]) for run in runs]
        return torch.cat(parts)


class _FirstChunkRun(_Run):
    """The first tokens of a prompt: nothing in the cache to look at."""

    def __init__(self, backend: TorchBackend, tables: StepTables, index: int, start: int, window: int) -> None:
        num_new = int(tables.num_new[index])
        self.start, self.stop = start, start + num_new
        self._backend = backend
        self._chunk = _chunk_attention(backend, num_before=0, num_new=num_new, window=window)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        keys, values = self._backend.keys_and_values(kv.permute(1, 2, 0, 3))
        return self._chunk.attend(layer, q, keys, values)


class _LaterChunkRun(_Run):
    """A chunk of a prompt whose beginning is in the cache already."""

    def __init__(self, backend: TorchBackend, tables: StepTables, index: int, start: int, window: int) -> None:
        num_new = int(tables.num_new[index])
        self.start, self.stop = start, start + num_new
        self._backend = backend
        num_before = int(tables.num_before[index] - tables.first_blocks(window)[index] * tables.block_size)
        self._context = num_before + num_new
        self._index = backend.plane_index(tables.padded(index, index + 1, window))
        self._chunk = _chunk_attention(backend, num_before=num_before, num_new=num_new, window=window)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        seen = self._backend.gather(layer, self._index, 1)[:, 0, :, : self._context]
        keys, values = self._backend.keys_and_values(seen)
        return self._chunk.attend(layer, q, keys, values)


class _Chunk(ABC):
    """Causal attention of one sequence's `num_new` tokens that follow `num_before` others, within `window` if not 0."""

    def __init__(self, backend: TorchBackend, num_before: int, num_new: int, window: int) -> None:
        self._backend = backend
        self._window = window
        self._group = backend.group
        self._scale = backend.shape.softmax_scale
        self._num_before = num_before
        self._num_new = num_new
        self._dtype, self._device = backend.cache.dtype, backend.device

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`q` `[num_new, num_heads, head_dim]`; `keys`, `values` `[num_kv_heads, num_before + num_new, ...]`."""

    def _by_kv_head(self, q: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads, group, num_new, head_dim]`."""
        return q.view(q.shape[0], -1, self._group, q.shape[2]).permute(1, 2, 0, 3)

    def _mask(self, num_rows: int, num_columns: int, own: int) -> torch.Tensor:
        """What is added to scores: row r stands at column r + own, sees no column behind that nor before its window."""
        shape = (num_rows, num_columns)
        mask = torch.full(shape, float("-inf"), dtype=self._dtype, device=self._device).triu_(own + 1)
        if self._window:
            too_old = torch.ones(shape, dtype=torch.bool, device=self._device).tril_(own - self._window)
            mask.masked_fill_(too_old, float("-inf"))
        return mask


def _chunk_attention(backend: TorchBackend, *, num_before: int, num_new: int, window: int) -> _Chunk:
    # With a mask the fused kernel that CUDA takes for float32 gives garbage in the last row if there is one more query
    # than a multiple of 64 (torch 2.11 on an H200).
    is_tiled = backend.tiles_chunks or (backend.device.type == "cuda" and _needs_mask(num_before, num_new, window))
    return (_TiledChunk if is_tiled else _FusedChunk)(backend, num_before, num_new, window)


def _needs_mask(num_before: int, num_new: int, window: int) -> bool:
    return num_before > 0 or 0 < window < num_new


class _FusedChunk(_Chunk):
    """Torch's own fused kernel."""

    def __init__(self, backend: TorchBackend, num_before: int, num_new: int, window: int) -> None:
        super().__init__(backend, num_before, num_new, window)
        needs_mask = _needs_mask(num_before, num_new, window)
        self._added = self._mask(num_new, num_before + num_new, num_before) if needs_mask else None

    def attend(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        # The KV heads are the batch and each one's query heads the heads: then K and V are shared by a stride of 0.
        heads = (-1, self._group, -1, -1)
        out = F.scaled_dot_product_attention(
            self._by_kv_head(q),
            keys[:, None].expand(heads),
            values[:, None].expand(heads),
            attn_mask=self._added,
            is_causal=self._added is None,
            scale=self._scale,
        )
        return out.permute(2, 0, 1, 3).reshape(q.shape[0], -1)


class _TiledChunk(_Chunk):
    """Tiles of queries as plain products, each with the keys from its window's start up to its end.

    oneDNN's bfloat16 products are up to twice as fast as the fused kernel on a CPU that has such instructions, and ten
    times slower on one that has not.
    """

    def __init__(self, backend: TorchBackend, num_before: int, num_new: int, window: int) -> None:
        super().__init__(backend, num_before, num_new, window)
        self._diagonal = self._mask(backend.tile, backend.tile, 0)
        self._nothing = torch.zeros(1, 1, 1, dtype=self._dtype, device=self._device)

    def attend(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        queries, keys = self._by_kv_head(q), keys.transpose(1, 2)
        num_kv_heads, _, _, head_dim = queries.shape
        out_shape = (self._num_new, num_kv_heads, self._group, values.shape[-1])
        out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
        tile = self._backend.tile
        for start in range(0, self._num_new, tile):
            size = min(tile, self._num_new - start)
            own = self._num_before + start
            first, stop = first_seen(own, self._window), own + size
            rows = queries[:, :, start : start + size].reshape(num_kv_heads, -1, head_dim)
            scores = torch.baddbmm(self._nothing, rows, keys[:, :, first:stop], beta=0, alpha=self._scale)
            by_row = self._backend.capped(scores).view(num_kv_heads, self._group, size, stop - first)
            if self._window:
                by_row.add_(self._mask(size, stop - first, own - first))
            else:
                by_row[..., own:].add_(self._diagonal[:size, :size])
            attended = torch.bmm(self._backend.weights(layer, scores), values[:, first:stop])
            out[start : start + size] = attended.view(num_kv_heads, self._group, size, -1).permute(2, 0, 1, 3)
        return out.view(self._num_new, -1)


class _DecodeRun(_Run):
    """One token each of several sequences, all padded to the longest one's blocks."""

    def __init__(
        self, backend: TorchBackend, tables: StepTables, first: int, stop: int, start: int, window: int
    ) -> None:
        """Takes the sequences `first` to `stop`."""
        self.start, self.stop = start, start + stop - first
        self._backend = backend
        spec = backend.spec
        seen = tables.padded(first, stop, window)
        width = seen.shape[1]
        self._index = backend.plane_index(seen)
        # Tokens are counted from the first one in the table.
        before = tables.num_before - tables.first_blocks(window) * tables.block_size
        positions = torch.from_numpy(before[first:stop])
        tokens = torch.arange(width * spec.block_size)
        unused = tokens > positions[:, None]  # [sequences, tokens]
        if window:
            unused |= tokens <= positions[:, None] - window
        rows = unused[None, :, None].expand(spec.num_planes, -1, spec.num_kv_heads, -1).flatten().nonzero()[:, 0]
        self._unused_rows = to_device(rows, backend.device) if len(rows) else None
        mask = torch.zeros(unused.shape, dtype=backend.cache.dtype).masked_fill_(unused, float("-inf"))
        mask = mask[:, None].expand(-1, spec.num_kv_heads, -1).reshape(-1, 1, width * spec.block_size)
        self._mask = to_device(mask, backend.device)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        gathered = self._backend.gather(layer, self._index, q.shape[0])
        if self._unused_rows is not None:
            gathered.view(-1, gathered.shape[-1]).index_fill_(0, self._unused_rows, 0)
        # Each [sequences * num_kv_heads, tokens, ...].
        keys, values = self._backend.keys_and_values(gathered.flatten(1, 2))
        grouped = q.reshape(-1, self._backend.group, q.shape[-1])
        scale, keys = self._backend.shape.softmax_scale, keys.transpose(1, 2)
        if self._backend.shape.soft_cap:
            scores = torch.bmm(grouped, keys).mul_(scale)
            scores = self._backend.capped(scores).add_(self._mask)
        else:
            scores = torch.baddbmm(self._mask, grouped, keys, alpha=scale)
        return torch.bmm(self._backend.weights(layer, scores), values).view(q.shape[0], -1)
