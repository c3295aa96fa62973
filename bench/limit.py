"""What this machine allows the rows of bench/engine.py at most: reading, and products of the model's own shapes.

A row with one token in a step is held to reading alone: its products are reading. Every other row is held to whichever
takes longer, reading or multiplying, where the rate of multiplying is that of the row's own shapes: the model's weights
times the tokens of a step (the batch, or a prompt in chunks), each weight by the fastest of Baton's kernels and torch's
library, in the row's dtype and in float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from bench.engine_systems import Row
from common.types import KVCacheSpec
from engine.kernels.choice import AUTO, TORCH, choose
from engine.kernels.library import Kernels
from engine.layers import linear_kernel

CHUNK = 512  # tokens of a prompt that are multiplied at once
READ_S = 0.5  # as long as a row takes
READ_SHAPE = (32_768, 2048)  # of float32: more than caches hold
_REPETITIONS = 3  # turns
_TURN_S = 0.03  # threads of the library before spin for up to 20 ms, on the cores that this one's need
_HOPELESS = 2.0  # what takes so many times as long as the fastest is not repeated
_LONG_S = 2.0  # after which products of one shape are not repeated


@dataclass(slots=True, frozen=True)
class Limit:
    """`gflop_s` by the number of tokens in a step; `read_gb_s` is the best moment's, `sustained_gb_s` the mean."""

    read_gb_s: float
    sustained_gb_s: float
    gflop_s: dict[int, float]

    def seconds(self, row: Row, config: dict[str, int], itemsize: int) -> float:
        """The least that the row can take: what it reads, or what it multiplies, whichever is longer."""
        *weights_of_layers, head = [n * k * times for (n, k), times in shapes_of(config)]
        weights = sum(weights_of_layers)
        layers, dim = config["num_hidden_layers"], config["head_dim"]
        heads = config["num_attention_heads"]
        seen = row.context / 2 if not row.steps else row.context + row.steps / 2  # tokens that a token sees
        tokens = row.batch + row.chunk if row.steps else row.context
        read = (weights + head) * itemsize
        if row.steps:
            read += row.batch * row.context * kv_of_token(config, itemsize).block_bytes
        read_s = read / self.read_gb_s
        multiplied_s = 0.0
        if tokens > 1:
            attended = row.batch * seen + row.chunk * row.chunk / 2 if row.steps else tokens * seen
            multiplied = 2 * tokens * weights + 4 * layers * heads * dim * attended
            multiplied += 2 * (row.batch + bool(row.chunk)) * head
            multiplied_s = multiplied / self.gflop_s[step_tokens(row)]
        return max(read_s, multiplied_s) / 1e9 * max(1, row.steps)

    def sustained(self) -> Limit:
        return replace(self, read_gb_s=self.sustained_gb_s)

    def or_better(self, other: Limit) -> Limit:
        return Limit(
            max(self.read_gb_s, other.read_gb_s),
            max(self.sustained_gb_s, other.sustained_gb_s),
            {tokens: max(rate, other.gflop_s[tokens]) for tokens, rate in self.gflop_s.items()},
        )


def step_tokens(row: Row) -> int:
    return row.batch + row.chunk if row.steps else min(row.context, CHUNK)


def kv_of_token(config: dict[str, int], itemsize: int) -> KVCacheSpec:
    """The KV of one token, as a block of one token."""
    return KVCacheSpec(
        model_id="bench",
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        block_size=1,
        dtype={4: "float32", 2: "bfloat16"}[itemsize],
    )


