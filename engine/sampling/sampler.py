"""From logits to tokens, for a batch of requests that each want something else.

A draw inverts the distribution's cumulative sum at one uniform number that is a hash of (seed, token index). So a
token depends on its request and its logits alone: not on the batch, the device, the worker, or earlier draws.

On CPUs the kernels do all of it, row by row (`engine/kernels/source/sample.h`); elsewhere torch does, for all rows at
once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from common.sampling import MAX_LOGPROBS
from common.types import SampledToken, TokenLogprob
from engine.device_copies import read, to_device
from engine.kernels.library import ASKED, Kernels
from engine.kernels.sampling import sample_rows
from engine.step import Draw, LogitEdits

_NO_IDS = (0, 0, 0)
_FIRST_CANDIDATES = 1024  # most nuclei lie within these; sorting the whole vocabulary is 20 times slower


def sample(logits: torch.Tensor, draws: Sequence[Draw], kernels: Kernels | None = None) -> list[SampledToken | None]:
    """One token per row of `logits` `[num_rows, vocab_size]`, any float dtype; None for a row in which none is allowed.
    `logits` itself is left as it is.

    Penalties, bias, bans and masks change the logits of greedy rows too. Logprobs are of the model's own distribution,
    before any of that and before temperature.
    """
    raw = logits.float()
    masked = [row for row, item in enumerate(draws) if item.mask]
    masks = join_masks([draws[row].mask for row in masked]) if masked else None
    if kernels is not None:
        return _sample_with(kernels, raw.contiguous(), draws, masked, masks)
    return _choose(raw, _adjust(raw, draws, masked, masks), draws, _FIRST_CANDIDATES)


def join_masks(masks: Sequence[bytes]) -> torch.Tensor:
    """`[num_masks, bytes]` uint8, of masks that are equally long."""
    joined = bytearray().join(masks)
    return torch.frombuffer(joined, dtype=torch.uint8).view(len(masks), -1)


def _choose(
    raw: torch.Tensor, adjusted: torch.Tensor, draws: Sequence[Draw], num_candidates: int
) -> list[SampledToken | None]:
    """One token for each row of `adjusted`, with logprobs of `raw`. Waits for a device once, unless a nucleus turns out
    to be larger than `num_candidates`: such a row is drawn again, from its whole vocabulary."""
    device, num_rows = raw.device, len(draws)
    random = [row for row, item in enumerate(draws) if not item.is_greedy]
    mortal = [row for row, item in enumerate(draws) if item.mask or item.edits is not None]
    asking = [row for row, item in enumerate(draws) if item.num_top is not None]
    most_top = _most_top([draws[row].num_top or 0 for row in asking], raw.shape[-1])
    tokens = adjusted.argmax(dim=-1)
    nothing = tokens[:0]
    best, is_deep, logprobs = nothing, nothing, (nothing, nothing, nothing)
    if random:
        index = to_device(random, device)
        tokens[index], is_deep = _draw(adjusted[index], [draws[row] for row in random], num_candidates)
    if mortal:
        best = adjusted[to_device(mortal, device)].amax(-1)
    if asking:
        index = to_device(asking, device)
        logprobs = _logprobs(raw[index], tokens[index], most_top)
    came, best_of, deep, *scores = read([tokens, best, is_deep, *logprobs])
    result: list[SampledToken | None] = [SampledToken(int(token_id)) for token_id in came]
    for place, row in enumerate(asking):
        result[row] = _with_logprobs(int(came[row]), place, draws[row].num_top or 0, most_top, scores)
    dead = {row for row, value in zip(mortal, best_of, strict=True) if value == float("-inf")}
    again = [row for row, flag in zip(random, deep, strict=False) if flag and row not in dead]
    if again:
        index = to_device(again, device)
        whole = _choose(raw[index], adjusted[index], [draws[row] for row in again], raw.shape[-1])
        for row, token in zip(again, whole, strict=True):
            result[row] = token
    return [None if row in dead else result[row] for row in range(num_rows)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), the same everywhere for the same seed and token index."""
    data = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=6, person=b"baton-draw").digest()
    return int.from_bytes(digest, "little") * 2.0**-48


