"""From a request's sampling parameters to the numbers that a device draws a token by."""

from __future__ import annotations

from common.sampling import SamplingParams
from engine.sampling.logit_changes import LogitChanges
from engine.step import Draw


def draw(
    params: SamplingParams, num_output_tokens: int, changes: LogitChanges | None = None, mask: bytes = b""
) -> Draw:
    """The draw of the answer's next token. `changes` have followed the `num_output_tokens` tokens so far."""
    return Draw(
        index=num_output_tokens,
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        num_top=params.logprobs,
        edits=None if changes is None else changes.edits(num_output_tokens),
        mask=mask,
    )
