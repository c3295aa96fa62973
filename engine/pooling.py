"""From hidden states of a prompt's tokens to its embedding. Pure: the states come as sums, chunk by chunk."""

from __future__ import annotations

import math

from engine.messages import Embed, Pooling
from engine.request import Request


def add_pooled(request: Request, total: list[float]) -> None:
    """Adds a chunk's sum of hidden states `[hidden_size]` to what the request has."""
    if request.num_computed_tokens == 0 or not request.pooled:  # a preempted request begins anew
        request.pooled = total
    else:
        request.pooled = [a + b for a, b in zip(request.pooled, total, strict=True)]


def embedding(request: Request, embed: Embed) -> list[float]:
    """`[hidden_size]`, or the first `embed.dimensions`. A sum of zeros has no direction, and stays zeros."""
    values = request.pooled
    if embed.pooling is Pooling.MEAN:
        values = [value / request.num_prompt_tokens for value in values]
    values = values[: embed.dimensions or None]
    if not embed.normalize:
        return values
    length = math.sqrt(math.fsum(value * value for value in values))
    return [value / length for value in values] if length else values