def _sample_with(
    kernels: Kernels,
    logits: torch.Tensor,
    draws: Sequence[Draw],
    masked: Sequence[int],
    masks: torch.Tensor | None,
) -> list[SampledToken | None]:
    """`masks` has one for each row of `masked`."""
    addresses = {}
    if masks is not None:
        addresses = dict(zip(masked, (mask.data_ptr() for mask in masks), strict=True))
    most_top = min(max((item.num_top or 0 for item in draws), default=0), logits.shape[-1])
    rows = [_kernel_row(item, addresses.get(row, 0), most_top) for row, item in enumerate(draws)]
    sampled = sample_rows(kernels, logits, np.array(rows, dtype=ASKED), most_top)
    result = [None if token_id < 0 else SampledToken(token_id) for token_id in sampled.tokens]
    for row, item in enumerate(draws):
        if item.num_top is not None and result[row] is not None:
            logprob, *values = sampled.logprobs[row].tolist()
            top = zip(sampled.top_ids[row, : item.num_top].tolist(), values, strict=False)
            result[row] = SampledToken(sampled.tokens[row], logprob, tuple(TokenLogprob(*one) for one in top))
    return result


def _kernel_row(item: Draw, mask: int, most_top: int) -> tuple[object, ...]:
    """The fields of `ASKED`. `mask`: its address, or 0."""
    edits = item.edits
    penalised = biased = allowed = banned = bad = _NO_IDS
    repetition, presence, frequency = 1.0, 0.0, 0.0
    if edits is not None:
        penalised = _addresses(edits.seen_ids, edits.counts)
        biased = _addresses(edits.bias_ids, edits.bias)
        allowed = _addresses(edits.allowed_ids)
        banned = _addresses(edits.banned_ids)
        bad = _addresses(edits.bad_ids)
        repetition, presence = edits.repetition_penalty, edits.presence_penalty
        frequency = edits.frequency_penalty
    return (
        *(penalised, biased, allowed, banned, bad, mask),
        0.0 if item.is_greedy else uniform(item.seed, item.index),
        *(item.top_p, _temperature(item), item.min_p),
        *(repetition, presence, frequency),
        item.top_k,
        -1 if item.num_top is None else min(item.num_top, most_top),
    )


def _temperature(item: Draw) -> float:
    """The temperature, within bounds in which it and its reciprocal are finite and not 0 in float32. Beyond them draws
    are the same."""
    return min(max(item.temperature, 1e-30), 1e30)


def _addresses(ids: array[int], numbers: array[float] | None = None) -> tuple[int, int, int]:
    if not ids:
        return _NO_IDS
    return (ids.buffer_info()[0], 0 if numbers is None else numbers.buffer_info()[0], len(ids))


def _adjust(
    raw: torch.Tensor, draws: Sequence[Draw], masked: Sequence[int], masks: torch.Tensor | None
) -> torch.Tensor:
    """Penalties, bias, bans, grammars, in this order, each for all rows at once; `raw` itself if no row asks. `masks`
    has one for each row of `masked`."""
    edits = [(row, item.edits) for row, item in enumerate(draws) if item.edits is not None]
    if not edits and masks is None:
        return raw
    adjusted = raw.clone()
    flat = adjusted.view(-1)
    size = raw.shape[-1]
    if penalised := [(row * size, edit) for row, edit in edits if edit.seen_ids]:
        _penalise(flat, penalised)
    if biased := [(row * size, edit) for row, edit in edits if edit.bias_ids]:
        bias = torch.cat([_floats(edit.bias) for _, edit in biased])
        at = _joined([(start, edit.bias_ids) for start, edit in biased], raw.device)
        flat[at] += to_device(bias, raw.device)
    if allowing := [(row, edit.allowed_ids) for row, edit in edits if edit.allowed_ids]:
        at = _joined([(row * size, ids) for row, ids in allowing], raw.device)
        kept = flat[at]
        adjusted[to_device([row for row, _ in allowing], raw.device)] = float("-inf")
        flat[at] = kept
    banned = [(row * size, edit.banned_ids) for row, edit in edits if edit.banned_ids]
    banned += [(row * size, edit.bad_ids) for row, edit in edits if edit.bad_ids]
    if banned:
        flat[_joined(banned, raw.device)] = float("-inf")
    if masks is not None:
        mask_logits(adjusted, masked, masks)
    return adjusted


def mask_logits(logits: torch.Tensor, rows: Sequence[int], masks: torch.Tensor) -> None:
    """Writes minus infinity for tokens that the masks of these rows do not allow, in place and in one pass.

    `logits` `[num_rows, vocab_size]` float32, maybe fewer columns than a mask has bits. `masks` has one for each of
    `rows`.
    """
    if logits.device.type == "cpu":  # row by row, each within the processor's cache
        table, allowed, values = _addends(logits.device).numpy(), masks.numpy(), logits.numpy()
        for index, row in enumerate(rows):
            values[row] += table.take(allowed[index], axis=0).reshape(-1)[: logits.shape[-1]]
        return
    addends = _addends(logits.device)[to_device(masks, logits.device).int()].view(len(rows), -1)
    logits[to_device(rows, logits.device)] += addends[:, : logits.shape[-1]]


@cache
def _addends(device: torch.device) -> torch.Tensor:
    """`[256, 8]` float32: what each byte of a mask adds to the logits of its eight tokens, lowest bit first."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return to_device(torch.zeros(256, 8).masked_fill(bits == 0, float("-inf")), device)


def _penalise(flat: torch.Tensor, rows: Sequence[tuple[int, LogitEdits]]) -> None:
    """Takes the rows' penalties from `flat`, in place. `rows`: where each row starts in `flat`."""
    device = flat.device
    at = _joined([(start, edit.seen_ids) for start, edit in rows], device)
    counts = to_device(torch.cat([_floats(edit.counts) for _, edit in rows]), device)
    penalties = [(e.repetition_penalty, e.presence_penalty, e.frequency_penalty) for _, e in rows]
    lengths = torch.tensor([len(edit.seen_ids) for _, edit in rows])
    of_each = to_device(torch.tensor(penalties).repeat_interleave(lengths, 0), device)
    repetition, presence, frequency = of_each.unbind(-1)
    values = flat.take(at)
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat.scatter_(0, at, values - (presence * (counts > 0) + frequency * counts))


def _joined(rows: Sequence[tuple[int, array[int]]], device: torch.device) -> torch.Tensor:
    """Where the rows' token ids lie in the flattened logits. The arrays may grow afterwards: nothing shares them."""
    return to_device(torch.cat([torch.frombuffer(ids, dtype=torch.int64) + start for start, ids in rows]), device)


def _floats(values: array[float]) -> torch.Tensor:
    """Shares the memory of `values`, which cannot grow as long as the tensor lives."""
    return torch.frombuffer(values, dtype=torch.float32)


def _draw(logits: torch.Tensor, draws: Sequence[Draw], num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[num_rows]` int64, drawn by each row's own parameters, none of which is greedy; and for which rows
    that is wrong, since top-p keeps more than `num_candidates`: `[num_rows]` bool, or `[0]` if it cannot be."""
    device = logits.device
    temperatures = to_device([_temperature(item) for item in draws], device, torch.float32)
    # The largest logit becomes 0 before the division: a tiny temperature must not overflow.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]).softmax(-1)
    filtered = [row for row, item in enumerate(draws) if item.top_k > 0 or item.top_p < 1 or item.min_p > 0]
    is_deep = torch.zeros(len(draws) if filtered else 0, dtype=torch.bool, device=device)
    if filtered:
        index = to_device(filtered, device)
        rows = probs[index]
        floor, is_deep[index] = _floors(rows, [draws[row] for row in filtered], num_candidates)
        probs[index] = rows.masked_fill_(rows < floor[:, None], 0)
    # In vocabulary order, so that tokens of equal probability come in the same order whatever the batch.
    cumulative = probs.double().cumsum(-1)
    uniforms = [uniform(item.seed, item.index) for item in draws]
    target = to_device(uniforms, device, torch.float64)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens, is_deep


def _floors(probs: torch.Tensor, draws: Sequence[Draw], num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least probability `[num_rows]` that each row keeps: top-k, then top-p of what is left, and min-p; and whether
    that is lower than all of `num_candidates`, and so not known.

    Tokens that tie with the least one kept are kept as well.
    """
    device, vocab_size = probs.device, probs.shape[-1]
    num_candidates = min(max([num_candidates, *(item.top_k for item in draws)]), vocab_size)
    ordered = probs.topk(num_candidates, dim=-1).values
    has_top_k = to_device([item.top_k > 0 for item in draws], device)
    last = to_device([min(item.top_k or num_candidates, num_candidates) - 1 for item in draws], device)
    floors = ordered[:, 0] * to_device([item.min_p for item in draws], device, probs.dtype)
    floors = torch.where(has_top_k, torch.maximum(floors, _at(ordered, last)), floors)
    is_deep = torch.zeros_like(has_top_k)
    nucleus = [row for row, item in enumerate(draws) if item.top_p < 1]
    if nucleus:
        rows = to_device(nucleus, device)
        top_p = to_device([draws[row].top_p for row in nucleus], device, torch.float64)
        least, reaches = _nucleus_floors(ordered[rows], top_p, has_top_k[rows], last[rows])
        floors[rows] = torch.maximum(floors[rows], least)
        if num_candidates < vocab_size:
            is_deep[rows] = ~reaches
    return floors, is_deep


def _nucleus_floors(
    ordered: torch.Tensor, top_p: torch.Tensor, has_top_k: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, the least probability in the smallest set of likeliest tokens that holds `top_p` of the mass; and
    whether the candidates reach so far.

    `ordered` `[num_rows, num_candidates]` are the likeliest tokens' probabilities, likeliest first. The mass of a row
    with top-k is that of its candidates up to `last`; of any other, that of the whole vocabulary.
    """
    cumulative = ordered.double().cumsum(-1)
    target = top_p * torch.where(has_top_k, _at(cumulative, last), 1.0)
    count = (cumulative < target[:, None]).sum(-1)  # tokens before the one that reaches the target
    return _at(ordered, torch.minimum(count, last)), has_top_k | (cumulative[:, -1] >= target)


def _at(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The value in column `columns[i]` of each row i."""
    return values.gather(1, columns[:, None])[:, 0]


def _most_top(num_top: Sequence[int], vocab_size: int) -> int:
    """How many likeliest tokens to take of each row. Normally the same for all requests, since which of equally likely
    tokens come first must not depend on other requests."""
    return min(max(MAX_LOGPROBS, *num_top), vocab_size) if any(num_top) else 0


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, most_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs of `tokens` `[num_rows]`, and of the likeliest ones of each row their ids and logprobs, each
    `[num_rows, most_top]`."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(most_top, dim=-1)
    return _at(logprobs, tokens), ids, values


def _with_logprobs(
    token_id: int, row: int, num_top: int, most_top: int, scores: Sequence[Sequence[float]]
) -> SampledToken:
    """The token of that row of what `_logprobs` gave, with so many likeliest ones."""
    own, ids, values = scores
    top = slice(row * most_top, (row + 1) * most_top)
    ordered = sorted(map(TokenLogprob, map(int, ids[top]), values[top]), key=lambda one: (-one.logprob, one.token_id))
    return SampledToken(token_id, own[row], tuple(ordered[:num_top]))
