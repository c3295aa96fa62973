"""A mixture of experts on a CUDA device: who is chosen, both products by expert, and the weighed sum (Triton).

Tokens that chose the same expert lie together in `order`; nobody waits to learn how many they are. A program has an
expert and some output columns, and goes through all rows of its expert, `BLOCK_M` at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.fused import silu_and_mul

LIBRARY_ROWS = 96  # of an expert on average, from which on torch's products by groups are faster than ours


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    logits, chosen, shares, num_experts,
    PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, NORMALISES: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < num_experts
    x = tl.load(logits + token * num_experts + at, inside, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, 0))
    left = tl.where(inside, x / tl.sum(x, 0), -1.0)
    slots = tl.arange(0, SLOTS)
    best = tl.zeros((SLOTS,), tl.float32)
    experts = tl.zeros((SLOTS,), tl.int32)
    for slot in tl.static_range(PER_TOKEN):
        expert = tl.argmax(left, 0)
        best = tl.where(slots == slot, tl.max(left, 0), best)
        experts = tl.where(slots == slot, expert, experts)
        left = tl.where(at == expert, -1.0, left)
    if NORMALISES:
        best = best / tl.sum(best, 0)
    tl.store(shares + token * PER_TOKEN + slots, best, slots < PER_TOKEN)
    tl.store(chosen + token * PER_TOKEN + slots, experts, slots < PER_TOKEN)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up(  # type: ignore[no-untyped-def]
    x, weights, order, bounds, out, hidden, inner,
    PER_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,  # noqa: N803
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < inner
    depth = tl.arange(0, BLOCK_K)
    gates = weights + expert * 2 * inner * hidden + column[None, :] * hidden + depth[:, None]
    ups = gates + inner * hidden
    for first in range(start, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        is_row = row < end
        token = tl.load(order + row, is_row, other=0) // PER_TOKEN
        rows = x + token[:, None] * hidden + depth[None, :]
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, hidden, BLOCK_K):
            a = tl.load(rows + k, is_row[:, None], other=0.0)
            gate = tl.dot(a, tl.load(gates + k, inside[None, :], other=0.0), gate)
            up = tl.dot(a, tl.load(ups + k, inside[None, :], other=0.0), up)
        kind = x.dtype.element_ty
        gate = gate.to(kind).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
        target = out + row[:, None] * inner + column[None, :]
        tl.store(target, activated.to(kind), is_row[:, None] & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _down(  # type: ignore[no-untyped-def]
    x, weights, order, bounds, out, inner, hidden,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,  # noqa: N803
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < hidden
    depth = tl.arange(0, BLOCK_K)
    matrix = weights + expert * hidden * inner + column[None, :] * inner + depth[:, None]
    for first in range(start, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        is_row = row < end
        pair = tl.load(order + row, is_row, other=0)
        rows = x + row[:, None] * inner + depth[None, :]
        given = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, inner, BLOCK_K):
            a = tl.load(rows + k, is_row[:, None], other=0.0)
            given = tl.dot(a, tl.load(matrix + k, inside[None, :], other=0.0), given)
        target = out + pair[:, None] * hidden + column[None, :]
        tl.store(target, given.to(x.dtype.element_ty), is_row[:, None] & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _weighed_sum(  # type: ignore[no-untyped-def]
    given, places, shares, out, hidden,
    HAS_PLACES: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        row = tl.load(places + pair) if HAS_PLACES else pair
        total += tl.load(given + row * hidden + at, inside, other=0.0).to(tl.float32) * tl.load(shares + pair)
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), inside)


def takes(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """If the weights have sizes that the products are made for."""
    return gate_up.shape[2] % 64 == 0 and down.shape[2] % 64 == 0


def experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    per_token: int,
    *,
    normalises: bool,
    has_grouped_mm: bool = False,
) -> torch.Tensor:
    """What the experts that `logits` `[num_tokens, num_experts]` choose give together, like `x`.

    `x` `[num_tokens, hidden]` contiguous; `gate_up` `[num_experts, 2 * inner, hidden]`, gates first, and `down`
    `[num_experts, hidden, inner]`, both contiguous; SiLU between. `normalises`: the shares of a token's experts add up
    to 1, else they are their probabilities. `has_grouped_mm`: torch has products by groups for these weights.
    """
    (num_tokens, hidden), num_experts = x.shape, len(down)
    chosen = torch.empty(num_tokens * per_token, dtype=torch.int32, device=x.device)
    shares = torch.empty(num_tokens * per_token, dtype=torch.float32, device=x.device)
    _choose[(num_tokens,)](
        logits,
        chosen,
        shares,
        num_experts,
        PER_TOKEN=per_token,
        SLOTS=triton.next_power_of_2(per_token),
        NORMALISES=normalises,
        BLOCK=triton.next_power_of_2(num_experts),
        num_warps=1,
    )
    sorted_experts, order = chosen.sort(stable=True)
    numbers = torch.arange(num_experts + 1, dtype=torch.int32, device=x.device)
    bounds = torch.searchsorted(sorted_experts, numbers)

    places: torch.Tensor | None = None
    if len(chosen) >= LIBRARY_ROWS * num_experts and has_grouped_mm:
        gathered = x.index_select(0, order // per_token)
        both = torch._grouped_mm(gathered, gate_up.transpose(1, 2), offs=bounds[1:].int())
        given = torch._grouped_mm(silu_and_mul(both), down.transpose(1, 2), offs=bounds[1:].int())
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=x.device)
    else:
        given = _products(x, gate_up, down, order, bounds, per_token)
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(hidden))
    _weighed_sum[(num_tokens, triton.cdiv(hidden, block))](
        given, order if places is None else places, shares, out, hidden,
        HAS_PLACES=places is not None, PER_TOKEN=per_token, BLOCK=block,
    )  # fmt: skip
    return out


def _products(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    order: torch.Tensor,
    bounds: torch.Tensor,
    per_token: int,
) -> torch.Tensor:
    """What each expert gives to each token that chose it, `[num_tokens * per_token, hidden]`, token by token."""
    hidden, num_experts, inner = x.shape[1], len(down), down.shape[2]
    between = x.new_empty(len(order), inner)
    given = x.new_empty(len(order), hidden)
    rows = min(64, max(16, triton.next_power_of_2(2 * len(order) // num_experts)))
    columns = 32 if rows <= 32 else 64
    _gate_up[(triton.cdiv(inner, columns), num_experts)](
        x, gate_up, order, bounds, between, hidden, inner,
        PER_TOKEN=per_token, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=_depth(hidden, rows), num_warps=4, num_stages=3,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, columns), num_experts)](
        between, down, order, bounds, given, inner, hidden,
        BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=_depth(inner, rows), num_warps=4, num_stages=3,
    )  # fmt: skip
    return given


def _depth(size: int, rows: int) -> int:
    return 128 if size % 128 == 0 and rows <= 32 else 64
