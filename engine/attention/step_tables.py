"""The block tables of one step's sequences, and where the KV of its new tokens goes.

A request keeps its table from step to step as int32 (`Request.block_ids`), and the block manager changes it in place. A
step joins the tables by copying memory, so Python does the same after a long context as after a short one:

    tables   | 4 9 2 | 7 | 1 8 | ...        ids of the first, second, third sequence's blocks
    starts     0       3   4

The copy is the step's own: a request that gives its blocks up in mid-step changes nothing in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from engine.step import StepRow

Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]


class StepTables:
    """Arrays have one number for each sequence, in the order in which their tokens lie in the flat batch."""

    def __init__(self, sequences: Sequence[StepRow], block_size: int) -> None:
        self.block_size = block_size
        self.num_sequences = len(sequences)
        joined, starts = array("i"), array("i")
        for sequence in sequences:
            starts.append(len(joined))
            joined.extend(sequence.block_ids)
        self.num_before: Int32s = np.array([sequence.num_computed_tokens for sequence in sequences], np.int32)
        self.num_new: Int32s = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
        self.starts: Int32s = np.frombuffer(starts, np.int32)
        self.tables: Int32s = np.frombuffer(joined, np.int32)
        self.num_tokens = int(self.num_new.sum())

    def slots(self) -> tuple[Int32s, Int32s]:
        """For each new token its block, and its place in the block."""
        ends = self.num_new.cumsum(dtype=np.int32)
        position = np.arange(self.num_tokens, dtype=np.int32)
        position += np.repeat(self.num_before + self.num_new - ends, self.num_new)
        block, offset = np.divmod(position, np.int32(self.block_size))
        return self.tables[np.repeat(self.starts, self.num_new) + block], offset

    def first_blocks(self, window: int) -> Int32s:
        """Index in each table of the first block that a new token sees; `window` 0: all tokens are seen."""
        if not window:
            return np.zeros(self.num_sequences, np.int32)
        return np.maximum(self.num_before + 1 - window, 0) // self.block_size

    def end_blocks(self) -> Int32s:
        """Index in each table behind its last block with tokens."""
        return -(-(self.num_before + self.num_new) // self.block_size)

    def flat(self, rows: Int32s, window: int, num_skipped: Int32s | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks that the sequences `rows` see, one sequence after the other, and where each one's begin and the
        last one's end: `[number of blocks]` and `[number of rows + 1]`, both int32. `num_skipped`: of each of `rows`
        so many leading blocks are left out; those before its window if None."""
        first = self.first_blocks(window)[rows] if num_skipped is None else num_skipped
        counts = self.end_blocks()[rows] - first
        offsets = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=offsets[1:])
        index = np.arange(offsets[-1], dtype=np.int32)
        index += np.repeat(self.starts[rows] + first - offsets[:-1], counts)
        return torch.from_numpy(self.tables[index]), torch.from_numpy(offsets)

    def padded(self, start: int, stop: int, window: int) -> torch.Tensor:
        """The blocks that sequences `start` to `stop` see, `[stop - start, most blocks]` int32. Shorter rows end with
        their last block, again and again."""
        first, end = self.first_blocks(window)[start:stop], self.end_blocks()[start:stop]
        index = first[:, None] + np.arange((end - first).max(), dtype=np.int32)
        np.minimum(index, end[:, None] - 1, out=index)
        index += self.starts[start:stop, None]
        return torch.from_numpy(self.tables[index])