def shapes_of(config: dict[str, int]) -> list[tuple[tuple[int, int], int]]:
    """`(out_features, in_features)` of a layer's weights and of the head, with the number of times in the model."""
    layers, hidden, inner = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
    dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    qkv, out = ((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim)
    return [(shape, layers) for shape in (qkv, out, (2 * inner, hidden), (hidden, inner))] + [
        ((config["vocab_size"], hidden), 1)
    ]


class Machine:
    """Measures again and again with what it has packed once: the model's weights in every way that multiplies them."""

    def __init__(
        self,
        rows: Sequence[Row],
        config: dict[str, int],
        dtype: str,
        num_threads: int,
        *,
        read_s: float = READ_S,
        read_shape: tuple[int, int] = READ_SHAPE,
    ) -> None:
        """Memory of `read_shape` (float32) is read for `read_s`."""
        self._num_threads, self._read_for_s = num_threads, read_s
        torch.set_num_threads(num_threads)
        choice = choose(AUTO)
        self._kernels = None if choice.instruction_set == TORCH else Kernels(choice, num_threads)
        self._dtypes = dict.fromkeys((getattr(torch, dtype), torch.float32))  # either may be the faster one
        self._decoded = {step_tokens(row) for row in rows if row.steps and not row.chunk} - {1}
        prompts = {step_tokens(row) for row in rows if not row.steps or row.chunk}
        self._step_tokens = sorted(self._decoded | prompts)
        self._shapes = shapes_of(config) if self._step_tokens else []
        self._weights = [self._ways(torch.full(shape, 0.01)) for shape, _ in self._shapes]
        self._memory = torch.ones(read_shape)
        self._packed_memory = None if self._kernels is None else self._kernels.pack(self._memory, None)

    def measure(self) -> Limit:
        torch.set_num_threads(self._num_threads)
        best, mean = self._read_s()
        num_gb = self._memory.nbytes / 1e9
        return Limit(num_gb / best, num_gb / mean, {tokens: self._gflop_s(tokens) for tokens in self._step_tokens})

    def _ways(self, weight: torch.Tensor) -> list[tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor]]]:
        ways: list[tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor]]] = []
        for dtype in self._dtypes:
            ways.append((dtype, linear_kernel(weight.to(dtype), None)))
            if self._kernels is not None:
                ways.append((dtype, self._kernels.pack(weight.to(dtype), None)))
        return ways

    def _gflop_s(self, tokens: int) -> float:
        """All multiplications of a step's weights over all their seconds. A prompt's step needs the head for one token
        only, so its rate is that of the layers."""
        flop, seconds = 0.0, 0.0
        counted = list(zip(self._shapes, self._weights, strict=True))
        for ((n, k), times), ways in counted if tokens in self._decoded else counted[:-1]:
            x = torch.full((tokens, k), 0.01)
            flop += 2.0 * tokens * n * k * times
            seconds += times * best_s([_product(multiply, x.to(dtype)) for dtype, multiply in ways])
        return flop / seconds / 1e9

    def _read_s(self) -> tuple[float, float]:
        """Seconds to read the memory once, as a sum and as a product with one token do: of the shortest read, and the
        mean over `read_s` of the better way."""
        ways: list[Callable[[], object]] = [self._memory.sum]
        if self._packed_memory is not None:
            ways.append(_product(self._packed_memory, torch.ones(1, self._memory.shape[1])))
        shortest, means = [], []
        for read in ways:
            read()
            each: list[float] = []
            while sum(each) < self._read_for_s:
                each.append(_seconds(read))
            shortest.append(min(each))
            means.append(sum(each) / len(each))
        return min(shortest), min(means)


def best_s(works: Sequence[Callable[[], object]]) -> float:
    """Seconds of the fastest work's best moment; works take turns."""
    for work in works:
        work()
    best = [_turn_s(work) for work in works]
    hopeful = [number for number, seconds in enumerate(best) if seconds < _HOPELESS * min(best)]
    begin = time.perf_counter()
    for _ in range(_REPETITIONS - 1):
        for number in hopeful:
            best[number] = min(best[number], _turn_s(works[number]))
        if time.perf_counter() - begin > _LONG_S:
            break
    return min(best)


def _turn_s(work: Callable[[], object]) -> float:
    """Seconds of the work's best moment in one turn."""
    begin, best = time.perf_counter(), math.inf
    while time.perf_counter() - begin < _TURN_S:
        best = min(best, _seconds(work))
    return best


def _product(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: multiply(x)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
