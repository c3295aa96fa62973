"""Attention over blocks in place against the formula in float64, with NaN wherever nothing was written."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from common.types import KVCacheSpec
from engine.attention.base import AttentionShape
from engine.attention.native import NativeBackend
from engine.step import StepRow
from tests.engine.kernels.variants import VARIANTS, best_and_slow_other_variants, each_variant, kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dataclass
class Case:
    """Sequences on their way through a cache of two layers; `kept` is all K and V that they were given."""

    variant: str
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    num_threads: int = 2
    num_blocks: int = 64
    seed: int = 0
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = KVCacheSpec(
            model_id="m",
            num_layers=2,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=str(self.dtype).removeprefix("torch."),
        )
        shape = AttentionShape(
            num_heads=self.num_heads,
            softmax_scale=self.head_dim**-0.5,
            windows=(0, self.window),
            soft_cap=self.soft_cap,
            sinks=self.sink_scores() if self.sinks else None,
        )
        cache = torch.full((self.num_blocks, *spec.block_shape), float("nan"), dtype=self.dtype)
        self.backend = NativeBackend(cache, spec, shape, kernels(self.variant, self.num_threads))
        self.free = random.Random(self.seed).sample(range(self.num_blocks), self.num_blocks)
        self.blocks: dict[int, list[int]] = {}
        self.generator = torch.Generator().manual_seed(self.seed)

    def sink_scores(self) -> torch.Tensor:
        """Far below other scores, among them and far above them; the first head has none."""
        scores = torch.linspace(-6, 14, 2 * self.num_heads).view(2, self.num_heads)
        scores[:, 0] = float("-inf")
        return scores

    def step(self, sizes: dict[int, int], *, layer: int = 1) -> torch.Tensor:
        """One layer of a step with so many new tokens of each sequence, compared; returns the result."""
        num_tokens, heads = sum(sizes.values()), self.num_heads + 2 * self.num_kv_heads
        qkv = (torch.randn(num_tokens, heads, self.head_dim, generator=self.generator) * 2).to(self.dtype)
        return self.attend(sizes, qkv, layer=layer)

    def attend(self, sizes: dict[int, int], qkv: torch.Tensor, *, layer: int = 1) -> torch.Tensor:
        """The same with `qkv` `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`."""
        inputs = []
        for name, size in sizes.items():
            blocks = self.blocks.setdefault(name, [])
            before = len(self.kept[name]) if name in self.kept else 0
            while len(blocks) * self.block_size < before + size:
                blocks.append(self.free.pop())
            inputs.append(StepRow(token_ids=[0] * size, num_computed_tokens=before, block_ids=blocks))
        q, kv = qkv[:, : self.num_heads], qkv[:, self.num_heads :].unflatten(1, (2, self.num_kv_heads))
        result = self.backend.prepare(inputs).forward(layer, q, kv)
        start = 0
        for name, size in sizes.items():
            rows = slice(start, start + size)
            self.kept[name] = torch.cat((self.kept[name], kv[rows])) if name in self.kept else kv[rows]
            expected = self.expected(q[rows], self.kept[name], layer)
            torch.testing.assert_close(result[rows].double(), expected, atol=TOLERANCE[self.dtype], rtol=1e-2)
            start += size
        return result

    def expected(self, q: torch.Tensor, kv: torch.Tensor, layer: int) -> torch.Tensor:
        group, size, context = self.num_heads // self.num_kv_heads, len(q), len(kv)
        keys, values = (kv[:, i].double().repeat_interleave(group, 1) for i in range(2))
        scores = torch.einsum("qhd,chd->hqc", q.double(), keys) * self.head_dim**-0.5
        if self.soft_cap:
            scores = (scores / self.soft_cap).tanh() * self.soft_cap
        position, token = torch.arange(context - size, context)[:, None], torch.arange(context)
        hidden = (token > position) | ((token <= position - self.window) if self.window else False)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks:
            column = self.sink_scores()[layer].double()[:, None, None].expand(-1, size, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :context]
        return torch.einsum("hqc,chd->qhd", weights, values).flatten(1)


@each_variant
@each_dtype
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 256, 512])
def test_head_sizes(variant: str, head_dim: int, dtype: torch.dtype) -> None:
    case = Case(variant, head_dim=head_dim, dtype=dtype)
    for sizes in ({0: 37, 1: 1, 2: 90}, {0: 1, 1: 1, 2: 1}, {2: 1, 1: 30, 0: 2}, {0: 1, 2: 5}):
        case.step(sizes)


@each_variant
@each_dtype
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 9, 16, 48, 64])
def test_heads_for_each_kv_head(variant: str, group: int, dtype: torch.dtype) -> None:
    case = Case(variant, dtype=dtype, num_heads=2 * group, head_dim=32)
    for sizes in ({0: 70, 1: 3}, {0: 1, 1: 1}, {0: 9, 1: 1}):
        case.step(sizes)


@each_variant
@each_dtype
@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
def test_block_sizes(variant: str, block_size: int, dtype: torch.dtype) -> None:
    case = Case(variant, dtype=dtype, block_size=block_size, num_blocks=400)
    for sizes in ({0: 63, 1: 64}, {0: 1, 1: 1}, {0: 1, 1: 65}, {0: 40}):
        case.step(sizes)


@each_variant
@each_dtype
@pytest.mark.parametrize("window", [0, 20])
def test_sinks(variant: str, window: int, dtype: torch.dtype) -> None:
    """Prompts, single tokens, and single tokens whose context is cut into parts."""
    case = Case(variant, sinks=True, window=window, dtype=dtype, num_heads=12)
    for sizes in ({0: 37, 1: 1, 2: 600}, {0: 1, 1: 1, 2: 1}, {1: 30, 0: 2}):
        case.step(sizes)


@best_and_slow_other_variants
@pytest.mark.parametrize("longest", [1024, pytest.param(8191, marks=pytest.mark.slow)])
@each_dtype
def test_long_contexts(variant: str, dtype: torch.dtype, longest: int) -> None:
    """One token after as many others: its context is split from 513 tokens on."""
    case = Case(variant, num_blocks=520, dtype=dtype, num_heads=3, num_kv_heads=1)
    done = 0
    for context in (1, 62, 64, 66, 510, 512, 514, longest):
        case.step({0: context - done})
        case.step({0: 1})
        done = context + 1


@each_variant
@each_dtype
@pytest.mark.parametrize("window", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (5, 64, 600)), 100])
def test_sliding_windows(variant: str, window: int, dtype: torch.dtype) -> None:
    case = Case(variant, dtype=dtype, window=window, num_blocks=100)
    for sizes in ({0: 150, 1: 7}, {0: 1, 1: 1}, {0: 20, 1: 1}, {0: 1000}, {0: 1}):
        case.step(sizes)


@each_variant
@each_dtype
def test_soft_caps(variant: str, dtype: torch.dtype) -> None:
    case = Case(variant, dtype=dtype, soft_cap=1.5)
    for sizes in ({0: 100}, {0: 1}, {0: 3}):
        case.step(sizes)


@each_variant
@each_dtype
def test_a_sequence_does_not_depend_on_its_company(variant: str, dtype: torch.dtype) -> None:
    """Nor on the number of threads: bits, not tolerances."""
    results = []
    for company, num_threads in (({}, 1), ({1: 1}, 2), (dict.fromkeys(range(1, 30), 1), 2)):
        case = Case(variant, dtype=dtype, num_threads=num_threads, num_blocks=200)
        case.step({0: 800})
        case.generator.manual_seed(5)
        results.append(case.step({0: 1, **company})[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_variant
@each_dtype
def test_a_prompt_does_not_depend_on_its_company(variant: str, dtype: torch.dtype) -> None:
    """Nor on the number of threads, by which its work is cut: bits again."""
    results = []
    for company, num_threads in (({}, 1), ({1: 1, 2: 300}, 1), ({1: 90, 2: 1}, 3)):
        case = Case(variant, dtype=dtype, window=150, num_threads=num_threads, num_blocks=100)
        case.step({0: 40})
        case.generator.manual_seed(5)
        results.append(case.step({0: 250, **company})[:250])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.skipif("amx" not in VARIANTS, reason="needs AMX")
@pytest.mark.parametrize("chunk", [4, 7, 64, 127, 129, 200])
def test_in_tiles_a_prompt_does_not_depend_on_its_chunks(chunk: int) -> None:
    """As long as each has more rows than are computed without tiles."""
    whole = Case("amx", dtype=torch.bfloat16, window=100)
    qkv = torch.randn(280, 10, 64, generator=whole.generator).bfloat16()
    expected = whole.attend({0: 280}, qkv)
    parts = Case("amx", dtype=torch.bfloat16, window=100)
    results = [parts.attend({0: len(rows)}, rows) for rows in qkv.split(chunk)]
    assert torch.equal(torch.cat(results), expected)


@each_variant
def test_layers_do_not_touch_each_other(variant: str) -> None:
    case = Case(variant, num_blocks=8)
    case.step({0: 40}, layer=1)
    assert case.backend.cache[:, 0].isnan().all()
    written = ~case.backend.cache[:, 1].isnan()
    assert int(written.sum()) == 40 * 2 * case.num_kv_heads * case.head_dim


@each_variant
@each_dtype
def test_a_large_batch(variant: str, dtype: torch.dtype) -> None:
    case = Case(variant, dtype=dtype, num_blocks=600, head_dim=32, block_size=4)
    case.step({index: 1 + index % 7 for index in range(256)})
    case.step(dict.fromkeys(range(256), 1))
