"""Attention and the fused kernels on a CUDA device, against the formulas in float32 and against the layers in torch."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from common.types import KVCacheSpec
from engine.attention.base import AttentionShape
from engine.attention.registry import attention_backend
from engine.layers import RMSNorm, RotaryEmbedding, silu_and_mul
from engine.models.grouped_product import has_grouped_mm
from engine.step import StepRow

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

DEVICE = torch.device("cuda")
SHAPE = AttentionShape(num_heads=8, softmax_scale=0.125)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
# By dtype, absolute and relative: sums in another order, and angles that are not rounded.
CLOSE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
each_dtype = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def assert_near(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(ours, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        (SHAPE, 64),
        (replace(SHAPE, windows=(0, 37)), 64),
        (replace(SHAPE, windows=(24, 24)), 64),
        (replace(SHAPE, soft_cap=2.0), 64),
        (replace(SHAPE, windows=(50, 0), soft_cap=2.0), 64),
        (SHAPE, 128),
    ],
    ids=["plain", "windows", "one window", "capped", "capped windows", "wide"],
)
def test_backends(name: str, shape: AttentionShape, dim: int) -> None:
    """bfloat16 on the device against float32 here, first chunk, later chunk, single tokens. Some chunks are one token
    longer than a multiple of 64."""
    if name == "flashinfer":
        pytest.importorskip("flashinfer")
    spec = KVCacheSpec(model_id="m", num_layers=2, num_kv_heads=2, head_dim=dim, block_size=16, dtype="bfloat16")
    compare(name, spec, shape)


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("float16", 128), ("bfloat16", 256)])
def test_backends_of_other_dtypes_and_heads(name: str, dtype: str, head_dim: int) -> None:
    if name == "flashinfer":
        pytest.importorskip("flashinfer")
    spec = KVCacheSpec(model_id="m", num_layers=2, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype)
    compare(name, spec, SHAPE)


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
def test_latents(name: str) -> None:
    """Latents of DeepSeek's size."""
    if name == "flashinfer":
        pytest.importorskip("flashinfer")
    spec = KVCacheSpec(
        model_id="m", num_layers=2, num_kv_heads=1, num_planes=1, head_dim=576, block_size=16, dtype="bfloat16"
    )
    compare(name, spec, AttentionShape(num_heads=16, softmax_scale=0.07, value_dim=512))


