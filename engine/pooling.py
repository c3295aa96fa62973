"""From hidden states of a prompt's tokens to its embedding. Pure: the states come as sums, chunk by chunk."""

from __future__ import annotations

import math

from common.types import SampledToken
from engine.batch import Pooled
from engine.messages import Embed, Pooling
from engine.request import Request


def take_pooled(request: Request, result: SampledToken | Pooled | None) -> SampledToken | None:
    """Adds hidden states to what the request has; a token is returned as it is."""
    if not isinstance(result, Pooled):
        return result
    if request.num_computed_tokens == 0 or not request.pooled:  # a preempted request begins anew
        request.pooled = result.total
    else:
        request.pooled = [a + b for a, b in zip(request.pooled, result.total, strict=True)]
    return None


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
