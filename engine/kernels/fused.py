"""What stands between a decoder's matrix products on a CUDA device, each as one kernel (Triton comes with torch).

Sums and products are float32; results are rounded where the layers in plain torch round, but for angles, which stay
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(hidden, given, weight, out, eps, size, HAS_GIVEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    start = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(hidden + start + at, inside, other=0.0)
    if HAS_GIVEN:
        x = (x.to(tl.float32) + tl.load(given + start + at, inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(hidden + start + at, x, inside)
    wide = x.to(tl.float32)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps))
    scaled = normed.to(x.dtype).to(tl.float32) * tl.load(weight + at, inside, other=0.0).to(tl.float32)
    tl.store(out + start + at, scaled.to(x.dtype), inside)


def add_rms_norm(hidden: torch.Tensor, given: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `given` to `hidden` in place, and returns the root mean square norm of the sum times `weight`.

    `hidden` and `given` `[num_tokens, size]`, contiguous, of one dtype; `weight` `[size]`.
    """
    out = torch.empty_like(hidden)
    size = hidden.shape[1]
    block = triton.next_power_of_2(size)
    _add_rms_norm[(hidden.shape[0],)](
        hidden,
        hidden if given is None else given,
        weight,
        out,
        eps,
        size,
        HAS_GIVEN=given is not None,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv, positions, cos, sin, q_weight, k_weight, rows, cache, eps, stride, num_q, num_kv,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    source = qkv + token * stride + head * (2 * HALF)
    low, high = tl.load(source + at), tl.load(source + HALF + at)
    if head < num_q + num_kv:
        first, second = low.to(tl.float32), high.to(tl.float32)
        if HAS_NORM:
            of_low = tl.where(head < num_q, tl.load(q_weight + at), tl.load(k_weight + at)).to(tl.float32)
            of_high = tl.where(head < num_q, tl.load(q_weight + HALF + at), tl.load(k_weight + HALF + at))
            mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
            factor = 1.0 / tl.sqrt(mean + eps)
            first = (first * factor).to(low.dtype).to(tl.float32) * of_low
            second = (second * factor).to(low.dtype).to(tl.float32) * of_high.to(tl.float32)
            first, second = first.to(low.dtype).to(tl.float32), second.to(low.dtype).to(tl.float32)
        angle = tl.load(positions + token) * HALF + at
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        low, high = (first * c - second * s).to(low.dtype), (second * c + first * s).to(low.dtype)
    if head < num_q:
        tl.store(source + at, low)
        tl.store(source + HALF + at, high)
    else:
        target = cache + tl.load(rows + token * (2 * num_kv) + head - num_q) * (2 * HALF)
        tl.store(target + at, low)
        tl.store(target + HALF + at, high)


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    half_angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rows: torch.Tensor,
    cache_rows: torch.Tensor,
) -> None:
    """Norms Q and K if there are `norms`, rotates both, and writes K and V to the cache. Q is changed in place; K is
    not, since nobody reads it there.

    `qkv` `[num_tokens, num_q + 2 * num_kv heads, head_dim]`, contiguous, all of `head_dim` (a power of two) rotated.
    `half_angles` are cosines and sines, `[num_positions, head_dim / 2]` float32. `rows` `[num_tokens, 2 * num_kv]`
    int64: where K and V of each token go in `cache_rows` `[any, head_dim]`.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv = rows.shape[1] // 2
    q_weight, k_weight = norms or (qkv, qkv)
    _rotate_and_write[(num_tokens, num_heads)](
        qkv,
        positions,
        *half_angles,
        q_weight,
        k_weight,
        rows,
        cache_rows,
        eps,
        qkv.stride(0),
        num_heads - 2 * num_kv,
        num_kv,
        HAS_NORM=norms is not None,
        HALF=head_dim // 2,
        num_warps=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + token * 2 * size + at, inside, other=0.0)
    up = tl.load(gate_up + token * 2 * size + size + at, inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * size + at, (activated * up.to(tl.float32)).to(gate.dtype), inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[num_tokens, 2 * size]`, contiguous, gate first."""
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    block = min(1024, triton.next_power_of_2(width // 2))
    _silu_and_mul[(num_tokens, triton.cdiv(width // 2, block))](gate_up, out, width // 2, BLOCK=block)
    return out