def compare(name: str, spec: KVCacheSpec, shape: AttentionShape) -> None:
    dtype = getattr(torch, spec.dtype)
    cache = torch.full((64, *spec.block_shape), float("nan"), dtype=dtype)
    device_cache = cache.cuda()
    backends = [attention_backend(device_cache, spec, shape, name), attention_backend(cache, spec, shape, "reference")]
    tables = [random.Random(i).sample(range(i * 16, i * 16 + 16), 16) for i in range(4)]
    progress = [0] * 4
    for sizes in ([40, 1, 65, 100], [1, 65, 1, 100], [1, 1, 129, 1], [1, 1, 1, 1]):
        step = [
            StepRow(token_ids=[0] * size, num_computed_tokens=done, block_ids=table)
            for size, done, table in zip(sizes, progress, tables, strict=True)
        ]
        progress = [done + size for done, size in zip(progress, sizes, strict=True)]
        prepared = [backend.prepare(step) for backend in backends]
        for layer in range(2):
            heads, planes = shape.num_heads, (spec.num_planes, spec.num_kv_heads)
            qkv = torch.randn(sum(sizes), heads + planes[0] * planes[1], spec.head_dim).to(dtype)
            kv = qkv[:, heads:].view(-1, *planes, spec.head_dim)
            ours = prepared[0].forward(layer, qkv[:, :heads].cuda(), kv.cuda())
            expected = prepared[1].forward(layer, qkv[:, :heads], kv)
            torch.testing.assert_close(ours.cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("num_heads", [4, 8])  # 8: decodes on tensor cores
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_rows_that_share_blocks(
    monkeypatch: pytest.MonkeyPatch, is_recorded: bool, head_dim: int, num_heads: int, soft_cap: float
) -> None:
    """Two groups, a row alone, and the padding of a graph, which is replayed with fewer groups and rows, too."""
    pytest.importorskip("flashinfer")
    monkeypatch.setattr("engine.attention.flashinfer_cascade.MIN_SAVED_BYTES", 1)
    spec = KVCacheSpec(model_id="m", num_layers=1, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype="bfloat16")
    shape = AttentionShape(num_heads=num_heads, softmax_scale=0.125, soft_cap=soft_cap)
    cache = torch.randn(200, *spec.block_shape).bfloat16()
    ours = attention_backend(cache.cuda(), spec, shape, "flashinfer", cascade=True)
    reference = attention_backend(cache, spec, shape, "reference")
    first, second = list(range(40, 140)), list(range(10, 13))
    tables = [[*first, 1], [*second, 2], [*first, 3, 4], [5, 6], [*second, 7], [*first, 8]]
    done = [1605, 50, 1616, 17, 63, 1600]
    size, num_inputs = 8, num_heads + 2 * spec.num_kv_heads
    given = torch.zeros(size, num_inputs, head_dim, dtype=torch.bfloat16, device=DEVICE)
    graph, fixed, out = torch.cuda.CUDAGraph(), None, given

    def split(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return qkv[:, :num_heads], qkv[:, num_heads:].view(-1, 2, spec.num_kv_heads, head_dim)

    padding = StepRow(token_ids=[0], num_computed_tokens=0, block_ids=[199])
    if is_recorded:
        fixed = ours.fixed_cascade(size)
        fixed.fill([padding] * size)
        fixed.begin()
        fixed.forward(0, *split(given))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            fixed.begin()
            out = fixed.forward(0, *split(given))
    for members in ([0, 1, 2, 3, 4, 5], [3, 2, 0], [1, 5, 4, 0], [5, 4, 3, 2, 1, 0]):
        rows = [StepRow(token_ids=[0], num_computed_tokens=done[i], block_ids=tables[i]) for i in members]
        qkv = torch.randn(len(rows), num_inputs, head_dim).bfloat16()
        expected = reference.prepare(rows).forward(0, *split(qkv))
        shared = ours.shared_prefixes(rows)
        assert shared is not None
        if fixed is None:
            result = ours.prepare(rows).forward(0, *split(qkv.cuda())).cpu()
        else:
            order = shared.order.tolist()
            given[: len(rows)] = qkv[order].cuda()
            fixed.fill([*(rows[i] for i in order), *[padding] * (size - len(rows))], shared)
            graph.replay()
            result = torch.empty_like(expected)
            result[order] = out[: len(rows)].cpu()
        torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)


@needs_triton
@each_dtype
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_add_and_norm(dtype: torch.dtype, size: int) -> None:
    from engine.kernels.fused import add_rms_norm

    hidden, given = (torch.randn(37, size, device=DEVICE).to(dtype) for _ in range(2))
    norm = RMSNorm(size, 1e-5, dtype=dtype, device=DEVICE)
    norm.weight.normal_()
    assert_near(add_rms_norm(hidden, None, norm.weight, 1e-5), norm(hidden), dtype)
    expected = hidden + given
    normed = add_rms_norm(hidden, given, norm.weight, 1e-5)
    torch.testing.assert_close(hidden, expected, atol=0, rtol=0)
    assert_near(normed, norm(expected), dtype)


@needs_triton
@each_dtype
@pytest.mark.parametrize("width", [2 * 80, 2 * 14336])
def test_silu(dtype: torch.dtype, width: int) -> None:
    from engine.kernels.fused import silu_and_mul as fused

    given = torch.randn(19, width, device=DEVICE).to(dtype)
    assert_near(fused(given), silu_and_mul(given), dtype)


@needs_triton
@each_dtype
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_and_cache(dtype: torch.dtype, has_norms: bool, head_dim: int) -> None:
    from engine.kernels.fused import rotate_and_write

    num_q, num_kv, num_tokens = 6, 2, 11
    qkv = torch.randn(num_tokens, num_q + 2 * num_kv, head_dim, device=DEVICE).to(dtype)
    positions = torch.randint(0, 5000, (num_tokens,), device=DEVICE)
    rope = RotaryEmbedding(1e4 ** -torch.linspace(0, 1, head_dim // 2), 1.0, 5000, dtype=dtype, device=DEVICE)
    q_norm, k_norm = (RMSNorm(head_dim, 1e-5, dtype=dtype, device=DEVICE) for _ in range(2))
    q_norm.weight.uniform_(0.5, 1.5)
    k_norm.weight.uniform_(0.5, 1.5)
    rows = 3 + torch.randperm(num_tokens * 2 * num_kv, device=DEVICE).view(num_tokens, -1)
    cache, expected = (torch.full((rows.numel() + 9, head_dim), float("nan"), device=DEVICE).to(dtype) for _ in "12")
    ours = qkv.clone()
    norms = (q_norm.weight, k_norm.weight) if has_norms else None
    rotate_and_write(ours, positions, rope.half_angles, norms, 1e-5, rows, cache)
    if has_norms:
        qkv[:, :num_q] = q_norm(qkv[:, :num_q])
        qkv[:, num_q : num_q + num_kv] = k_norm(qkv[:, num_q : num_q + num_kv])
    rope.rotate_(qkv[:, : num_q + num_kv], *rope.angles(positions))
    expected[rows] = qkv[:, num_q:]
    assert_near(ours[:, :num_q], qkv[:, :num_q], dtype)
    torch.testing.assert_close(cache, expected, equal_nan=True, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@needs_triton
@each_dtype
@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "per_token"), [(1, 128, 8), (5, 6, 3), (130, 16, 2), (700, 8, 2)]
)
def test_experts(
    dtype: torch.dtype, normalises: bool, by_library: bool, num_tokens: int, num_experts: int, per_token: int
) -> None:
    """With many rows for an expert torch multiplies, if it can."""
    from engine.kernels.fused_experts import experts, takes

    hidden, inner = 192, 128
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, device=DEVICE) * inner**-0.5).to(dtype)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    assert takes(gate_up, down)
    by_library = by_library and has_grouped_mm(gate_up)
    ours = experts(x, logits, gate_up, down, per_token, normalises=normalises, has_grouped_mm=by_library)
    shares, chosen = logits.softmax(-1).topk(per_token, dim=-1)
    if normalises:
        shares = shares / shares.sum(-1, keepdim=True)
    expected = torch.zeros(num_tokens, hidden, device=DEVICE)
    for slot in range(per_token):
        both = torch.einsum("th,tih->ti", x.float(), gate_up[chosen[:, slot]].float())
        gate, up = both.chunk(2, dim=-1)
        given = torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, down[chosen[:, slot]].float())
        expected += given * shares[:, slot : slot + 1]
    assert_near(ours.float(), expected, dtype)
