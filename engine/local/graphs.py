"""Decode steps as recorded graphs: the device is given one launch for a step in place of some hundred.

A graph is recorded for some batch sizes. A step takes the next larger one; the rows that it lacks are padding:

    rows of the step      | padding
    token at its position | token 0 at position 0 of a sequence whose only block is the spare one

The spare block lies behind all others of the cache and belongs to nobody. So padding writes nowhere else, and what it
attends to is what it has just written.

Everything that a graph reads lies in memory that stays: tokens and positions here, tables in `FixedDecode`.

If the attention cascades, each size has a second graph, for steps of which some rows share enough blocks.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, FixedDecode
from engine.attention.shared_prefixes import SharedPrefixes
from engine.device import do_nothing
from engine.device_copies import page_locked
from engine.models.base import CausalLM
from engine.step import StepRow

log = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Logits `[size, vocab_size]` in the model's dtype or float32, and the likeliest token of each row, `[size]` int64."""
Replay = Callable[[], Outputs]
Recorder = Callable[[Replay], Replay]
"""Records the kernels that a function launches. The function has run before, so that libraries are prepared."""


@dataclass(slots=True, frozen=True)
class _Graph:
    attention: FixedDecode
    replay: Replay


def graph_sizes(max_num_rows: int) -> list[int]:
    """Ascending, up to `max_num_rows`: powers of two to 8, multiples of 8 to 128, and then an eighth apart."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_rows:
        sizes.append(sizes[-1] + max(8, sizes[-1] // 64 * 8))
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


class DecodeGraphs:
    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        *,
        spare_block: int,
        sizes: Sequence[int],
        recorder: Recorder | None = None,
    ) -> None:
        """Records a graph of each of `sizes`, ascending. `spare_block` of the backend's cache is nobody's. Nothing may
        be under way on the device."""
        device = attention.device
        self._sizes = list(sizes)
        self._model = model
        self._padding = StepRow(token_ids=[0], num_computed_tokens=0, block_ids=[spare_block])
        # Token ids and positions, [2, largest size] int64.
        self._inputs = torch.zeros((2, self._sizes[-1]), dtype=torch.int64, device=device)
        self._staged = page_locked(torch.zeros((2, self._sizes[-1]), dtype=torch.int64), device)
        self._attention = attention
        self._graphs: dict[int, _Graph] = {}
        self._cascades: dict[int, _Graph] = {}
        start = time.perf_counter()
        record = recorder or _CudaRecorder(device)
        for size in reversed(self._sizes):  # the largest first: smaller ones find room in its memory
            self._graphs[size] = self._record(attention.fixed_decode(size), size, record)
            if attention.cascades and size > 1:
                self._cascades[size] = self._record(attention.fixed_cascade(size), size, record)
        seconds = round(time.perf_counter() - start, 2)
        log.info("decode graphs are recorded", extra={"batch_sizes": self._sizes, "seconds": seconds})

    def takes(self, rows: Sequence[StepRow]) -> bool:
        """Whether these are single tokens after which no more than a token is asked for, and not too many."""
        return 0 < len(rows) <= self._sizes[-1] and all(
            len(row.token_ids) == 1 and row.score is None and not row.num_pooled for row in rows
        )

    def size_for(self, num_rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run(self, rows: Sequence[StepRow]) -> tuple[Sequence[int], torch.Tensor, torch.Tensor]:
        """The order in which the rows were computed, and in that order logits `[num_rows, vocab_size]` and the
        likeliest tokens `[num_rows]` int64, both valid until the next call. The device must have computed the step
        before. Does not wait for it."""
        size = self.size_for(len(rows))
        graph, order = self._graphs[size], list(range(len(rows)))
        shared = self._attention.shared_prefixes(rows)
        if shared is not None:
            graph, order = self._cascades[size], shared.order.tolist()
        self._fill(graph.attention, [rows[index] for index in order], size, shared)
        logits, best = graph.replay()
        return order, logits[: len(rows)], best[: len(rows)]

    def _fill(
        self, attention: FixedDecode, rows: Sequence[StepRow], size: int, shared: SharedPrefixes | None = None
    ) -> None:
        padded = [*rows, *[self._padding] * (size - len(rows))]
        staged = self._staged.numpy()
        staged[0, :size] = [row.token_ids[0] for row in padded]
        staged[1, :size] = [row.num_computed_tokens for row in padded]
        self._inputs.copy_(self._staged, non_blocking=True)
        attention.fill(padded, shared)

    def _record(self, attention: FixedDecode, size: int, record: Recorder) -> _Graph:
        self._fill(attention, [], size)
        token_ids, positions = self._inputs[0, :size], self._inputs[1, :size]

        def compute() -> Outputs:
            attention.begin()
            logits = self._model.logits(self._model.forward(token_ids, positions, attention, do_nothing))
            return logits, logits.argmax(dim=-1)

        compute()
        return _Graph(attention, record(compute))


class _CudaRecorder:
    """CUDA graphs that share their memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Replay) -> Replay:
        gc.collect()  # nothing may free memory of the device while a graph is recorded
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = compute()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay
