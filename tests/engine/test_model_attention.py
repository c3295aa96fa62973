"""Backends against the reference, tokens of many shapes at once, with NaN wherever nothing was written."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

from common.errors import StartupError
from common.types import KVCacheSpec
from engine.attention import cpu
from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.flashinfer import FlashInferBackend, import_flashinfer
from engine.attention.flashinfer_latent import FlashInferLatentBackend
from engine.attention.registry import _default_for, attention_backend
from engine.models.latent import LatentAttention
from engine.step import StepRow
from tests.engine.fake_flashinfer import fake_flashinfer
from tests.engine.kernels.variants import VARIANTS, kernels

SPEC = KVCacheSpec(model_id="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
SHAPE = AttentionShape(num_heads=6, softmax_scale=0.4)
SHAPES = {
    "plain": SHAPE,
    "windows": replace(SHAPE, windows=(0, 7)),
    "one window": replace(SHAPE, windows=(13, 13)),
    "narrow": replace(SHAPE, windows=(1, 40)),
    "capped": replace(SHAPE, soft_cap=0.7),
    "capped windows": replace(SHAPE, windows=(30, 0), soft_cap=0.7),
}
SINKS = torch.tensor([[-2.0, 0.0, 1.0, 3.0, 9.0, float("-inf")], [float("-inf")] * 5 + [1.0]])
WITH_SINKS = {
    "sinks": replace(SHAPE, sinks=SINKS),
    "sinks and windows": replace(SHAPE, sinks=SINKS, windows=(0, 7)),
}
NUM_BLOCKS = 120

# What latent attention keeps: one head, whose beginning is V.
LATENT_SPEC = replace(SPEC, num_kv_heads=1, num_planes=1, head_dim=11)
LATENT_SHAPE = replace(SHAPE, value_dim=8)

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)  # that FlashInfer takes
ALL_SHAPES = SHAPES | WITH_SINKS
every_shape = pytest.mark.parametrize("shape", ALL_SHAPES.values(), ids=ALL_SHAPES)


def slow(*seeds: int) -> list[object]:
    """Further random steps of the same kind."""
    return [pytest.param(seed, marks=pytest.mark.slow) for seed in seeds]


def make_backend(name: str, shape: AttentionShape = SHAPE, spec: KVCacheSpec = SPEC) -> AttentionBackend:
    cache = torch.full((NUM_BLOCKS, *spec.block_shape), float("nan"))
    return attention_backend(cache, spec, shape, name)


def random_step(rng: random.Random, tables: list[list[int]], progress: list[int]) -> list[StepRow]:
    """Some of the sequences, in any order, each with one or several new tokens."""
    step: list[StepRow] = []
    for index in rng.sample(range(len(tables)), rng.randint(1, len(tables))):
        size = min(rng.choice([1, 1, 2, 9, 30]), len(tables[index]) * SPEC.block_size - progress[index])
        if size:
            tokens = [0] * size
            step.append(StepRow(token_ids=tokens, num_computed_tokens=progress[index], block_ids=tables[index]))
            progress[index] += size
    return step


def compare(backend: AttentionBackend, seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    spec, num_heads = backend.spec, backend.shape.num_heads
    reference = make_backend("reference", backend.shape, spec)
    planes = (spec.num_planes, spec.num_kv_heads)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[free.pop() for _ in range(size)] for size in (1, 2, 2, 3, 8, 8, 9, 30, 1, 20)]
    progress = [0] * len(tables)
    while step := random_step(rng, tables, progress):
        num_tokens = sum(len(s.token_ids) for s in step)
        prepared = [b.prepare(step) for b in (backend, reference)]
        for layer in range(spec.num_layers):
            qkv = torch.randn(num_tokens, num_heads + math.prod(planes), spec.head_dim, generator=generator)
            kv = qkv[:, num_heads:].view(num_tokens, *planes, spec.head_dim)
            ours, expected = (p.forward(layer, qkv[:, :num_heads], kv) for p in prepared)
            assert ours.shape == (num_tokens, num_heads * (backend.shape.value_dim or spec.head_dim))
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    # Equal caches, and nothing written beside the slots: NaN equals NaN here.
    torch.testing.assert_close(backend.cache, reference.cache, equal_nan=True, atol=0, rtol=0)
    assert backend.cache.isnan().any()


def by_formula(shape: AttentionShape, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """`q` of a whole sequence, row by row: `[num_tokens, num_heads * head_dim]`."""
    rows = []
    for position in range(len(q)):
        window = shape.window(layer) or len(q)
        seen = kv[max(0, position + 1 - window) : position + 1].repeat_interleave(3, dim=2)
        scores = torch.einsum("hd,chd->hc", q[position], seen[:, 0]) * shape.softmax_scale
        if shape.soft_cap:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        weights = scores.exp()
        total = weights.sum(-1) + (0 if shape.sinks is None else shape.sinks[layer].exp())
        rows.append(torch.einsum("hc,chd->hd", weights / total[:, None], seen[:, 1]))
    return torch.stack(rows).flatten(1)


@every_shape
def test_the_reference(shape: AttentionShape) -> None:
    backend = make_backend("reference", shape)
    qkv = torch.randn(50, 10, SPEC.head_dim)
    q, kv = qkv[:, :6], qkv[:, 6:].view(50, 2, 2, SPEC.head_dim)
    for layer in range(2):
        parts, table = [], list(range(7, 20))
        for start, stop in ((0, 20), (20, 49), (49, 50)):
            step = StepRow(token_ids=[0] * (stop - start), num_computed_tokens=start, block_ids=table)
            parts.append(backend.prepare([step]).forward(layer, q[start:stop], kv[start:stop]))
        torch.testing.assert_close(torch.cat(parts), by_formula(shape, layer, q, kv), atol=1e-5, rtol=1e-5)


@every_shape
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4)])
def test_torch_backend(seed: int, shape: AttentionShape) -> None:
    compare(make_backend("torch", shape), seed)


@every_shape
def test_torch_backend_in_small_groups(shape: AttentionShape) -> None:
    backend = make_backend("torch", shape)
    assert isinstance(backend, cpu.TorchBackend)
    backend.group_bytes = 20_000
    compare(backend, 9)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("windows", [(), (0, 7)])
def test_torch_backend_on_latents(seed: int, windows: tuple[int, ...]) -> None:
    compare(make_backend("torch", replace(LATENT_SHAPE, windows=windows), LATENT_SPEC), seed)


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_latents_give_what_k_and_v_give(name: str) -> None:
    """Of one sequence, in chunks: K and V computed of each latent, and attention as it is defined."""
    generator = torch.Generator().manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, key_dim, rotated_dim, value_dim, latent_dim, num_tokens = 6, 5, 3, 4, 8, 23
    weight = randn(heads * (key_dim + value_dim), latent_dim)
    queries, rows = randn(heads, num_tokens, key_dim + rotated_dim), randn(num_tokens, latent_dim + rotated_dim)

    up = (rows[:, :latent_dim] @ weight.T).view(num_tokens, heads, -1).transpose(0, 1)
    keys = torch.cat((up[..., :key_dim], rows[:, latent_dim:].expand(heads, -1, -1)), -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, up[..., key_dim:], is_causal=True, scale=0.4
    )

    latent = LatentAttention(weight.float(), key_dim, value_dim)
    backend, blocks = make_backend(name, LATENT_SHAPE, LATENT_SPEC), list(range(40, 30, -1))
    absorbed, parts = latent.queries(queries.float()), []
    for start, stop in ((0, 10), (10, 21), (21, 22), (22, 23)):
        sequence = StepRow(token_ids=[0] * (stop - start), num_computed_tokens=start, block_ids=blocks)
        kv = rows[start:stop, None, None].float()
        parts.append(latent.results(backend.prepare([sequence]).forward(1, absorbed[start:stop], kv)))
    torch.testing.assert_close(torch.cat(parts), expected.transpose(0, 1).float(), atol=1e-5, rtol=1e-4)


@every_shape
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_torch_backend_in_tiles(seed: int, shape: AttentionShape) -> None:
    """The path that bfloat16 takes, here in float32, which shows a small mistake."""
    backend = make_backend("torch", shape)
    assert isinstance(backend, cpu.TorchBackend)
    backend.tiles_chunks, backend.tile = True, 4
    compare(backend, seed)


@pytest.mark.parametrize("name", ["torch", "flashinfer", *VARIANTS])
@pytest.mark.parametrize("num_new", [1, 6])
def test_blocks_before_every_window_are_not_read(name: str, num_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be another sequence's by now; here they are NaN."""
    shape = AttentionShape(num_heads=6, softmax_scale=0.4, windows=(9, 9), soft_cap=2.0)
    cache = torch.full((NUM_BLOCKS, *SPEC.block_shape), float("nan"))
    if name in VARIANTS:
        backend = attention_backend(cache, SPEC, shape, "native", kernels(name))
    else:
        fake_flashinfer(monkeypatch)
        backend = (FlashInferBackend if name == "flashinfer" else cpu.TorchBackend)(cache, SPEC, shape)
    total = 100 + num_new
    qkv = torch.randn(total, 10, SPEC.head_dim)
    q, kv = qkv[:, :6], qkv[:, 6:].view(total, 2, 2, SPEC.head_dim)
    table = list(range(3, 3 + -(-total // SPEC.block_size)))
    backend.prepare([StepRow(token_ids=[0] * 100, num_computed_tokens=0, block_ids=table)]).forward(
        0, q[:100], kv[:100]
    )
    freed = (100 + 1 - 9) // SPEC.block_size
    cache[table[:freed]] = float("nan")
    step = StepRow(token_ids=[0] * num_new, num_computed_tokens=100, block_ids=table)
    result = backend.prepare([step]).forward(0, q[100:], kv[100:])
    torch.testing.assert_close(result, by_formula(shape, 0, q, kv)[100:], atol=1e-5, rtol=1e-5)


@each_shape
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_flashinfer_tables(monkeypatch: pytest.MonkeyPatch, seed: int, shape: AttentionShape) -> None:
    """Its kernels need a GPU; which tokens and blocks they are given does not."""
    fake_flashinfer(monkeypatch)
    cache = torch.full((NUM_BLOCKS, *SPEC.block_shape), float("nan"))
    compare(FlashInferBackend(cache, SPEC, shape), seed)


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_flashinfer_tables_on_latents(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    fake_flashinfer(monkeypatch)
    cache = torch.full((NUM_BLOCKS, *LATENT_SPEC.block_shape), float("nan"))
    compare(FlashInferLatentBackend(cache, LATENT_SPEC, LATENT_SHAPE), seed)


def test_flashinfer_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match=r"baton-serve\[flashinfer\]"):
        import_flashinfer()


def test_flashinfer_without_a_gpu_is_refused() -> None:
    with pytest.raises(StartupError, match="--device cuda"):
        make_backend("flashinfer")


@pytest.mark.parametrize(
    ("shape", "spec", "reason"),
    [
        (WITH_SINKS["sinks"], SPEC, "with sinks"),
        (replace(LATENT_SHAPE, windows=(0, 7)), LATENT_SPEC, "to latents"),
        (replace(LATENT_SHAPE, soft_cap=0.7), LATENT_SPEC, "to latents"),
        (replace(LATENT_SHAPE, sinks=SINKS), LATENT_SPEC, "to latents"),
    ],
)
def test_what_flashinfer_does_not_compute(shape: AttentionShape, spec: KVCacheSpec, reason: str) -> None:
    """Refused if it is asked for, and left to torch if not."""
    cache = mock.Mock(device=torch.device("cuda"), dtype=torch.bfloat16)
    with pytest.raises(StartupError, match=f"attention {reason}.* is not supported; take torch"):
        attention_backend(cache, spec, shape, "flashinfer")
    assert _default_for(cache, replace(spec, head_dim=64), shape) == "torch"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(StartupError, match="known are flashinfer, reference, torch"):
        make_backend("telepathy")


@pytest.mark.parametrize(("capability", "dtype"), [("avx2", "bfloat16"), ("", "float32")])
def test_chunks_are_not_tiled_if_bfloat16_units_would_not_pay_for_it(
    capability: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles round their scores to the dtype, too, which the fused kernel keeps in float32."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    spec = replace(SPEC, dtype=dtype)
    cache = torch.zeros((2, *spec.block_shape), dtype=getattr(torch, dtype))
    backend = attention_backend(cache, spec, SHAPE, "torch")
    assert isinstance(backend, cpu.TorchBackend)
    assert not backend.tiles_chunks
